"""The process that talks to a cluster ends with it; the server says so, and another one connects. Without Ray."""

from __future__ import annotations

import sys
import time

import pytest

from lorafusion_serve.control import ray_launcher
from lorafusion_serve.control.ray_launcher import RayLauncher

DRIVER = """
import json, os, pathlib, sys
gone = pathlib.Path(sys.argv[1])
if gone.exists():
    print(json.dumps({"problem": "no head"}), flush=True)
    sys.exit(1)
print(json.dumps({"value": True}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if gone.exists():
        os._exit(1)
    full = request["call"] == "start" and request["gpus"] > 8
    print(json.dumps({"problem": "no node has them"} if full else {"value": request["call"] == "find"}), flush=True)
"""


@pytest.fixture
def launch(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_launcher, "AGAIN_S", 0.02)
    (tmp_path / "driver.py").write_text(DRIVER)
    made: list[RayLauncher] = []

    def start(address) -> RayLauncher:
        made.append(RayLauncher(str(address), tmp_path, 1, driver=(sys.executable, "-S", str(tmp_path / "driver.py"))))
        return made[-1]

    yield start
    for launcher in made:
        launcher.close()


def test_a_cluster_that_is_lost_is_told_and_found_again(launch, tmp_path):
    gone = tmp_path / "gone"
    launcher = launch(gone)
    worker = launcher.start({"group": "g0", "epoch": 1, "gpus": []}, tmp_path / "log.txt")
    assert (launcher.problem, worker.has_ended()) == ("", False)
    gone.touch()
    assert not worker.has_ended()  # nobody knows
    assert launcher.problem == f"the Ray cluster {gone} cannot be reached."
    worker.terminate()
    worker.kill()
    assert launcher.find("g0", 1, None) is None
    with pytest.raises(ConnectionError, match="cannot be reached"):
        launcher.start({"group": "g0", "epoch": 2, "gpus": []}, tmp_path / "log.txt")
    gone.unlink()
    until = time.monotonic() + 60
    while launcher.problem:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert launcher.find("g0", 1, None) is not None


def test_what_ray_refuses_is_no_lost_cluster(launch, tmp_path):
    launcher = launch(tmp_path / "gone")
    with pytest.raises(RuntimeError, match="no node has them"):
        launcher.start({"group": "g0", "epoch": 1, "gpus": list(range(9))}, tmp_path / "log.txt")
    assert not launcher.problem


def test_a_cluster_that_is_not_there_is_refused(launch, tmp_path):
    (tmp_path / "gone").touch()
    with pytest.raises(ConnectionError, match="no head"):
        launch(tmp_path / "gone")
