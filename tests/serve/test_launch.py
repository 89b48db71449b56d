"""Workers of earlier servers are known by what they were started with, not by the number of their process alone."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from lorafusion_jax.serve.control.launch import WORKERS, LocalLauncher, identity_of

SERVER, OTHER = "unix:/srv/ours/control.sock", "unix:/srv/theirs/control.sock"


@pytest.fixture(params=WORKERS)
def process(request):
    """A process with the arguments of a worker of session g4, epoch 7; it only waits."""
    settings = json.dumps({"server": SERVER, "group": "g4", "epoch": 7})
    wait = "import sys; sys.stdin.read()"
    started = subprocess.Popen([sys.executable, "-c", wait, request.param, settings], stdin=subprocess.PIPE)
    until = time.monotonic() + 60
    while identity_of(started.pid) is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    with started:
        yield started
        started.kill()


def test_a_worker_is_found_by_its_service_session_and_epoch(process):
    assert LocalLauncher(SERVER).find("g4", 7, process.pid) is not None
    strangers = [(OTHER, "g4", 7), (SERVER, "g5", 7), (SERVER, "g4", 8)]
    for server, group, epoch in strangers:  # the number of its process went to another worker
        assert LocalLauncher(server).find(group, epoch, process.pid) is None
    assert LocalLauncher(SERVER).find("g4", 7, None) is None


def test_a_number_that_went_to_another_process_is_left_alone(process, monkeypatch):
    worker = LocalLauncher(SERVER).find("g4", 7, process.pid)
    assert worker is not None
    assert not worker.has_ended()
    monkeypatch.setattr("lorafusion_jax.serve.control.launch.identity_of", lambda pid: (OTHER, "g4", 7))
    assert worker.has_ended()
    worker.terminate()
    worker.kill()
    assert process.poll() is None
    monkeypatch.undo()
    worker.kill()
    assert process.wait(60) != 0
    assert worker.wait(60)


@pytest.mark.parametrize("words", [[], ["lorafusion_jax.serve.worker"], ["lorafusion_jax.serve.worker", "[]"]])
def test_other_processes_are_no_workers(words):
    wait = [sys.executable, "-c", "import sys; sys.stdin.read()", *words]
    with subprocess.Popen(wait, stdin=subprocess.PIPE) as started:
        assert identity_of(started.pid) is None
        started.kill()
