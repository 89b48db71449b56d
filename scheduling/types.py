"""Data types of jobs and plans."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np

from scheduling.errors import PlanError

MOST_SAMPLES = 20_000_000  # of an adapter over all epochs; a plan holds each of them


@dataclass(frozen=True, slots=True)
class AdapterJob:
    """One adapter to train: the lengths of its samples and how they form global batches.

    The samples are used in order, `epochs` times: position p of that stream is sample `p % n` of epoch `p // n`,
    and batch j holds the positions [j·g, (j+1)·g); the last batch may be short. Where the stream is cut, a batch ends
    early and the next one begins.

    Args:
        name: unique among the jobs of a plan.
        sample_tokens: tokens of each sample, in training order.
        global_batch: g, samples per optimizer step.
        epochs: how often the samples are used.
        weight: share of the machine relative to other jobs while both are active; equal weights mean
            "no preference", and the planner then shares so that the whole run is shortest.
        max_batches: stop after that many batches (None: all).
        cuts: positions of the stream that begin a batch, ascending: where it ended before it was extended.

    Raises:
        PlanError: a value cannot be planned. The message names adapter, index and length.

    >>> AdapterJob("law", [700, 300, 512], global_batch=2).num_batches
    2
    >>> list(AdapterJob("law", [64] * 6, global_batch=2, cuts=(3,)).batch_sizes())
    [(0, 2), (1, 1), (2, 2), (3, 1)]
    """

    name: str
    sample_tokens: Sequence[int]  # any sequence or array of whole numbers; stored as a tuple
    global_batch: int
    epochs: int = 1
    weight: float = 1.0
    max_batches: int | None = None
    cuts: tuple[int, ...] = ()

    def __post_init__(self):
        _check_name(self.name)
        object.__setattr__(self, "sample_tokens", _checked_lengths(self.name, self.sample_tokens))
        for field in ("global_batch", "epochs", "max_batches"):
            value = getattr(self, field)
            if value is not None or field != "max_batches":
                object.__setattr__(self, field, _checked_count(self.name, field, value))
        _check_weight(self.name, self.weight)
        object.__setattr__(self, "cuts", _checked_cuts(self.name, self.cuts, self._full_length))

    @property
    def num_samples(self) -> int:
        """Positions in the stream that are trained on, over all epochs."""
        if self.max_batches is None:
            return self._full_length
        try:
            return self.batch_positions(self.max_batches - 1).stop
        except IndexError:
            return self._full_length

    @property
    def num_batches(self) -> int:
        return self.batch_of(self.num_samples - 1) + 1

    def batch_of[Position: (int, np.ndarray)](self, position: Position) -> Position:
        """The global batch that a position of the stream is in."""
        batch, before, start = position // self.global_batch, 0, 0
        for cut in self.cuts:
            before, start = before - (start - cut) // self.global_batch, cut
            batch = batch + (position >= cut) * (before + (position - cut) // self.global_batch - batch)
        return batch

    def batch_starts(self) -> list[int]:
        """First position of every batch."""
        return self._batch_starts(self.num_samples)

    def batch_positions(self, batch: int) -> range:
        """Positions of a batch in the stream. Costs as much as there are cuts, whatever the number of samples."""
        first, before = 0, 0  # of the part of the stream between two cuts: its first position and batch
        for end in (*self.cuts, self._full_length):
            count = -(-(end - first) // self.global_batch)
            if batch < before + count:
                start = first + (batch - before) * self.global_batch
                return range(start, min(start + self.global_batch, end))
            first, before = end, before + count
        raise IndexError(f"{self.name} has no batch {batch}")

    def batch_sizes(self) -> Iterator[tuple[int, int]]:
        """Yields (batch, samples in it); a batch before a cut and the last one may be short."""
        for batch, (start, end) in enumerate(pairwise([*self.batch_starts(), self.num_samples])):
            yield batch, end - start

    @property
    def stream(self) -> np.ndarray:
        """Tokens at each position, int64[num_samples]."""
        return np.resize(np.asarray(self.sample_tokens, np.int64), self.num_samples)

    def ref(self, position: int) -> SampleRef:
        """The sample at a position of the stream."""
        epoch, sample = divmod(position, len(self.sample_tokens))
        return SampleRef(self.name, epoch, self.batch_of(position), sample)

    @property
    def _full_length(self) -> int:
        return len(self.sample_tokens) * self.epochs

    def _batch_starts(self, end: int) -> list[int]:
        edges = [0, *(cut for cut in self.cuts if cut < end), end]
        return [start for first, last in pairwise(edges) for start in range(first, last, self.global_batch)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Capacities of a microbatch, and the distance between batches of an adapter.

    Args:
        capacity_tokens: the largest capacity.
        smaller: other capacities that a slot may have, ascending.
    """

    capacity_tokens: int
    num_stages: int
    data_parallel: int = 1
    tile_tokens: int = 128
    smaller: tuple[int, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """All capacities, ascending."""
        return (*self.smaller, self.capacity_tokens)

    @property
    def tiles(self) -> int:
        """Whole tiles in a microbatch of the largest capacity."""
        return self.capacity_tokens // self.tile_tokens

    @property
    def slot_tiles(self) -> int:
        """Whole tiles in the largest microbatches of all replicas."""
        return self.tiles * self.data_parallel


class SampleRef(NamedTuple):
    """One use of one sample. A named tuple, because a plan may hold a million of them."""

    adapter: str
    epoch: int
    batch: int  # counts over all epochs
    sample: int  # index into the job's sample_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A position in the stream: one microbatch per data-parallel replica, or a no-op when all are empty.

    Args:
        capacity_tokens: rows of its microbatches (None: those of the plan, which has one capacity).
    """

    replicas: tuple[tuple[SampleRef, ...], ...]
    capacity_tokens: int | None = None

    @property
    def samples(self) -> tuple[SampleRef, ...]:
        return self.replicas[0] if len(self.replicas) == 1 else tuple(ref for part in self.replicas for ref in part)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Those with samples, in the order of their first ones."""
        return tuple(dict.fromkeys(ref.adapter for ref in self.samples))

    @property
    def is_noop(self) -> bool:
        return not any(self.replicas)


class Layout(NamedTuple):
    """Stages and replicas of a range of slots. Between two layouts the pipeline is empty and every step is taken."""

    end: int  # first slot after it
    num_stages: int
    data_parallel: int


def _checked_lengths(name: str, lengths: Sequence[object]) -> tuple[int, ...]:
    array = np.asarray(lengths)
    if array.ndim != 1 or array.size == 0:
        raise PlanError("plan.no-samples", f"{name}: no samples", fix="remove the adapter or give it data")
    if array.dtype.kind not in "iu":
        bad = next((i for i, n in enumerate(lengths) if not isinstance(n, (int, np.integer))), 0)
        raise PlanError("plan.sample-length", f"{name}: sample {bad} has length {lengths[bad]!r}, not a whole number")
    if (bad := np.flatnonzero(array <= 0)).size:
        raise PlanError(
            "plan.sample-length",
            f"{name}: sample {bad[0]} has {array[bad[0]]} tokens ({bad.size} such samples)",
            fix="drop samples without tokens before planning",
        )
    return tuple(array.tolist())


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise PlanError("plan.name", f"an adapter's name must be a non-empty string, not {name!r}")


def _check_weight(name: str, weight: object) -> None:
    if not isinstance(weight, (int, float)) or not (math.isfinite(weight) and weight > 0):
        raise PlanError(
            "plan.weight",
            f"{name}: weight must be a positive number, not {weight!r}",
            fix="weight: 1.0 (pause or cancel an adapter instead of giving it no weight)",
        )


def _checked_count(name: str, field: str, value: object) -> int:
    count = as_whole(value)
    if count is None or count < 1:
        raise PlanError("plan.count", f"{name}: {field} must be a whole number of at least 1, not {value!r}")
    return count


def _checked_cuts(name: str, cuts: Sequence[object], end: int) -> tuple[int, ...]:
    counts = tuple(as_whole(cut) for cut in cuts)
    edges = [0, *(-1 if cut is None else cut for cut in counts), end]
    if any(later <= earlier for earlier, later in pairwise(edges)):
        raise PlanError("plan.cuts", f"{name}: cuts must ascend from 1 to {end - 1}, not {list(cuts)}")
    return tuple(edges[1:-1])


def as_whole(value: object) -> int | None:
    """Returns a whole number as int; None for anything else, booleans included."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return int(value)
    return int(cast("np.integer[Any]", value)) if isinstance(value, np.integer) else None
