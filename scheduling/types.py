"""What is planned (jobs) and what comes out (plan): frozen data, nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np

from scheduling.errors import PlanError


@dataclass(frozen=True, slots=True)
class AdapterJob:
    """One adapter to train: the lengths of its samples and how they form global batches.

    The samples are used in order, `epochs` times: position p of that stream is sample `p % n` of epoch `p // n`,
    and batch j holds the positions [j·g, (j+1)·g); the last batch may be short.

    Args:
        name: unique among the jobs of a plan.
        sample_tokens: tokens of each sample, in training order.
        global_batch: g, samples per optimizer step.
        epochs: how often the samples are used.
        weight: share of the machine relative to other jobs while both are active; equal weights mean
            "no preference", and the planner then shares so that the whole run is shortest.
        max_batches: stop after that many batches (None: all).

    Raises:
        PlanError: a value that cannot be planned; the message names adapter, index and length.

    >>> AdapterJob("law", [700, 300, 512], global_batch=2).num_batches
    2
    """

    name: str
    sample_tokens: Sequence[int]  # any sequence or array of whole numbers; kept as a tuple
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
        """Positions in the stream that are trained on, over all epochs."""
        whole = len(self.sample_tokens) * self.epochs
        return whole if self.max_batches is None else min(whole, self.max_batches * self.global_batch)

    @property
    def num_batches(self) -> int:
        return -(-self.num_samples // self.global_batch)

    @property
    def stream(self) -> np.ndarray:
        """Tokens at each position, int64[num_samples]."""
        return np.resize(np.asarray(self.sample_tokens, np.int64), self.num_samples)

    def ref(self, position: int) -> SampleRef:
        """Names the sample at a position of the stream."""
        epoch, sample = divmod(position, len(self.sample_tokens))
        return SampleRef(self.name, epoch, position // self.global_batch, sample)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a microbatch holds and how far batches must be apart."""

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
    """What a stretch of slots runs on. Between two stretches the pipeline is empty: every step has been taken."""

    end: int  # first slot that is not part of it
    num_stages: int
    data_parallel: int


@dataclass(frozen=True, kw_only=True)  # no __slots__: cached properties live in __dict__
class Plan:
    """Which sample runs in which slot; carries its jobs, so that it can be simulated and drawn alone.

    Args:
        jobs: everything that the plan trains, in the order given.
        slots: in the order of execution.
        lower_bound: no plan for these jobs can have fewer slots.
        stopped: (adapter, slot): nothing of that adapter runs from that slot on (cancelled or paused).
        earlier: what slots ran on before the run moved to this number of stages and replicas, in order.
    """

    jobs: tuple[AdapterJob, ...]
    slots: tuple[Slot, ...]
    capacity_tokens: int
    num_stages: int
    data_parallel: int = 1
    tile_tokens: int = 128
    seed: int = 0
    lower_bound: int = 0
    stopped: tuple[tuple[str, int], ...] = ()
    earlier: tuple[Layout, ...] = ()

    @property
    def num_slots(self) -> int:
        return len(self.slots)

    @property
    def limits(self) -> Limits:
        return Limits(
            capacity_tokens=self.capacity_tokens,
            num_stages=self.num_stages,
            data_parallel=self.data_parallel,
            tile_tokens=self.tile_tokens,
        )

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """What every stretch of slots runs on, in order; one stretch unless the run has moved."""
        return (*self.earlier, Layout(self.num_slots, self.num_stages, self.data_parallel))

    def layouts_before(self, slot: int) -> tuple[Layout, ...]:
        """The stretches of the slots before `slot` alone."""
        cut = [layout._replace(end=min(layout.end, slot)) for layout in self.layouts]
        starts = [0, *(layout.end for layout in cut)]
        return tuple(layout for start, layout in zip(starts, cut, strict=False) if start < layout.end)

    @cached_property
    def num_noops(self) -> int:
        return sum(slot.is_noop for slot in self.slots)

    @cached_property
    def job_of(self) -> dict[str, AdapterJob]:
        return {job.name: job for job in self.jobs}

    @cached_property
    def tokens(self) -> int:
        """Real tokens in all slots, without padding."""
        length = {job.name: job.sample_tokens for job in self.jobs}
        return sum(length[ref.adapter][ref.sample] for slot in self.slots for ref in slot.samples)

    @property
    def density(self) -> float:
        """Real tokens / room."""
        return self.tokens / self.room if self.room else 0.0

    @property
    def room(self) -> int:
        """Tokens that the slots could hold: slots · replicas · capacity."""
        starts = [0, *(layout.end for layout in self.earlier)]
        microbatches = sum(
            (layout.end - start) * layout.data_parallel for start, layout in zip(starts, self.layouts, strict=True)
        )
        return microbatches * self.capacity_tokens

    @property
    def gap(self) -> float:
        """How far the plan may be from the best one: slots / lower bound - 1."""
        return self.num_slots / self.lower_bound - 1 if self.lower_bound else 0.0

    def batches_ending(self) -> Iterator[tuple[int, str, int]]:
        """Yields (slot, adapter, batch) for each batch that is complete after that slot, in order of slots."""
        last: dict[tuple[str, int], int] = {}
        for index, slot in enumerate(self.slots):
            last.update({(ref.adapter, ref.batch): index for ref in slot.samples})
        yield from sorted((index, adapter, batch) for (adapter, batch), index in last.items())

    @cached_property
    def digest(self) -> str:
        """sha256 of the content; equal digests mean equal plans."""
        from scheduling.serialize import plan_digest

        return plan_digest(self)

    def to_json(self) -> str:
        """Writes the plan as readable JSON: one line per slot, with schema version, digest and statistics."""
        from scheduling.serialize import plan_to_json

        return plan_to_json(self)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Reads what `to_json` wrote, exactly.

        Raises:
            PlanError: broken JSON, another schema version, or a digest that does not match the content.
        """
        from scheduling.serialize import plan_from_json

        return plan_from_json(text)


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
    """Returns a whole number as int; None for anything else, true and false included."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return int(value)
    return int(cast("np.integer[Any]", value)) if isinstance(value, np.integer) else None
