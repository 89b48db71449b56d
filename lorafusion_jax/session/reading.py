"""Reads a base model onto its devices while the stages compile, and then writes what it quantised to the cache."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import jax

from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.assemble import Microbatch
from lorafusion_jax.report.events import RunEvent
from lorafusion_jax.report.format import count
from lorafusion_jax.session.ahead import Ahead, requests_of
from lorafusion_jax.session.base import Base
from lorafusion_jax.session.executor import Executor
from lorafusion_jax.session.stage_weights import StageWeights

# Reads the base of a session, and compiles its programs meanwhile.


def load_and_compile(
    config: JobConfig,
    executor: Executor,
    reading: Reading,
    rows: Sequence[Microbatch],
    held_out: Sequence[Microbatch],
    ahead: Ahead,
    on_progress: Callable[[str], None],
) -> dict[str, Times]:
    """Waits for the base model and compiles meanwhile; see `Session.finish_loading`.

    Args:
        held_out: a microbatch of padding of each size of an evaluation; none: no adapter is evaluated.
    """
    base, total = f"reading {count(reading.num_bytes)}B", 0

    def report(programs: Sequence[str]) -> None:
        nonlocal total
        total = max(total, len(programs))
        compiling = [f"compiling {total - len(programs) + 1} of {total}: {', '.join(programs)}"] if programs else []
        running = [*compiling, *([] if reading.done else [base])]
        if running:
            on_progress("  ·  ".join(running))

    ahead.compile(lambda: requests_of(config, executor.local_stages, rows, held_out))
    try:
        times = executor.warm_up(rows, held_out, report, ahead) if rows else {}
    finally:  # also where a stage fails: a model that cannot be read is worse
        reading.finish()
    assert reading.times is not None
    return {BASE: reading.times, **times, **ahead.times}


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
