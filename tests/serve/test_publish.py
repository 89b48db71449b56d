"""Finished adapters go to other file systems and servers; the service keeps its own copy whatever happens there."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from simulated_service import Service, wait_for
from sqlalchemy import select

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.errors import ConfigError, install_line
from lorafusion_jax.serve.control import publish
from lorafusion_jax.serve.store import tables as t
from scheduling.online.policies.baselines import Packing


class Moody(MemoryFileSystem):
    """A store that refuses everything, or loses the ends of files, while it is told to."""

    protocol = "moody"
    mood = "good"
    store = {}  # noqa: RUF012

    def put_file(self, lpath, rpath, **options):
        if self.mood == "closed":
            raise PermissionError("403 Forbidden")
        super().put_file(lpath, rpath, **options)
        if self.mood == "short":
            self.pipe_file(rpath, self.cat_file(rpath)[:-1])


@pytest.fixture
def serve(tmp_path, tiny_base, monkeypatch):
    monkeypatch.setattr(publish, "AGAIN_S", 0.05)
    fsspec.register_implementation("moody", Moody, clobber=True)
    made: list[Service] = []

    def start(url: str) -> Service:
        made.append(Service(tmp_path / f"home-{len(made)}", tiny_base, Packing, artifacts=url))
        return made[-1]

    yield start
    for service in made:
        service.close()


def artifact(service: Service) -> dict:
    with service.db.read() as connection:
        return dict(connection.execute(select(t.artifacts)).mappings().one())


def kinds(service: Service) -> list[str]:
    with service.db.read() as connection:
        kinds = connection.execute(select(t.events.c.kind)).scalars().all()
    return [kind for kind in kinds if "published" in kind]


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_an_adapter_is_published_whole(serve, tmp_path, kind):
    root = f"file://{tmp_path}/bucket" if kind == "file" else "memory://bucket"
    service = serve(root + "/")
    job = service.submit("one", "red", steps=3)
    service.wait(job)
    wait_for(lambda: artifact(service)["url"])
    row = artifact(service)
    assert (row["url"], row["problem"]) == (f"{root}/ana/{job}/step-3", "")
    system, folder = fsspec.core.url_to_fs(row["url"])
    names = {Path(path).name for path in system.find(folder)}
    assert (
        names
        == {path.name for path in Path(service.settings.home, row["path"]).iterdir()}
        == {"SHA256SUMS", "adapter_model.safetensors"}
    )
    for path in Path(service.settings.home, row["path"]).iterdir():
        assert system.cat_file(f"{folder}/{path.name}") == path.read_bytes()
    assert kinds(service) == ["published"]


@pytest.mark.parametrize(("mood", "said"), [("closed", "403 Forbidden"), ("short", "has another size")])
def test_a_store_that_fails_keeps_the_adapter_and_says_so(serve, monkeypatch, mood, said):
    monkeypatch.setattr(Moody, "mood", mood)
    monkeypatch.setattr(Moody, "store", {})
    service = serve("moody://bucket")
    job = service.submit("one", "red", steps=3)
    service.wait(job)
    wait_for(lambda: artifact(service)["problem"])
    row = artifact(service)
    assert said in row["problem"]
    assert row["url"] == ""
    assert Path(service.settings.home, row["path"], "adapter_model.safetensors").exists()
    monkeypatch.setattr(Moody, "mood", "good")
    wait_for(lambda: artifact(service)["url"])
    assert kinds(service) == ["not-published", "published"]  # each once, however often it was tried
    assert not artifact(service)["problem"]


def test_digests_come_last(tmp_path, monkeypatch):
    """Who finds them finds every other file."""
    for name in ("zebra.bin", "SHA256SUMS", "adapter.bin"):
        (tmp_path / name).write_text(name)
    put: list[str] = []
    monkeypatch.setattr(MemoryFileSystem, "put_file", lambda self, local, remote: put.append(remote))
    monkeypatch.setattr(MemoryFileSystem, "info", lambda self, path: {"size": len(path.rpartition("/")[2])})
    publish.copy_folder(tmp_path, "memory://last")
    assert [path.rpartition("/")[2] for path in put] == ["adapter.bin", "zebra.bin", "SHA256SUMS"]


def test_a_place_of_no_known_kind_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=re.escape(install_line("artifacts"))) as problem:
        publish.Publisher("cloud9://bucket", None)  # type: ignore[arg-type]
    assert problem.value.code == "serve.artifacts"


class Vllm(BaseHTTPRequestHandler):
    """Answers as a vLLM that takes adapters while it runs, or as one that does not."""

    def do_GET(self):
        self.answer(200, {"data": [{"id": name} for name in self.server.adapters]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.refuses:
            self.answer(404, {"detail": "Not Found"})
        elif self.path == "/v1/load_lora_adapter":
            self.server.adapters[body["lora_name"]] = body["lora_path"]
            self.answer(200, "Success")
        else:
            self.server.asked.append(body["model"])
            self.answer(200, {"choices": [{"text": "Hello"}]})

    def answer(self, code, value):
        content = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format, *args):
        pass


@pytest.fixture
def vllm():
    with ThreadingHTTPServer(("127.0.0.1", 0), Vllm) as server:
        server.adapters, server.asked, server.refuses = {}, [], True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_an_adapter_is_loaded_into_a_server_at_the_end_of_its_job(tmp_path, tiny_base, monkeypatch, vllm):
    monkeypatch.setattr(publish, "AGAIN_S", 0.05)
    spec = AdapterSpec(name="one", rank=4, alpha=8, targets=("q_proj",))
    monkeypatch.setattr(publish, "read_adapter", lambda folder: (spec, {}))  # the simulated worker's is empty
    target = f"vllm=http://127.0.0.1:{vllm.server_port}"
    service = Service(tmp_path / "home", tiny_base, Packing, handover=target)
    try:
        job = service.submit("one", "red", steps=3)
        service.wait(job)
        wait_for(lambda: events(service))
        assert events(service)[0][0] == "not-handed-over"
        assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in events(service)[0][1]["reason"]
        vllm.refuses = False
        wait_for(lambda: vllm.asked)
        row = artifact(service)
        name = f"{row['id']}-step-3"
        wait_for(lambda: len(events(service)) == 2)  # each once, however often it was tried
        assert vllm.asked == [name]
        assert vllm.adapters == {name: str(service.settings.home / row["path"])}
        assert events(service)[1][0] == "handed-over"
        again = publish.HandOver(target, service.db, service.settings.home, service.settings.bases)
        assert again._undelivered() == []  # a new server knows what was handed over
    finally:
        service.close()


def events(service: Service) -> list[tuple[str, dict]]:
    with service.db.read() as connection:
        rows = connection.execute(select(t.events.c.kind, t.events.c.data).order_by(t.events.c.seq)).all()
    return [(kind, data) for kind, data in rows if "handed-over" in kind]


@pytest.mark.parametrize("target", ["vllm", "tgi=http://gpu:8000", "vllm=gpu:8000"])
def test_a_server_of_no_known_kind_is_refused(tmp_path, target):
    with pytest.raises(ConfigError) as problem:
        publish.HandOver(target, None, tmp_path, {})  # type: ignore[arg-type]
    assert problem.value.code in ("serve.handover", "handover.options")
