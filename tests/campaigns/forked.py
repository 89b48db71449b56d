"""Forked processes: each runs one command and leaves an exit code and a log.

Fork from a process that has imported everything and has not started a device: threads do not survive it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from lorafusion_jax.signals import stop_signals


class Child:
    """A forked process that runs one command; it is ready as soon as it handles signals."""

    def __init__(self, log: Path, work: Callable[[], int]):
        self.log = log
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(stream, 1)
                os.dup2(stream, 2)
                with stop_signals() as signals:
                    signals.watch()
                    os.write(writer, b".")
                    code = work()
                    signals.ending = True
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        os.close(writer)
        os.read(reader, 1)
        os.close(reader)
        self.began = time.monotonic()

    def has_ended(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait(self, limit_s: float = 600) -> int:
        """Exit code; a signal's number is negative."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        return -1000  # hung

    def wait_for(self, *texts: str) -> float | None:
        """Seconds until the log has one of these; None if the process ends without."""
        began = time.monotonic()
        while True:
            over = self.has_ended()
            if any(text in self.log.read_text(errors="replace") for text in texts):
                return round(time.monotonic() - began, 3)
            if over:
                return None
            time.sleep(0.01)
