"""A job in a worker, on its way into a place, in it, or out of it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lorafusion_jax.serve.worker.loading import Loaded
from lorafusion_jax.session import AdapterState
from lorafusion_jax.session.export import AdapterExport


@dataclass(slots=True, kw_only=True)
class Held:
    """A job in the session, or on its way into it.

    Attributes:
        state: newest state on the disk, of step `kept`.
        loading: None once it has started, because what was read takes memory.
        saved: last step whose state was read; it may not be on the disk yet.
        place: None until it has started, and once it has left.
        saving: the newest save of its state, which may be under way.
        reading: the adapter of a job that leaves, which is under way.
        export: of a job that is done, or the state of one that is stopped. It has no place any more once it is read.
        ends_as: the event of its end, if it has an export.
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
    reading: Future[AdapterState] | None = None
    export: AdapterExport[AdapterState] | None = None
    ends_as: Literal["finished", "stopped"] = "finished"
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
