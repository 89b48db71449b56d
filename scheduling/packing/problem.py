"""The packing problem: jobs and limits as plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, repeat

import numpy as np

from scheduling.plan import Plan
from scheduling.types import AdapterJob, Limits, SampleRef, Slot

MANY = 1 << 512  # masks above it are read by numpy, ...
FEW = 16  # ... but for so few bits, which are found one by one
Part = tuple[int, int, int]  # (job, batch, bit mask over the batch's samples in ascending order of length)
Microbatch = tuple[Part, ...]
Filling = list[tuple[Microbatch, ...]]  # per slot, per replica
# Of a million samples the constructor in Python takes half a second.
_REF: Callable[[Iterable[object]], SampleRef] = partial(tuple.__new__, SampleRef)  # pyright: ignore[reportUnknownMemberType]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One global batch, or the rest of it. Samples are in ascending order of length.

    Args:
        slots: minimum number of slots that it needs.
        tail: minimum number of slots after its last slot, up to the last slot of its job.
    """

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    total: int
    full_mask: int
    slots: int
    tail: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The samples to plan and the limits of a plan.

    Args:
        jobs: jobs with their samples; `batches` may cover a part of them.
        batches: per job, in order.
        ready: per job, the first slot in which its first batch may run (above 0 only when replanning).
        most_open: as in `make_plan`.
        rests: of each job, as in `make_plan`.
    """

    jobs: tuple[AdapterJob, ...]
    batches: tuple[tuple[Batch, ...], ...]
    ready: tuple[int, ...]
    limits: Limits
    most_open: int | None = None
    rests: tuple[tuple[int, ...], ...] = ()

    @property
    def tiles(self) -> int:
        return self.limits.tiles

    @property
    def sizes(self) -> tuple[int, ...]:
        """Whole tiles in a microbatch of each capacity, ascending."""
        return tuple(size // self.tile_tokens for size in self.limits.sizes)

    @property
    def tile_tokens(self) -> int:
        return self.limits.tile_tokens

    @property
    def num_stages(self) -> int:
        return self.limits.num_stages

    @property
    def data_parallel(self) -> int:
        return self.limits.data_parallel

    @property
    def slot_tokens(self) -> int:
        return self.tiles * self.tile_tokens * self.data_parallel

    @property
    def waits(self) -> bool:
        """Whether other replicas or the next stage wait for the slowest microbatch."""
        return self.num_stages * self.data_parallel > 1

    @property
    def weighted(self) -> bool:
        """Whether weights differ. Equal weights leave the planner free to make the run short."""
        return len({job.weight for job in self.jobs}) > 1


def make_problem(
    jobs: Sequence[AdapterJob],
    limits: Limits,
    *,
    left: Sequence[Sequence[int]] | None = None,
    ready: Sequence[int] | None = None,
    most_open: int | None = None,
    rests: Mapping[str, Sequence[int]] | None = None,
) -> Problem:
    """Builds the problem of all samples from slot 0 on, or of the positions in `left` from slots `ready` on."""
    left = [range(job.num_samples) for job in jobs] if left is None else left
    return Problem(
        jobs=tuple(jobs),
        batches=tuple(_batches(job, positions, limits) for job, positions in zip(jobs, left, strict=True)),
        ready=tuple(ready) if ready is not None else (0,) * len(jobs),
        limits=limits,
        most_open=most_open,
        rests=tuple(tuple((rests or {}).get(job.name, ())) for job in jobs),
    )


def _batches(job: AdapterJob, positions: Sequence[int], limits: Limits) -> tuple[Batch, ...]:
    """Groups ascending positions of the stream by global batch; goes from last to first to add up the tails."""
    in_order = np.asarray(positions, np.int64)
    if not in_order.size:
        return ()
    batch_numbers = job.batch_of(in_order)
    lengths = np.asarray(job.sample_tokens, np.int64)[in_order % len(job.sample_tokens)]
    starts = np.flatnonzero(np.diff(batch_numbers, prepend=-1))
    by_length = np.lexsort((lengths, batch_numbers))  # equal ones stay in the order of the stream
    totals = np.add.reduceat(lengths, starts).tolist()
    all_tokens, all_positions = tuple(lengths[by_length].tolist()), tuple(in_order[by_length].tolist())
    batches: list[Batch] = []
    tail = 0
    for total, (start, end) in reversed([*zip(totals, pairwise([*starts.tolist(), in_order.size]), strict=True)]):
        tiles = -(-total // limits.tile_tokens)
        slots = max(1, -(-tiles // limits.slot_tiles))
        batches.append(
            Batch(
                tokens=all_tokens[start:end],
                positions=all_positions[start:end],
                total=total,
                full_mask=(1 << (end - start)) - 1,
                slots=slots,
                tail=tail,
            )
        )
        tail += slots + limits.num_stages - 1
    return tuple(reversed(batches))


def to_plan(problem: Problem, filling: Filling, *, seed: int = 0, lower_bound: int = 0) -> Plan:
    """Builds the plan of a filling. Does not verify it."""
    limits = problem.limits
    return Plan(
        jobs=problem.jobs,
        slots=to_slots(problem, filling),
        capacity_tokens=limits.capacity_tokens,
        num_stages=limits.num_stages,
        data_parallel=limits.data_parallel,
        tile_tokens=limits.tile_tokens,
        seed=seed,
        lower_bound=lower_bound,
        smaller=limits.smaller,
    )


def to_slots(problem: Problem, filling: Filling) -> tuple[Slot, ...]:
    """Converts masks to sample references. Each slot takes the smallest capacity that holds it."""
    slots = [tuple(_refs(problem, parts) for parts in replicas) for replicas in filling]
    if not problem.limits.smaller:
        return tuple(Slot(replicas=replicas) for replicas in slots)
    capacities = [problem.limits.sizes[smallest_size(problem, replicas)] for replicas in filling]
    return tuple(Slot(replicas=refs, capacity_tokens=size) for refs, size in zip(slots, capacities, strict=True))


def tokens_per_slot(problem: Problem, filling: Filling) -> float:
    """Mean number of tokens of a slot."""
    parts = (part for replicas in filling for parts in replicas for part in parts)
    tokens = sum(problem.batches[job][batch].tokens[bit] for job, batch, mask in parts for bit in bits(mask))
    return tokens / max(len(filling), 1)


def smallest_size(problem: Problem, replicas: Sequence[Microbatch]) -> int:
    """Index of the smallest capacity that holds the microbatches of a slot."""
    most = 0
    for parts in replicas:
        tiles = 0
        for job, batch, mask in parts:
            tokens = problem.batches[job][batch].tokens
            tiles -= -sum(tokens[bit] for bit in bits(mask)) // problem.tile_tokens
        most = max(most, tiles)
    return next(index for index, size in enumerate(problem.sizes) if size >= most)


def _refs(problem: Problem, parts: Microbatch) -> tuple[SampleRef, ...]:
    refs: list[SampleRef] = []
    for index, batch, mask in parts:
        job = problem.jobs[index]
        positions, count = problem.batches[index][batch].positions, len(job.sample_tokens)
        number, is_whole = job.batch_of(positions[0]), mask == problem.batches[index][batch].full_mask
        ascending = sorted(positions if is_whole else [positions[bit] for bit in bits(mask)])
        epochs, samples = zip(*[divmod(position, count) for position in ascending], strict=True)
        refs += map(_REF, zip(repeat(job.name), epochs, repeat(number), samples))
    return tuple(refs)


def bits(mask: int) -> list[int]:
    """Indices of the set bits, ascending."""
    if mask < MANY:
        return [index for index, digit in enumerate(bin(mask)[:1:-1]) if digit == "1"]
    if mask.bit_count() <= FEW:
        highest: list[int] = []
        while mask:
            highest.append(mask.bit_length() - 1)
            mask ^= 1 << highest[-1]
        return highest[::-1]
    return bit_array(mask).tolist()


def bit_array(mask: int) -> np.ndarray:
    """Indices of the set bits, ascending."""
    digits = np.frombuffer(mask.to_bytes(-(-mask.bit_length() // 8), "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(digits, bitorder="little"))
