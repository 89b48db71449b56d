"""Workers on the nodes of a Ray cluster: Ray finds a node with free GPUs, starts a worker there, and sees nodes die.

The server starts another worker with a higher epoch, from the states of its jobs. The worker connects to the server
over TCP, and both see the same home folder. A process of its own talks to Ray, see `ray_process`: without its cluster
it ends, the server says so and goes on, and another one connects when the cluster is back.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lorafusion_jax.serve.control.child import AnsweringProcess
from lorafusion_jax.serve.watched import start_watched
from lorafusion_jax.serve.wire import Message

DRIVER = (sys.executable, "-m", "lorafusion_jax.serve.control.ray_process")
CONNECT_S, ANSWER_S = 120.0, 30.0  # that the driver has
AGAIN_S, MOST_AGAIN_S = 2.0, 60.0  # between two attempts to connect
log = logging.getLogger("lorafusion.control")


class RayWorker:
    """A worker on some node. While the cluster is away its connection alone tells whether it lives."""

    def __init__(self, launcher: RayLauncher, name: str):
        self._launcher, self.name = launcher, name

    def has_ended(self) -> bool:
        """Whether the worker, its actor or its node is known to have ended."""
        return self.wait(0.0)

    def terminate(self) -> None:
        with suppress(ConnectionError):
            self._launcher.ask("terminate", name=self.name)

    def wait(self, seconds: float) -> bool:
        try:
            return self._launcher.ask("wait", limit_s=seconds + ANSWER_S, name=self.name, seconds=seconds)
        except ConnectionError:
            return False

    def kill(self) -> None:
        with suppress(ConnectionError):  # its epoch is over, and the start of its successor ends it
            self._launcher.ask("kill", name=self.name)


class RayLauncher:
    """Starts workers on a cluster.

    Args:
        address: of the cluster, as `ray.init` takes it: "auto", HOST:PORT, or ray://HOST:PORT.
        home: folder of the service, on a disk that all nodes share.
        gpus: of a worker whose arguments name none.
        driver: command of the process that talks to the cluster.

    Attributes:
        problem: why the cluster cannot be used now.

    Raises:
        ConnectionError: the cluster cannot be reached.
    """

    def __init__(self, address: str, home: Path, gpus: int, *, driver: Sequence[str] = DRIVER):
        self._address, self._gpus, self._driver, self.problem = address, gpus, driver, ""
        self._service = self.service_of(home)
        self._asking, self._closed = threading.Lock(), threading.Event()
        self._process: AnsweringProcess | None = self._connect()

    @staticmethod
    def service_of(home: Path) -> str:
        """What tells the actors of services apart. A home is the same one however it is written."""
        return hashlib.sha256(str(home.resolve()).encode()).hexdigest()[:8]

    def start(self, arguments: Message, log: Path) -> RayWorker:
        name = self._name(arguments["group"], arguments["epoch"])
        self.ask(
            "start",
            name=name,
            earlier=self._name(arguments["group"], ""),
            gpus=len(arguments["gpus"]) or self._gpus,
            arguments=json.dumps(arguments | {"gpus": []}),  # Ray says which GPUs the worker sees
            log=str(log),
        )
        return RayWorker(self, name)

    def find(self, group: str, epoch: int, pid: int | None) -> RayWorker | None:
        name = self._name(group, epoch)
        try:
            return RayWorker(self, name) if self.ask("find", name=name) else None
        except ConnectionError:
            return None

    def hosts(self, gpus: int) -> int | None:
        try:
            return self.ask("hosts", gpus=gpus)
        except (ConnectionError, RuntimeError):
            return None

    def close(self) -> None:
        """Ends the driver. Workers live on."""
        self._closed.set()
        with self._asking:
            if self._process is not None:
                self._process.end()
            self._process = None

    def ask(self, call: str, *, limit_s: float = ANSWER_S, **values: Any) -> Any:
        """Returns what a method of `ray_process.Driver` does.

        Raises:
            ConnectionError: the cluster is away.
            RuntimeError: what Ray says.
        """
        with self._asking:
            if self._process is None:
                raise ConnectionError(self.problem or "the connection to the cluster was closed")
            answer = _answer(self._process, {"call": call} | values, limit_s)
            if answer is None:
                self._lose(self._process)
                raise ConnectionError(self.problem)
        if "problem" in answer:
            raise RuntimeError(answer["problem"])
        return answer["value"]

    def _lose(self, process: AnsweringProcess) -> None:
        """Notes that the cluster is away, and connects again in the background."""
        process.end()
        self._process, self.problem = None, f"the Ray cluster {self._address} cannot be reached."
        start_watched("ray", self._connect_again, self._closed)

    def _connect_again(self) -> None:
        pause_s = AGAIN_S
        while not self._closed.wait(pause_s):
            try:
                process = self._connect()
            except ConnectionError as problem:
                log.warning("%s", problem)
                pause_s = min(2 * pause_s, MOST_AGAIN_S)
                continue
            with self._asking:
                if not self._closed.is_set():
                    self._process, self.problem = process, ""
                    return
            process.end()

    def _connect(self) -> AnsweringProcess:
        process = AnsweringProcess([*self._driver, self._address])
        answer = _answer(process, None, CONNECT_S)
        if answer is None or "problem" in answer:
            process.end()
            raise ConnectionError("its head does not answer" if answer is None else answer["problem"])
        _answer(process, {"call": "tidy", "earlier": f"lorafusion-{self._service}-"}, ANSWER_S)
        return process

    def _name(self, group: str, epoch: int | str) -> str:
        return f"lorafusion-{self._service}-{group}-e{epoch}"


def _answer(process: AnsweringProcess, request: Message | None, limit_s: float) -> Message | None:
    """Returns an answer; None if the process has ended, or does not answer in time."""
    try:
        return process.ask(request, limit_s)
    except (OSError, ValueError):
        return None
