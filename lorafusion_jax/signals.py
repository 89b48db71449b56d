"""SIGINT and SIGTERM: none is lost, the first is acknowledged at once, the second ends the process.

Python calls handlers between two bytecodes of the main thread: not while XLA compiles, and it prints and drops what a
handler raises inside a finalizer or a garbage collector's callback, such as jax's, which would end half-way. So nothing
is raised there, a signal is remembered besides being raised, and a thread that the interpreter wakes directly
acknowledges it and ends a process that does not end by itself.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130  # exit code
GRACE_S = 2.0  # so long a process may take to end by itself after the second signal
FIRST = "stopping; a second signal stops at once"
FIRST_WHILE_TRAINING = "stopping: what is under way is finished and the state saved; a second signal stops at once"
SECOND = "stopping at once"


class StopSignals:
    """The handler of both signals.

    Attributes:
        asked: set by the first signal, and for good.
        watched: this is a process of the command line, which keeps the handler to its end.
        ending: the process is about to end; signals raise nothing more.
    """

    def __init__(self) -> None:
        self.asked = threading.Event()
        self._deferring = 0
        self.watched = self.ending = False
        self._reported, self._reporting = 0, threading.RLock()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        first = not self.asked.is_set()
        self.asked.set()
        if self.watched:  # the process may end before the thread has its turn
            self._report(1 if first else 2)
        if not (self.ending or (self._deferring and first) or _in_callback(frame)):
            raise KeyboardInterrupt

    @contextmanager
    def deferring(self) -> Iterator[threading.Event]:
        """In the body the first signal only sets `asked`; the body checks it wherever it can stop."""
        self._deferring += 1
        try:
            yield self.asked
        finally:
            self._deferring -= 1

    def raise_again(self) -> None:
        """Raises KeyboardInterrupt if a signal came, and nothing while signals are deferred."""
        if self.asked.is_set() and not self._deferring:
            raise KeyboardInterrupt

    def watch(self) -> None:
        """Starts the thread that acknowledges signals and ends the process after the second one; once."""
        if self.watched:
            return
        self.watched = True
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._acknowledge, args=(reader, writer), name="signals", daemon=True).start()

    def _acknowledge(self, reader: socket.socket, writer: socket.socket) -> None:
        del writer  # the socket must live as long as this thread
        count = 0
        while count < 2:
            for number in reader.recv(1):
                if number in NUMBERS:
                    count += 1
                    self._report(count)
        time.sleep(GRACE_S)
        os._exit(INTERRUPTED)

    def _report(self, count: int) -> None:
        """Acknowledges the first or the second signal, once."""
        with self._reporting:
            if self._reported < count:
                self._reported = count
                _write_stderr(SECOND if count == 2 else FIRST_WHILE_TRAINING if self._deferring else FIRST)


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Handles SIGINT and SIGTERM within; the handler that is there already, if it is ours.

    Outside of the main thread nothing is handled, and nothing is ever asked.
    """
    if (handler := _current_handler()) is not None or threading.current_thread() is not threading.main_thread():
        yield handler or StopSignals()
        return
    handler = StopSignals()
    before = {number: signal.signal(number, handler) for number in NUMBERS}
    try:
        yield handler
    finally:
        for number, old in before.items() if not handler.watched else ():
            signal.signal(number, signal.SIG_DFL if old is None else old)  # None: not set by Python


@contextmanager
def deferred_stop() -> Iterator[threading.Event]:
    """Within, the first signal sets the event only; the second raises KeyboardInterrupt."""
    with stop_signals() as handler, handler.deferring() as asked:
        yield asked


def stop_if_asked() -> None:
    """Raises KeyboardInterrupt if a signal came that could not be raised; nothing within `deferred_stop`."""
    if (handler := _current_handler()) is not None:
        handler.raise_again()


def _in_callback(frame: FrameType | None) -> bool:
    """Whether the interpreter itself called what runs, so that an exception reaches nobody."""
    collecting = {code for call in gc.callbacks if (code := getattr(call, "__code__", None)) is not None}
    while frame is not None:
        code = frame.f_code
        if code in collecting or code.co_name == "__del__" or code.co_filename == weakref.__file__:
            return True
        frame = frame.f_back
    return False


def _current_handler() -> StopSignals | None:
    handler = signal.getsignal(signal.SIGTERM)
    return handler if isinstance(handler, StopSignals) else None


def _write_stderr(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"{text}\n".encode())
