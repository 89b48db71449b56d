"""Ends a process whose coordinator is gone with our own error and exit code.

The first process of a run is jax's coordinator. Once it is gone, jax's client aborts all others from a thread of C++,
with a stack trace and the code 134. No exception reaches Python, so the abort itself is caught.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading

from lorafusion_jax.errors import RunError
from lorafusion_jax.pipeline.failures import PROCESS_LOST

CONNECT_S = 1.0  # a coordinator on another host that is there answers sooner
_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)


class LostCoordinator:
    """What happens when the process is aborted.

    Args:
        address: host:port of the coordinator.

    Attributes:
        told: set once this process has said already that another one is lost.
    """

    def __init__(self, address: str):
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self.told = threading.Event()
        self._handler = _HANDLER(self._aborted)  # must live as long as the process

    def watch(self) -> None:
        """Replaces the handler of SIGABRT; Python's own handlers would run after the process has ended."""
        libc = ctypes.CDLL(None)
        libc.signal.restype = ctypes.c_void_p
        libc.signal(int(signal.SIGABRT), self._handler)

    def _aborted(self, number: int) -> None:
        if self._answers():  # another reason: abort goes on as usual
            return
        if not self.told.is_set():
            os.write(2, f"{self.error()}\n".encode())
        os._exit(RunError.exit_code)

    def _answers(self) -> bool:
        try:
            with socket.create_connection((self._host.strip("[]"), self._port), CONNECT_S):
                return True
        except OSError:
            return False

    def error(self) -> RunError:
        """The loss as users see it."""
        return RunError(
            PROCESS_LOST,
            "the first process of this run went away, or the network to it.",
            why=f"{self._host}:{self._port}, where it coordinated the others, does not answer",
            fix="read the end of that process's own output or log for the reason; then lorafusion resume RUN in all "
            "processes goes on from the last checkpoint, which stands",
        )
