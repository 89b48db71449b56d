"""A job in a worker, on its way into a place, in it, or out of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.serve.worker.loading import Loaded
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


@dataclass(slots=True, kw_only=True)
class Held:
    """A job in the session, or on its way into it.

    Attributes:
        state: newest state on the disk, of step `kept`.
        loading: None once it has started, because what was read takes memory.
        saved: last step whose state was read; it may not be on the disk yet.
        place: None until it has started, and once it has left.
        saving: the newest save of its state, which may be under way.
        departure: of a job that is done or stopped. It has no place any more once its adapter is read.
        leaves: whether the server has asked for it back.
        read_at: when its state was last read, or when it started.
        announced: whether it trains; until then its reference is computed.
        new_references: they are not in its folder yet.
    """

    job: str
    epoch: int
    name: str
    folder: Path
    wanted_place: int
    state: Path | None
    loading: Future[Loaded] | None
    saving: Future[None] | None = None
    departure: Departure | None = None
    leaves: bool = False
    kept: int = 0
    saved: int = 0
    place: int | None = None
    read_at: float = 0.0
    announced: bool = False
    new_references: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A state that is being read, while its job trains on."""

    held: Held
    state: Future[AdapterState]
