"""SIGINT and SIGTERM: none is lost, the first is acknowledged at once, the second ends the process, or the third while
the state is saved.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130  # exit code
GRACE_S = 2.0  # so long a process may take to end by itself after the second signal
CUT_S = 0.5  # so long a body may take to be cut before somebody is told that it takes longer
CUT = "the answer ends once what is compiled or computed now is ready; a second Ctrl-C stops at once"
FIRST = "stopping; a second signal stops at once"
FIRST_WHILE_TRAINING = "stopping: what is under way is finished and the state saved; a second signal stops at once"
SECOND = "stopping at once"
SECOND_WHILE_SAVING = "the state is being saved, then it stops; a third signal stops at once, without it"
SHOW_CURSOR = b"\x1b[?25h\n"  # a process that ends at once leaves its live view as it is


class StopSignals:
    """The handler of both signals.

    Attributes:
        asked: set by the first signal, and for good.
        watched: this is a process of the command line, which keeps the handler to its end.
        ending: the process is about to end; signals raise nothing more.
        show: shows a text instead of standard error: a live view paints over what is written below it.
        last_words: what a process says that has to be ended.
    """

    def __init__(self) -> None:
        self.asked = threading.Event()
        self._deferring = self._saving = self._calls = 0
        self.show: Callable[[str], None] | None = None
        self.last_words = ""
        self.watched = self.ending = False
        self._reported, self._reporting = 0, threading.RLock()
        self._cut: threading.Event | None = None
        self._cuts = 0  # interrupts that ended something else than the process

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._can_cut and self._cut is not None and not self._reported:
            self._cuts += 1
            self._cut.set()
            return
        self._calls += 1
        waits = (self._deferring and self._calls == 1) or (self._saving and self._calls == 2)
        self.asked.set()
        if self.watched:  # the process may end before the thread has its turn
            self._report(self._calls)
        if not (self.ending or waits or _in_callback(frame)):
            raise KeyboardInterrupt

    @contextmanager
    def deferring(self) -> Iterator[threading.Event]:
        """In the body the first signal only sets `asked`; the body checks it wherever it can stop."""
        self._deferring += 1
        try:
            yield self.asked
        finally:
            self._deferring -= 1

    @contextmanager
    def cutting(self) -> Iterator[threading.Event]:
        """In the body the first interrupt only sets the event: it asks for the end of the body, not of the process."""
        self._cut = threading.Event()
        try:
            yield self._cut
        finally:
            self._cut = None

    @property
    def _can_cut(self) -> bool:
        return self._cut is not None and not self._cut.is_set()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """In the body the second signal waits, too."""
        self._saving += 1
        try:
            yield
        finally:
            self._saving -= 1

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
        interrupts, others, ends = 0, 0, False
        while not ends:
            for number in reader.recv(1):
                if number in NUMBERS:
                    self._watch_cut(number)
                    interrupts, others = interrupts + (number == NUMBERS[0]), others + (number != NUMBERS[0])
                    count = others + max(interrupts - self._cuts - self._can_cut, 0)  # Python may not have called yet
                    ends = count > 2 or (count == 2 and not self._saving)
                    self._report(count)
        time.sleep(GRACE_S)
        with suppress(OSError):
            os.write(2, SHOW_CURSOR if self.show else b"")
        if self.last_words:
            _write_stderr(self.last_words)
        os._exit(INTERRUPTED)

    def _watch_cut(self, number: int) -> None:
        """Acknowledges an interrupt that is to cut a body, where the body goes on for longer."""
        cut = self._cut

        def report() -> None:
            if self._cut is cut and not self._reported:
                _write_stderr(CUT)

        if number == signal.SIGINT and cut is not None:
            timer = threading.Timer(CUT_S, report)
            timer.daemon = True
            timer.start()

    def _report(self, count: int) -> None:
        """Acknowledges a signal, once."""
        with self._reporting:
            if self._reported < min(count, 3):
                waits = count == 2 and self._saving
                self._reported = count if count == 1 or waits else 3
                first = FIRST_WHILE_TRAINING if self._deferring else FIRST
                text = first if count == 1 else SECOND_WHILE_SAVING if waits else SECOND
                (self.show or _write_stderr)(text)


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
        for number, action in before.items() if not handler.watched else ():
            signal.signal(number, signal.SIG_DFL if action is None else action)  # None: not set by Python


@contextmanager
def deferred_stop() -> Iterator[threading.Event]:
    """Within, the first signal sets the event only; the second raises KeyboardInterrupt."""
    with stop_signals() as handler, handler.deferring() as stop_event:
        yield stop_event


@contextmanager
def cutting() -> Iterator[threading.Event]:
    """Within, the first interrupt sets the event only: the body ends early, and the process goes on."""
    with stop_signals() as handler, handler.cutting() as cut:
        yield cut


@contextmanager
def saving() -> Iterator[None]:
    """Within, the second signal is acknowledged only, and the third raises KeyboardInterrupt."""
    with handler.saving() if (handler := _current_handler()) is not None else nullcontext():
        yield


@contextmanager
def shown_by(show: Callable[[str], None]) -> Iterator[None]:
    """Within, signals are acknowledged by `show`, from any thread and inside any call; it must not wait for a lock."""
    if (handler := _current_handler()) is None:
        yield
        return
    handler.show, before = show, handler.show
    try:
        yield
    finally:
        handler.show = before


@contextmanager
def last_words(text: str) -> Iterator[None]:
    """Within, a process that two signals cannot stop says this when it is ended."""
    handler = _current_handler() or StopSignals()
    handler.last_words = text
    try:
        yield
    finally:
        handler.last_words = ""


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
