"""Exports of adapters that have taken their last steps: read from the devices, then written from the host's copy."""

from __future__ import annotations

import time
from concurrent.futures import Executor, Future, wait
from pathlib import Path

from lorafusion_jax.engine import AdapterState, Task
from lorafusion_jax.engine.export import export_task
from lorafusion_jax.errors import LoraFusionError


class Export:
    """Writes an adapter in the background, once its weights are read.

    Args:
        weights: of the adapter, which are being read.
        pool: its threads write.
    """

    def __init__(self, task: Task, weights: Future[AdapterState], target: Path, *, name: str, pool: Executor):
        self.step, self.target = task.step, target
        self._task, self._weights, self._name, self._pool = task, weights, name, pool
        self._not_before = 0.0
        self._written: Future[None] | None = None
        self.write()

    @property
    def is_read(self) -> bool:
        """Whether the devices are not needed any more."""
        return self._weights.done()

    @property
    def waits(self) -> bool:
        """Whether it waits for a disk that took nothing."""
        return self._written is None

    @property
    def is_due(self) -> bool:
        """Whether it has to be written again now."""
        return self.waits and time.monotonic() >= self._not_before

    @property
    def has_ended(self) -> bool:
        return self._written is not None and self._written.done()

    @property
    def problem(self) -> LoraFusionError | None:
        """Why it was not written; None if it is on the disk."""
        assert self._written is not None
        try:
            self._written.result()
        except LoraFusionError as problem:
            return problem
        return None

    def check_read(self) -> None:
        """Raises what went wrong on the devices."""
        self._weights.result()

    def write(self) -> None:
        """Begins to write."""
        self._written = self._pool.submit(self._write)

    def write_later(self, seconds: float) -> None:
        """Makes it due again after a disk that took nothing."""
        self._written, self._not_before = None, time.monotonic() + seconds

    def wait(self) -> None:
        """Waits for what is under way."""
        wait([self._weights])
        wait([] if self._written is None else [self._written])

    def _write(self) -> None:
        export_task(self._task, self._weights.result(), self.target, name=self._name)
