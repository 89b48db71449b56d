"""Ends a process that has lost its coordinator with our own error and exit code.

The first process of a run is jax's coordinator. When it ends, jax's client aborts all others from a C++ thread, with a
stack trace and exit code 134. No exception reaches Python, so we handle SIGABRT.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading

from lorafusion_jax.errors import RunError
from lorafusion_jax.session.failures import PROCESS_LOST

CONNECT_S = 1.0  # a running coordinator on another host answers sooner
_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)


class LostCoordinator:
    """Handles the abort of this process.

    Args:
        address: host:port of the coordinator.

    Attributes:
        reported: set once this process has reported that another one is lost.
    """

    def __init__(self, address: str):
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self.reported = threading.Event()
        self._handler = _HANDLER(self._on_abort)  # must live as long as the process

    def watch(self) -> None:
        """Replaces the C handler of SIGABRT. Handlers of Python would run only after the process has ended."""
        libc = ctypes.CDLL(None)
        libc.signal.restype = ctypes.c_void_p
        libc.signal(int(signal.SIGABRT), self._handler)

    def _on_abort(self, number: int) -> None:
        if self._coordinator_answers():  # the abort has another reason: let it continue
            return
        if not self.reported.is_set():
            os.write(2, f"{self.error()}\n".encode())
        os._exit(RunError.exit_code)

    def _coordinator_answers(self) -> bool:
        try:
            with socket.create_connection((self._host.strip("[]"), self._port), CONNECT_S):
                return True
        except OSError:
            return False

    def error(self) -> RunError:
        """Returns the error to report."""
        return RunError(
            PROCESS_LOST,
            "the first process of this run is lost, or the network to it.",
            why=f"its coordinator at {self._host}:{self._port} does not answer",
            fix="read the end of that process's own output or log for the reason. Then lorafusion resume RUN in all "
            "processes continues from the last checkpoint, which is intact",
        )
