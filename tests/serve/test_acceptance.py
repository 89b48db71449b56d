"""The service as a whole: jobs of several users survive pauses, weights, a killed worker and a killed server.

Every adapter equals the one that the service trains when nothing else runs, bit for bit.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from campaigns.serve_forked import MODULES
from campaigns.service_process import PATIENCE_S, Server, specs, wait_for
from forked_commands import start_server
from more_cases import nightly
from safetensors.numpy import load_file
from training_service import Model, TrainingService

from lorafusion_jax.serve.client import Client, Job

GATE = """
import sys
if "lorafusion_jax.serve.worker" in sys.orig_argv:
    import pathlib, time
    from lorafusion_jax.serve.worker import loop
    export = loop.export_task
    def export_later(*given, **more):
        while not pathlib.Path({gate!r}).exists():
            time.sleep(0.02)
        return export(*given, **more)
    loop.export_task = export_later
"""


@contextmanager
def served(home: Path, base: Path, *more: str, forks: str = "") -> Iterator[Server]:
    server = Server(home, base, more=more, forks=forks)
    server.start()
    try:
        yield server
    finally:
        server.end(signal.SIGTERM)


def step(job: Job) -> int:
    shown = job.show()
    assert shown["state"] not in ("rejected", "failed", "done"), json.dumps(shown)
    return shown["step"]


@pytest.mark.parametrize("count", [2, nightly(3), nightly(12)])
def test_jobs_end_as_if_nothing_had_happened(quick_compiles, tiny_base, tmp_path, count):
    asked = list(specs(tmp_path, count))
    asked[0][1]["epochs"] *= 2  # it is paused before it ends, however late that is asked for
    # Server and workers start six times: none imports jax again.
    with served(tmp_path / "home", tiny_base, forks=start_server(*MODULES)) as server:

        def client(owner: str) -> Client:
            return Client(server.url, server.keys[owner])

        jobs = [client(owner).submit(spec) for owner, spec in asked]

        def again(number: int) -> Job:  # the server listens elsewhere after each start
            return Job(client(asked[number][0]), jobs[number].id)

        wait_for(lambda: step(again(0)) >= 2)
        again(0).pause()
        again(1).set_weight(3.0)
        wait_for(lambda: again(0).show()["state"] == "paused")
        os.kill(server.worker(), signal.SIGKILL)
        again(0).resume()
        wait_for(lambda: step(again(1)) >= 3)
        server.end(signal.SIGKILL)
        server.start()
        last = count - 1
        if count > 3:
            again(last).cancel()
        kept = range(last if count > 3 else count)
        adapters = [again(number).wait(PATIENCE_S).adapter(tmp_path / f"joint-{number}") for number in kept]
        if count > 3:
            wait_for(lambda: again(last).show()["state"] == "cancelled")
        events = [row["event"] for row in again(1).show()["transitions"]]
        assert "lost" in events
        assert again(1).show()["tries"] >= 1
        for number, joint in enumerate(adapters):
            owner, spec = asked[number]
            alone = client(owner).submit(spec).wait(PATIENCE_S).adapter(tmp_path / f"alone-{number}")
            ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (joint, alone))
            assert ours.keys() == theirs.keys()
            assert [key for key in ours if not (ours[key] == theirs[key]).all()] == []
            steps = [row["step"] for row in again(number).metrics() if row["kind"] == "step"]
            assert steps == list(range(1, again(number).show()["steps"] + 1))  # each once, whatever ran twice


class Remote:
    """What a model of the training API asks, wherever the server listens."""

    ask = TrainingService.ask

    def __init__(self, server: Server):
        self._server, self.keys = server, server.keys

    @property
    def url(self) -> str:
        return self._server.url


@pytest.mark.nightly
def test_calls_in_flight_end_as_if_nothing_had_happened(quick_compiles, tiny_base, tmp_path):
    """The worker is killed in the middle of twelve, then worker and server. Every result is that of a calm model."""
    rows = [[1, 2, 3, 4, 5], [3, 1, 4, 1, 5, 9, 2, 6], [7, 8]]
    with served(tmp_path / "home", tiny_base, "--training-api") as server:

        def send(model: Model) -> list[tuple[int, dict]]:
            turns = [(model.rows(rows), model.rows(rows[:2]), model.step(learning_rate=0.01)) for _ in range(4)]
            return [future for turn in turns for future in turn] + [model.rows(rows, forward_only=True)]

        calm = Model(Remote(server))
        wanted = [calm.result(future) for future in send(calm)]
        model = Model(Remote(server), session=calm.session, seq=1)
        futures = send(model)
        model.result(futures[2])
        os.kill(server.worker(), signal.SIGKILL)
        model.result(futures[5])
        os.kill(server.worker(), signal.SIGKILL)
        server.end(signal.SIGKILL)
        server.start()
        for future, expected in zip(futures, wanted, strict=True):
            result = model.result(future)
            if isinstance(expected, dict):
                assert result == expected
                continue
            (logprobs, metrics), (calm_logprobs, calm_metrics) = result, expected
            assert metrics == calm_metrics
            assert [row.tobytes() for row in logprobs] == [row.tobytes() for row in calm_logprobs]


@pytest.mark.nightly
def test_a_worker_that_is_killed_between_the_last_step_and_the_export_loses_nothing(
    quick_compiles, tiny_base, tmp_path, monkeypatch
):
    """Its place trains another job by then. The adapter is bitwise that of an undisturbed job, and is written once."""
    gate = tmp_path / "gate"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(GATE.format(gate=str(gate)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
    asked = list(specs(tmp_path, 4))
    for _, spec in asked[1:]:
        spec["epochs"] *= 20
    with served(tmp_path / "home", tiny_base) as server:

        def submit(number: int) -> Job:
            owner, spec = asked[number]
            return Client(server.url, server.keys[owner]).submit(spec)

        first = submit(0)
        wait_for(lambda: first.show()["state"] == "running" and first.show()["place"] is None)
        others = [submit(number) for number in (1, 2, 3)]  # as many as there are places
        wait_for(lambda: all(step(other) >= 1 for other in others))
        shown = first.show()
        assert (shown["state"], shown["step"]) == ("running", shown["steps"])
        os.kill(server.worker(), signal.SIGKILL)
        wait_for(lambda: first.show()["tries"] == 1)
        gate.touch()
        for other in others:
            other.cancel()
        moved = first.wait(PATIENCE_S).adapter(tmp_path / "moved")
        alone = submit(0).wait(PATIENCE_S).adapter(tmp_path / "alone")
        ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (moved, alone))
        assert [key for key in ours if not (ours[key] == theirs[key]).all()] == []
        steps = [row["step"] for row in first.metrics() if row["kind"] == "step"]
        assert steps == list(range(1, shown["steps"] + 1))
        written = list((tmp_path / "home" / "jobs" / first.id / "adapter").iterdir())
        assert [folder.name for folder in written] == [f"step-{shown['steps']}-e2"]
