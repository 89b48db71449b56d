"""How an adapter leaves its place: it is read from the devices, its place is free, and the host's copy is written."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Literal

from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.session import AdapterState


class Departure:
    """A job that leaves, because it is done or because it is stopped.

    Args:
        ends_as: the event of its end.
        step: that the adapter comes to.
        target: the folder that is written.
        read: of the adapter, which is under way.
        write: writes what was read, on a thread of `pool`.
    """

    def __init__(
        self,
        ends_as: Literal["finished", "stopped"],
        step: int,
        target: Path,
        read: Future[AdapterState],
        write: Callable[[AdapterState], object],
        pool: Executor,
    ):
        self.ends_as, self.step, self.target, self.read = ends_as, step, target, read
        self._write, self._pool = write, pool
        self._not_before = 0.0
        self._written: Future[object] | None = None

    @property
    def is_due(self) -> bool:
        """Whether a disk that took nothing shall be tried again now."""
        return self._written is None and time.monotonic() >= self._not_before

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

    def write(self) -> None:
        """Begins to write what was read.

        Raises:
            Exception: the devices could not be read.
        """
        self._written = self._pool.submit(self._write, self.read.result())

    def write_later(self, seconds: float) -> None:
        """Makes it due again after a disk that took nothing."""
        self._written, self._not_before = None, time.monotonic() + seconds
