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
from typing import Protocol

from lorafusion_serve.wire import Message

LOOK_S = 0.05


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

    def start(self, arguments: Message, log: Path) -> Worker:
        """Starts `python -m lorafusion_serve.worker ARGUMENTS`, which writes to a log.

        Args:
            arguments: with the group, its epoch, and numbers of its GPUs.
        """
        ...

    def find(self, group: str, epoch: int, pid: int | None) -> Worker | None:
        """Finds a worker that lives; for a server that has just started.

        Args:
            pid: of its process, if it has connected.
        """
        ...


class LocalWorker:
    """A process of this machine."""

    def __init__(self, pid: int, process: subprocess.Popen | None = None):
        self._pid, self._process = pid, process

    def has_ended(self) -> bool:
        return self._process.poll() is not None if self._process is not None else not is_worker(self._pid)

    def terminate(self) -> None:
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
        elif is_worker(self._pid):
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)


class LocalLauncher:
    """Starts workers on this machine."""

    def start(self, arguments: Message, log: Path) -> LocalWorker:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "lorafusion_serve.worker", json.dumps(arguments)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # it outlives a server that is killed
            )
        return LocalWorker(process.pid, process)

    def find(self, group: str, epoch: int, pid: int | None) -> LocalWorker | None:
        del group, epoch  # unused: the number of the process says it all
        return LocalWorker(pid) if pid is not None and is_worker(pid) else None


def is_worker(pid: int) -> bool:
    """Whether a process is a worker of this program; its number may have gone to another one."""
    try:
        return b"lorafusion_serve.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
