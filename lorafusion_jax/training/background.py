"""A single-threaded background queue. Callbacks run on the caller's thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class BackgroundQueue:
    """Runs work on its own thread, in order. After a failure it runs no more work.

    >>> queue = BackgroundQueue("example")
    >>> queue.submit(lambda: 1 + 1, print)
    >>> queue.poll(wait=True)
    2
    >>> queue.close()
    """

    def __init__(self, name: str):
        self._thread = ThreadPoolExecutor(1, name)
        self._pending: deque[tuple[Future[Any], Callable[[Any], None]]] = deque()
        self._failed = False

    def submit[T](self, work: Callable[[], T], on_done: Callable[[T], None]) -> None:
        """Queues work. A later `poll` calls `on_done` with its result."""
        self._pending.append((self._thread.submit(self._run, work), on_done))

    def poll(self, *, wait: bool = False) -> None:
        """Runs the callbacks of finished work in order, or raises its exception. With `wait`, waits for all work."""
        while self._pending and (wait or self._pending[0][0].done()):
            done, on_done = self._pending.popleft()
            on_done(done.result())

    def close(self) -> None:
        """Waits for queued work. Pending callbacks are dropped."""
        self._thread.shutdown(wait=True)

    def _run[T](self, work: Callable[[], T]) -> T | None:
        if self._failed:  # `poll` raises the first error
            return None
        try:
            return work()
        except BaseException:
            self._failed = True
            raise
