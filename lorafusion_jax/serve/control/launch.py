"""How workers are started, watched and ended. On this machine they are processes; see `ray_launcher` for a cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

from lorafusion_jax.serve.wire import Message

LOOK_S = 0.05
WORKER = "lorafusion_jax.serve.worker"  # the module that a worker runs
WORKERS = (WORKER, "lorafusion_serve.worker")  # and that of a worker which an earlier version has started
type Identity = tuple[str, str, int]


class Worker(Protocol):
    """A worker that was started. It outlives a server that is killed."""

    def has_ended(self) -> bool: ...

    def terminate(self) -> None:
        """Asks it to end: its jobs are saved."""

    def wait(self, seconds: float) -> bool:
        """Waits for its end. Returns whether it has ended."""
        ...

    def kill(self) -> None:
        """Ends it at once, also if it hangs. Does nothing if it has ended."""


class Launcher(Protocol):
    """Starts workers. A group has one worker at a time, and each has a higher epoch than the one before."""

    @property
    def problem(self) -> str:
        """Why no worker can be started now; empty if there is no reason."""
        ...

    def start(self, arguments: Message, log: Path) -> Worker:
        """Starts `python -m lorafusion_jax.serve.worker ARGUMENTS`, which writes to a log.

        Args:
            arguments: with the group, its epoch, and numbers of its GPUs.

        Raises:
            ConnectionError: as `problem` says.
        """
        ...

    def find(self, group: str, epoch: int, pid: int | None) -> Worker | None:
        """Finds a worker that lives; for a server that has just started.

        Args:
            pid: of its process, if it has connected.
        """
        ...

    def hosts(self, gpus: int) -> int | None:
        """How many hosts with so many GPUs are up; None if that is not known, or cannot change."""
        ...

    def close(self) -> None:
        """Lets go of workers, which live on."""


class LocalWorker:
    """A process of this machine.

    Args:
        identity: server, group and epoch, by which a process that is no child is known; see `identity_of`.
        process: if it is a child.
    """

    def __init__(self, pid: int, identity: Identity, process: subprocess.Popen | None = None):
        self._pid, self._identity, self._process = pid, identity, process

    def has_ended(self) -> bool:
        if self._process is not None:
            return self._process.poll() is not None
        return identity_of(self._pid) != self._identity

    def terminate(self) -> None:
        if not self.has_ended():
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)

    def wait(self, seconds: float) -> bool:
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
            return self.has_ended()
        until = time.monotonic() + seconds  # the child of an earlier server cannot be waited for
        while not self.has_ended() and time.monotonic() < until:
            time.sleep(LOOK_S)
        return self.has_ended()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        elif not self.has_ended():
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)


class LocalLauncher:
    """Starts workers on this machine.

    Args:
        server: where its workers connect: workers of other services have another one.
    """

    problem = ""

    def __init__(self, server: str):
        self._server = server

    def start(self, arguments: Message, log: Path) -> LocalWorker:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = start_worker(arguments, output, start_new_session=True)  # it outlives a server that is killed
        identity = (arguments["server"], arguments["group"], arguments["epoch"])
        return LocalWorker(process.pid, identity, process)

    def find(self, group: str, epoch: int, pid: int | None) -> LocalWorker | None:
        identity = (self._server, group, epoch)
        return LocalWorker(pid, identity) if pid is not None and identity_of(pid) == identity else None

    def hosts(self, gpus: int) -> None:
        pass

    def close(self) -> None:
        pass


def start_worker(arguments: Message, output: IO[bytes], **options: Any) -> subprocess.Popen:
    """Starts the process of a worker.

    Its secret goes through a pipe: everybody on a machine sees the arguments of its processes.

    Args:
        options: of `subprocess.Popen`.
    """
    secret = arguments.get("secret", "")
    process = subprocess.Popen(
        [sys.executable, "-m", WORKER, json.dumps(arguments | {"secret": bool(secret)})],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        **options,
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it may have ended
        os.write(process.stdin.fileno(), f"{secret}\n".encode())
    process.stdin.close()
    return process


def identity_of(pid: int) -> Identity | None:
    """Server, group and epoch of the worker that a process is; None if it is none.

    The number of a process that has ended may go to another one, also to a worker of another service. Its arguments
    tell them apart, because an epoch of a service is used once.
    """
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        index = next(index for index, word in enumerate(words) if word.decode(errors="replace") in WORKERS)
        arguments = json.loads(words[index + 1])
        return arguments["server"], arguments["group"], arguments["epoch"]
    except (OSError, StopIteration, ValueError, IndexError, KeyError, TypeError):
        return None
