"""A worker in a thread of the test: it speaks the protocol, counts steps and trains nothing."""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from lorafusion_jax.digests import write_digests
from lorafusion_jax.serve.worker.link import Link

STEP_S = 0.01
MOST_ROWS = 3  # steps of a message: each message is a transaction, which is most of what these tests cost


class SimulatedProcess:
    """What the server sees as a worker.

    Attributes:
        most_steps: where jobs wait.
        writes: adapters that are done are written while it is set.
    """

    most_steps: ClassVar[float] = math.inf
    writes: ClassVar[threading.Event] = threading.Event()
    writes.set()

    def __init__(self, server: str, group: str, epoch: int, places: int, poison: str = "", secret: str = ""):
        self._poison = poison
        self.jobs: dict[str, dict[str, Any]] = {}
        self.trained: set[str] = set()
        self.most_together, self._places = 0, places
        self._frozen = threading.Event()
        self.ended, self.code = threading.Event(), None
        self.link = Link(server, group, epoch, 0.1, self._holds, secret)
        self.link.emit("ready", device="simulated")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def has_ended(self) -> bool:
        return self.code is not None

    def terminate(self) -> None:
        """Ends in good order: jobs are saved."""
        self.ended.set()

    def wait(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def kill(self) -> None:
        if not self.ended.is_set():
            self.crash()
        self._thread.join()

    def crash(self) -> None:
        """Ends without a word."""
        self.code = -9
        self.link._ended.set()
        wire = self.link._wire
        if wire is not None:
            wire.close()
        self.ended.set()

    def freeze(self) -> None:
        """Stops without an end: nothing is sent or received."""
        self._frozen.set()
        self.link._beat_s = 1e6
        self.link._ended.wait(0.2)  # a beat that was under way

    def _holds(self) -> list[dict[str, Any]]:
        return [{"job": name, "epoch": job["epoch"]} for name, job in list(self.jobs.items())]

    def _run(self) -> None:
        while not self.ended.is_set():
            while self._frozen.is_set() and not self.ended.is_set():
                time.sleep(STEP_S)
            with suppress(queue.Empty):
                self._execute(self.link.commands.get(timeout=STEP_S))
            for name in list(self.jobs):
                self._step(name, self.jobs[name])
        if self.code is None:
            for name in list(self.jobs):
                self._stop(name)
            self.link.close()

    def _execute(self, command: dict[str, Any]) -> None:
        name = command.get("job", "")
        if command["command"] == "start" and name == self._poison:
            self.crash()
        elif command["command"] == "start" and name not in self.jobs:
            assert command["place"] < self._places
            assert command["place"] not in {job["place"] for job in self.jobs.values()}
            step = 0 if command["state"] is None else int(Path(command["state"]).name.rpartition("s")[2])
            self.jobs[name] = command | {"step": step, "steps": command["values"]["train"]["max_steps"]}
            self.trained.add(name)
            trains = sum(job["place"] is not None for job in self.jobs.values())
            self.most_together = max(self.most_together, trains)
            self.link.emit("started", job=name, epoch=command["epoch"], steps=self.jobs[name]["steps"])
        elif command["command"] == "stop" and name in self.jobs:
            self._stop(name)

    def _step(self, name: str, job: dict[str, Any]) -> None:
        if job["place"] is None:
            self._write(name, job)
            return
        if time.monotonic() < job.get("next", 0.0) or job["step"] >= self.most_steps:
            return
        before, job["step"] = job["step"], int(min(job["step"] + MOST_ROWS, job["steps"], self.most_steps))
        job["next"] = time.monotonic() + MOST_ROWS * STEP_S
        rows = [{"kind": "step", "step": step, "loss": 1.0 / step} for step in range(before + 1, job["step"] + 1)]
        self.link.emit("stepped", job=name, epoch=job["epoch"], rows=rows)
        if job["step"] == job["steps"]:
            job["place"] = None
            self.link.emit("vacated", job=name, epoch=job["epoch"])

    def _write(self, name: str, job: dict[str, Any]) -> None:
        if self.writes.is_set():
            folder = Path(job["folder"]) / "adapter" / f"step-{job['step']}-e{job['epoch']}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "adapter_model.safetensors").write_bytes(os.urandom(8))
            write_digests(folder)
            self.link.emit("finished", job=name, epoch=job["epoch"], step=job["step"], path=str(folder))
            del self.jobs[name]

    def _stop(self, name: str) -> None:
        if self.jobs[name]["place"] is None:
            return  # it ends once it is written
        job = self.jobs.pop(name)
        path = Path(job["folder"]) / "state" / f"e{job['epoch']}-s{job['step']}"
        path.mkdir(parents=True, exist_ok=True)
        saved = str(path) if job["step"] else None
        self.link.emit("stopped", job=name, epoch=job["epoch"], step=job["step"], path=saved)


class SimulatedLauncher:
    """Starts threads instead of processes; they end with the server.

    Attributes:
        poison: a job that ends its worker.
        made, plans: all workers and their places, by session.
        problem: why none can be started.
        up: hosts that are up (None: not known).
    """

    problem: ClassVar[str] = ""
    up: ClassVar[int | None] = None
    made: ClassVar[dict[str, list[SimulatedProcess]]] = {}
    poison: ClassVar[str] = ""
    plans: ClassVar[dict[str, list[dict[str, int]]]] = {}

    def start(self, arguments: dict[str, Any], log: Path) -> SimulatedProcess:
        del log  # unused: threads say nothing
        places, group = arguments["places"], arguments["group"]
        process = SimulatedProcess(
            arguments["server"], group, arguments["epoch"], sum(places.values()), self.poison, arguments["secret"]
        )
        self.made.setdefault(group, []).append(process)
        self.plans.setdefault(group, []).append({str(name): count for name, count in places.items()})
        return process

    def find(self, group: str, epoch: int, pid: int | None) -> None:
        return None

    def hosts(self, gpus: int) -> int | None:
        return self.up

    def close(self) -> None:
        pass
