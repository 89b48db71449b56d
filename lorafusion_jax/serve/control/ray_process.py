"""python -m lorafusion_jax.serve.control.ray_process ADDRESS: the driver of a Ray cluster, one JSON request a line.

Ray ends the process of a driver that lost its cluster, so the server is none. A worker is the child of a detached actor
in a placement group of one bundle, so all its GPUs are of one node. Ray does not restart actors.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from lorafusion_jax.serve.control.launch import start_worker

NAMESPACE = "lorafusion"
DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
FINDS_S = 5.0  # to ask whether an actor lives


class Supervisor:
    """The actor: runs a worker as its child, and leaves with it, whether or not there is a server then."""

    def __init__(self, arguments: str, log: str):
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as output:
            self._process = start_worker(
                json.loads(arguments),
                output,
                preexec_fn=lambda: ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL),
            )
        threading.Thread(target=self._leave, args=(import_module("ray.util"),), daemon=True).start()

    def _leave(self, util: Any) -> None:
        """Gives back the placement group, and the actor in it, once the worker has ended."""
        self._process.wait()
        try:
            util.remove_placement_group(util.get_current_placement_group())
        finally:
            os._exit(0)  # Ray does not start it again

    def wait(self) -> int:
        """Waits for the end of the worker."""
        return self._process.wait()

    def pid(self) -> int:
        return self._process.pid

    def terminate(self) -> None:
        self._process.terminate()


class Driver:
    """Starts, finds and ends actors by name."""

    def __init__(self, address: str):
        self._ray, self._actors = import_module("ray"), dict[str, tuple[Any, Any]]()  # actor, and its end
        self._ray.init(address=address, namespace=NAMESPACE, log_to_driver=False)
        self._util = import_module("ray.util")

    def tidy(self, earlier: str) -> None:
        """Removes placement groups of actors that have ended, such as those of nodes and servers that were lost.

        Args:
            earlier: what the names of the service's actors begin with.
        """
        for name in self._rooms(earlier):
            try:
                self._ray.get_actor(name, namespace=NAMESPACE)
            except ValueError:
                self._remove_room(name)

    def start(self, name: str, earlier: str, gpus: int, arguments: str, log: str) -> None:
        """Starts a worker.

        Args:
            earlier: what the names of its predecessors begin with. They may live if the cluster was away meanwhile.
        """
        for room in self._rooms(earlier):
            self._remove_room(room)
        bundle = {"CPU": 1.0} | ({"GPU": float(gpus)} if gpus else {})
        room = self._util.placement_group([bundle], strategy="STRICT_PACK", name=name, lifetime="detached")
        strategies = import_module("ray.util.scheduling_strategies")
        actor = (
            self._ray.remote(Supervisor)
            .options(
                name=name,
                namespace=NAMESPACE,
                lifetime="detached",
                max_restarts=0,
                max_concurrency=4,  # a call that waits, and others
                num_cpus=1,
                num_gpus=gpus,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(placement_group=room),
            )
            .remote(arguments, log)
        )
        self._actors[name] = actor, actor.wait.remote()

    def find(self, name: str) -> bool:
        """Whether there is an actor that answers."""
        try:
            actor = self._ray.get_actor(name, namespace=NAMESPACE)
            self._ray.get(actor.pid.remote(), timeout=FINDS_S)
        except (ValueError, self._ray.exceptions.RayError):
            return False
        self._actors[name] = actor, actor.wait.remote()
        return True

    def hosts(self, gpus: int) -> int:
        """How many times so many GPUs the nodes have that are alive; without GPUs, how many nodes there are."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return sum(int(node.get("GPU", 0.0)) // gpus for node in nodes) if gpus else len(nodes)

    def wait(self, name: str, seconds: float) -> bool:
        """Whether a worker, its actor or its node has ended."""
        if name not in self._actors and not self.find(name):
            return True
        refs, _ = self._ray.wait([self._actors[name][1]], timeout=seconds)
        return bool(refs)

    def terminate(self, name: str) -> None:
        if name in self._actors or self.find(name):
            self._actors[name][0].terminate.remote()

    def kill(self, name: str) -> None:
        if name in self._actors or self.find(name):
            self._ray.kill(self._actors.pop(name)[0], no_restart=True)
        self._remove_room(name)

    def _rooms(self, earlier: str) -> list[str]:
        groups = self._util.placement_group_table().values()
        return [group["name"] for group in groups if group["name"].startswith(earlier) and group["state"] != "REMOVED"]

    def _remove_room(self, name: str) -> None:
        """Removes a placement group, and with it the actor in it."""
        with suppress(ValueError):
            self._util.remove_placement_group(self._util.get_placement_group(name))


def main() -> int:
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer

    def answer(**values: Any) -> None:
        output.write(json.dumps(values) + "\n")
        output.flush()

    try:
        driver = Driver(sys.argv[1])
    except (ImportError, ConnectionError, RuntimeError, ValueError) as problem:
        answer(problem=str(problem) or type(problem).__name__)
        return 1
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends with the server, whose workers save their jobs first
    answer(value=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer(value=getattr(driver, request.pop("call"))(**request))
        except Exception as problem:  # of Ray; the server decides
            answer(problem=str(problem) or type(problem).__name__)
    return 0


if __name__ == "__main__":
    sys.exit(main())
