"""Work on the side of a run, on one thread of its own; what came of it is told by the thread that asks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Behind:
    """Does one piece of work after the other.

    >>> side = Behind("example")
    >>> side.begin(lambda: 1 + 1, print)
    >>> side.tell(wait=True)
    2
    >>> side.close()
    """

    def __init__(self, name: str):
        self._thread = ThreadPoolExecutor(1, name)
        self._under_way: deque[tuple[Future[Any], Callable[[Any], None]]] = deque()

    def begin[T](self, work: Callable[[], T], told: Callable[[T], None]) -> None:
        """Starts work; `told` gets its result in a later call of `tell`."""
        self._under_way.append((self._thread.submit(work), told))

    def tell(self, *, wait: bool = False) -> None:
        """Tells the results that are there, in order, or raises what went wrong; waits for all if asked."""
        while self._under_way and (wait or self._under_way[0][0].done()):
            done, told = self._under_way.popleft()
            told(done.result())

    def close(self) -> None:
        """Waits for the work under way; nobody hears of it any more."""
        self._thread.shutdown(wait=True)
