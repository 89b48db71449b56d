"""Workers on the nodes of a Ray cluster: Ray finds a node with free GPUs, starts a worker there, and sees nodes die.

A worker is the child of a detached actor in a placement group of one bundle, so all its GPUs are of one node. Ray does
not restart actors: the server starts another worker with a higher epoch, from the states of its jobs. The worker
connects to the server over TCP, and both see the same home folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import signal
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from lorafusion_serve.wire import Message

NAMESPACE = "lorafusion"
DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
FINDS_S = 5.0  # to ask whether an actor lives


class Supervisor:
    """The actor: runs a worker as its child."""

    def __init__(self, arguments: str, log: str):
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lorafusion_serve.worker", arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL),
            )

    def wait(self) -> int:
        """Waits for the end of the worker."""
        return self._process.wait()

    def pid(self) -> int:
        return self._process.pid

    def terminate(self) -> None:
        self._process.terminate()


class RayWorker:
    """A worker on some node."""

    def __init__(self, ray: Any, name: str, actor: Any):
        self._ray, self.name, self.actor, self._ended = ray, name, actor, actor.wait.remote()

    def has_ended(self) -> bool:
        """Whether the worker, its actor or its node has ended."""
        return self.wait(0)

    def terminate(self) -> None:
        self.actor.terminate.remote()

    def wait(self, seconds: float) -> bool:
        ended, _ = self._ray.wait([self._ended], timeout=seconds)
        return bool(ended)

    def kill(self) -> None:
        self._ray.kill(self.actor, no_restart=True)
        util = import_module("ray.util")
        with suppress(ValueError):
            util.remove_placement_group(util.get_placement_group(self.name))


class RayLauncher:
    """Starts workers on a cluster.

    Args:
        address: of the cluster, as `ray.init` takes it: "auto", HOST:PORT, or ray://HOST:PORT.
        home: folder of the service, on a disk that all nodes share.
        gpus: of a worker whose arguments name none.
    """

    def __init__(self, address: str, home: Path, gpus: int):
        self._ray = import_module("ray")
        if not self._ray.is_initialized():
            self._ray.init(address=address, namespace=NAMESPACE, log_to_driver=False)
        self._service, self._gpus = hashlib.sha256(str(home).encode()).hexdigest()[:8], gpus

    def start(self, arguments: Message, log: Path) -> RayWorker:
        name = self._name(arguments["group"], arguments["epoch"])
        gpus = len(arguments["gpus"]) or self._gpus
        needed = {"CPU": 1.0} | ({"GPU": float(gpus)} if gpus else {})
        room = import_module("ray.util").placement_group(
            [needed], strategy="STRICT_PACK", name=name, lifetime="detached"
        )
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
            .remote(json.dumps(arguments | {"gpus": []}), str(log))  # Ray says which GPUs the worker sees
        )
        return RayWorker(self._ray, name, actor)

    def find(self, group: str, epoch: int, pid: int | None) -> RayWorker | None:
        name = self._name(group, epoch)
        try:
            actor = self._ray.get_actor(name, namespace=NAMESPACE)
            self._ray.get(actor.pid.remote(), timeout=FINDS_S)
        except (ValueError, self._ray.exceptions.RayError):
            return None
        return RayWorker(self._ray, name, actor)

    def _name(self, group: str, epoch: int) -> str:
        return f"lorafusion-{self._service}-{group}-e{epoch}"
