"""Runs a session on a thread of its own: windows of slots, and work that callers give it between two windows."""

from __future__ import annotations

import atexit
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from lorafusion_jax.errors import CallError, ServerCallError
from lorafusion_jax.session.session import Session
from lorafusion_jax.session.stream import settle
from lorafusion_jax.session.windows import WindowPlanner

HORIZON = 48  # slots of a window


class SessionThread:
    """A session whose methods run on one thread, until `close`. It sleeps while there is nothing to do."""

    def __init__(self, session: Session):
        self._process = os.getpid()
        self._session, self._work = session, queue.SimpleQueue[tuple[Callable[[Session], Any], Future[Any]]]()
        self._awake, self._closing, self._problem = threading.Event(), False, ""
        self._entering = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="session", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # devices must not work when Python ends

    @property
    def is_copy(self) -> bool:
        """Whether this process is a fork of the session's, in which no thread runs."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Checks that this process is the session's: in a fork of it nothing would ever answer.

        Raises:
            CallError: `call.other-process`.
        """
        if self.is_copy:
            raise other_process()

    def do[T](self, work: Callable[[Session], T]) -> Future[T]:
        """Runs work between two windows. Its result or exception comes in the future.

        Raises:
            CallError: `call.other-process`.
        """
        self.check_process()
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        with self._entering:
            if self._problem:
                settle(future, _ended(self._problem))
            else:
                self._work.put((work, future))
        self._awake.set()
        return future

    def wake(self) -> None:
        """Says that there is something to do."""
        self._awake.set()

    def close(self) -> None:
        """Ends the thread and the session. Calls without a result fail. In a fork of the process it does nothing."""
        if self.is_copy:
            return
        self._closing = True
        self._awake.set()
        self._thread.join()
        atexit.unregister(self.close)

    def _run(self) -> None:
        reason = "the session was closed"
        try:
            self._serve()
        except BaseException as problem:  # whatever it is, callers must not wait forever
            reason = str(problem) or type(problem).__name__
        with self._entering:
            self._problem = reason
        for task in self._session.tasks.values():
            task.source.close(reason)
        while not self._work.empty():
            settle(self._work.get()[1], _ended(reason))
        self._session.close()

    def _serve(self) -> None:
        windows = WindowPlanner(self._session)
        while not self._closing:
            while not self._work.empty():
                self._do(*self._work.get())
            window = windows.plan(HORIZON)
            windows.run(window, pause=lambda: self._closing or not self._work.empty())
            if not window.slots and not windows.has_calls and self._work.empty():
                self._session.drain()
                self._awake.wait()
                self._awake.clear()

    def _do(self, work: Callable[[Session], Any], future: Future[Any]) -> None:
        try:
            settle(future, work(self._session))
        except Exception as problem:
            settle(future, problem)


def _ended(why: str) -> ServerCallError:
    return ServerCallError("call.closed", "the session has ended.", why=why)


def other_process() -> CallError:
    """The error of a client, or a result to come, that is sent to another process or copied into one."""
    return CallError(
        "call.other-process",
        "a client works in the process that opened it.",
        why="its base, its devices and its thread are not copied, by fork or by pickle",
        fix="call it where it was opened, and send data, tokens and results to other processes",
    )
