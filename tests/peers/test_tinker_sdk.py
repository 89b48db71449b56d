"""The unmodified `tinker` SDK against the training API, whose models are tables of bigrams here.

`make test-peers` makes its environment and names its Python in LORAFUSION_PEERS. Versions: requirements.txt; older ones
of the SDK are in folders beside it.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2

from lorafusion_jax.serve.tinker.messages import file_descriptor

HERE = Path(__file__).parent
OLDER = ("0.30.4", "0.34.0", "0.36.0")
PEERS = os.environ.get("LORAFUSION_PEERS", "")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PEERS, reason="LORAFUSION_PEERS names no Python with tinker; make test-peers"),
]


def run(*arguments: str, cwd: Path | None = None, **environment: str) -> bytes:
    done = subprocess.run([PEERS, *arguments], capture_output=True, cwd=cwd, env=os.environ | environment)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()[-6000:]
    return done.stdout


def test_messages_are_those_of_the_installed_sdk():
    code = (
        "import sys; from tinker.proto import tinker_public_pb2 as m;"
        " sys.stdout.buffer.write(m.DESCRIPTOR.serialized_pb)"
    )
    theirs, ours = descriptor_pb2.FileDescriptorProto.FromString(run("-c", code)), file_descriptor()

    def by_name(file: descriptor_pb2.FileDescriptorProto) -> dict[str, object]:
        return {part.name: part for part in (*file.message_type, *file.enum_type)}

    assert by_name(ours) == by_name(theirs)
    assert ours.package == theirs.package


LOCAL = {"close", "get_console_url", "get_telemetry", "on_queue_state_change", "whoami"}  # ask nothing of a server


def test_every_call_of_the_public_clients_is_made():
    code = """if True:
        import tinker
        for client in (tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, tinker.RestClient,
                       tinker.AdminClient):
            print(*(name for name in dir(client) if not name.startswith("_") and callable(getattr(client, name))))
    """
    names, source = set(run("-c", code).decode().split()), (HERE / "tinker_calls.py").read_text()
    refused = set(re.findall(r'"(\w+)": \(', source))  # in both forms, where they have two
    called = set(re.findall(r"\w+", source)) | {f"{name}_async" for name in refused}
    assert "forward_backward" in names
    assert names - called == LOCAL


class BadProxy:
    """Loses a fifth of the requests before or after they are executed, repeats a fifth, and delays a fifth."""

    def __init__(self, app: Any):
        self._app, self._random = app, random.Random(0)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        fate = self._random.choice(("lost", "repeated", "late", "", ""))
        if scope["type"] != "http" or not fate or "/files/" in scope["path"]:  # the SDK asks for files once
            await self._app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())

        async def discard(message: Any) -> None:
            pass

        if fate == "late":
            await asyncio.sleep(self._random.uniform(0, 0.5))
        if fate == "repeated" or (fate == "lost" and self._random.random() < 0.5):
            await self._app(scope, _replay(messages, receive), discard)
        if fate == "lost":
            await send({"type": "http.response.start", "status": 502, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        else:
            await self._app(scope, _replay(messages, receive), send)


def _replay(messages: list[Any], receive: Any) -> Any:
    rest = iter(messages)

    async def replay() -> Any:
        return next(rest, None) or await receive()

    return replay


def same(app: Any) -> Any:
    return app


CASES = [pytest.param("", same, id="direct"), pytest.param("", BadProxy, id="proxy")]
for version in OLDER:
    CASES += [pytest.param(version, same, id=version), pytest.param(version, BadProxy, id=f"{version}-proxy")]


@pytest.mark.parametrize(("version", "wrap"), CASES)
def test_all_calls_of_the_sdk(tmp_path, tiny_base, version, wrap):
    sys.path.insert(0, str(HERE.parent / "serve"))
    from training_service import TrainingService

    older = Path(PEERS).parents[1] / f"tinker-{version}"
    if version and not older.is_dir():
        pytest.skip(f"{older} is not there; make test-peers")
    service = TrainingService(tmp_path / "home", tiny_base, places={4: 6}, wrap=wrap)
    try:
        script = str(HERE / "tinker_calls.py")
        more = {"PYTHONPATH": str(older)} if version else {}
        shown = run(script, service.url, service.keys["ana"], cwd=tiny_base.parent, **more).decode()
    finally:
        service.close()
    assert "failed" not in shown
    assert shown.count("passed") >= 13
    assert f"tinker {version}" in shown
