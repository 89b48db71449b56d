"""Data types of jobs and plans."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from scheduling.errors import PlanError


@dataclass(frozen=True, slots=True)
class AdapterJob:
    """One adapter to train: the lengths of its samples and how they form global batches.

    The samples are used in order, `epochs` times. Position p of that stream is sample `p % n` of epoch `p // n`, and
    batch j holds the positions [j·g, (j+1)·g). The last batch may be short.

    Args:
        name: unique among the jobs of a plan.
        sample_tokens: tokens of each sample, in training order.
        global_batch: g, samples per optimizer step.
        epochs: number of passes over the samples.
        weight: share of the devices relative to other active jobs. Equal weights mean no preference: the planner then
            minimises the length of the whole run.
        max_batches: stop after this number of batches (None: all).

    Raises:
        PlanError: a value cannot be planned. The message names adapter, index and length.

    >>> AdapterJob("law", [700, 300, 512], global_batch=2).num_batches
    2
    """

    name: str
    sample_tokens: Sequence[int]  # any sequence or array of whole numbers; stored as a tuple
    global_batch: int
    epochs: int = 1
    weight: float = 1.0
    max_batches: int | None = None

    def __post_init__(self):
        _check_name(self.name)
        object.__setattr__(self, "sample_tokens", _checked_lengths(self.name, self.sample_tokens))
        for field in ("global_batch", "epochs", "max_batches"):
            value = getattr(self, field)
            if value is not None or field != "max_batches":
                object.__setattr__(self, field, _checked_count(self.name, field, value))
        _check_weight(self.name, self.weight)

    @property
    def num_samples(self) -> int:
        """Number of positions in the stream, over all epochs."""
        whole = len(self.sample_tokens) * self.epochs
        return whole if self.max_batches is None else min(whole, self.max_batches * self.global_batch)

    @property
    def num_batches(self) -> int:
        return -(-self.num_samples // self.global_batch)

    def batch_sizes(self) -> Iterator[tuple[int, int]]:
        """Yields (batch, samples in it); the last batch may be short."""
        for batch in range(self.num_batches):
            yield batch, min(self.global_batch, self.num_samples - batch * self.global_batch)

    @property
    def stream(self) -> np.ndarray:
        """Tokens at each position, int64[num_samples]."""
        return np.resize(np.asarray(self.sample_tokens, np.int64), self.num_samples)

    def ref(self, position: int) -> SampleRef:
        """The sample at a position of the stream."""
        epoch, sample = divmod(position, len(self.sample_tokens))
        return SampleRef(self.name, epoch, position // self.global_batch, sample)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Capacity of a microbatch, and the distance between batches of an adapter."""

    capacity_tokens: int
    num_stages: int
    data_parallel: int = 1
    tile_tokens: int = 128

    @property
    def tiles(self) -> int:
        """Whole tiles in a microbatch."""
        return self.capacity_tokens // self.tile_tokens

    @property
    def slot_tiles(self) -> int:
        """Whole tiles in the microbatches of all replicas."""
        return self.tiles * self.data_parallel


class SampleRef(NamedTuple):
    """One use of one sample. A named tuple, because a plan may hold a million of them."""

    adapter: str
    epoch: int
    batch: int  # counts over all epochs
    sample: int  # index into the job's sample_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A position in the stream: one microbatch per data-parallel replica, or a no-op when all are empty."""

    replicas: tuple[tuple[SampleRef, ...], ...]

    @property
    def samples(self) -> tuple[SampleRef, ...]:
        return self.replicas[0] if len(self.replicas) == 1 else tuple(ref for part in self.replicas for ref in part)

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


def as_whole(value: object) -> int | None:
    """Returns a whole number as int; None for anything else, booleans included."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return int(value)
    return int(cast("np.integer[Any]", value)) if isinstance(value, np.integer) else None
