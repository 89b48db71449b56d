"""The process that talks to a cluster ends with it; the server says so, and another one connects. Without Ray."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from campaigns.service_process import wait_for

from lorafusion_jax.serve.control import ray_launcher, ray_process
from lorafusion_jax.serve.control.ray_launcher import RayLauncher

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
    wait_for(lambda: not launcher.problem)
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


class Ray:
    """What the driver and the actor use of Ray: placement groups and actors by name."""

    def __init__(self, rooms, actors):
        self.rooms, self.actors = dict.fromkeys(rooms, "CREATED"), actors
        self.util, self.exceptions = self, self

    def placement_group_table(self):
        return {name: {"name": name, "state": state} for name, state in self.rooms.items()}

    def get_actor(self, name, namespace):
        if name not in self.actors:
            raise ValueError(name)

    def get_placement_group(self, name):
        return name

    def get_current_placement_group(self):
        return next(iter(self.rooms))

    def remove_placement_group(self, room):
        self.rooms[room] = "REMOVED"

    def init(self, **_):
        pass

    def nodes(self):
        counts = (True, 8.0), (False, 8.0), (True, 17.0), (True, 4.0)
        heads = [{"Alive": True, "Resources": {"CPU": 4.0}}]
        return heads + [{"Alive": alive, "Resources": {"GPU": gpus}} for alive, gpus in counts]


def test_an_actor_leaves_with_its_worker(tmp_path, monkeypatch):
    """Without a server, too: its placement group is gone and it ends."""
    ray, ended = Ray(["lorafusion-a-g0-e1"], []), threading.Event()
    monkeypatch.setattr(ray_process, "import_module", lambda name: ray)
    monkeypatch.setattr(ray_process, "start_worker", lambda *_, **__: subprocess.Popen(["true"]))
    monkeypatch.setattr(ray_process.os, "_exit", lambda code: ended.set())
    actor = ray_process.Supervisor('{"secret": "x"}', str(tmp_path / "logs" / "log.txt"))
    assert ended.wait(60)
    assert ray.rooms == {"lorafusion-a-g0-e1": "REMOVED"}
    assert actor.wait() == 0


def test_a_server_that_starts_gives_back_what_nobody_uses(monkeypatch):
    """Of its own service only: actors that live go on."""
    names = ["lorafusion-a-g0-e1", "lorafusion-a-g1-e4", "lorafusion-b-g0-e1", "mine"]
    ray = Ray(names, ["lorafusion-a-g1-e4"])
    monkeypatch.setattr(ray_process, "import_module", lambda name: ray)
    ray_process.Driver("auto").tidy("lorafusion-a-")
    assert [name for name, state in ray.rooms.items() if state == "REMOVED"] == names[:1]


def test_hosts_are_counted_by_the_gpus_of_nodes_that_live(monkeypatch):
    monkeypatch.setattr(ray_process, "import_module", lambda name: Ray([], []))
    driver = ray_process.Driver("auto")
    assert [driver.hosts(gpus) for gpus in (8, 4, 32, 0)] == [3, 7, 0, 4]
