"""Reads a base model onto its devices while the stages compile, and then writes what it quantised to the cache."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait

import jax

from lorafusion_jax.report.events import RunEvent
from lorafusion_jax.session.base import Base
from lorafusion_jax.session.stage_weights import StageWeights

Times = tuple[float, float]  # start and end by `time.perf_counter`
BASE = "base"  # name of this part of a start


class _Cancelled(Exception):
    """Reading was cancelled."""


class Reading:
    """Starts to read at once. `finish` gives the stages their weights. The cache is written in the background.

    If devices lack the memory to compile meanwhile, or there are several processes, which must keep one order, the
    constructor waits until all is read.

    Attributes:
        times: start and end; None until all is read.
        from_cache: whether the quantised kernels come from the cache.
    """

    def __init__(self, base: Base):
        self._base, self._cancelled, self._began = base, threading.Event(), time.perf_counter()
        self.times: Times | None = None
        self.from_cache = base.cached.hit
        self._thread = ThreadPoolExecutor(1, "base")
        self._weights: Future[list[StageWeights]] | None = self._thread.submit(self._read)
        self._stored = self._thread.submit(base.cached.store, self._cancelled.is_set)  # one thread: after reading
        if not base.roomy or jax.process_count() > 1:
            self.finish()

    @property
    def num_bytes(self) -> int:
        return self._base.cached.reader.num_bytes

    @property
    def done(self) -> bool:
        return self._weights is None or self._weights.done()

    def finish(self) -> None:
        """Waits for the weights.

        Raises:
            CheckpointError: a file is broken.
        """
        if self._weights is not None:
            self._base.give(self._weights.result())
            self._weights = None  # stages hold the weights, and may replace them

    def wait_stored(self, timeout: float) -> bool:
        """Waits for the cache. Returns whether all is written that will be."""
        wait([self._stored], timeout)
        return self._stored.done() and self._stored.result() is None

    def take_notices(self) -> list[RunEvent]:
        """Returns what a user should see about the cache, each notice once."""
        notices = self._base.cached.notices
        return [notices.pop(0) for _ in range(len(notices))]

    def cancel(self) -> None:
        """Stops reading or writing after the current tensor."""
        self._cancelled.set()
        self._thread.shutdown()

    def _read(self) -> list[StageWeights]:
        weights = self._base.read(self._check_cancelled)
        self.times = self._began, time.perf_counter()
        return weights

    def _check_cancelled(self, size: int) -> None:
        if self._cancelled.is_set():
            raise _Cancelled
