"""The jobs as plain numbers: what the packers work on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduling.types import AdapterJob, SampleRef, Slot

Part = tuple[int, int, int]  # (job, batch, bit mask over the batch's samples in ascending order of length)
Microbatch = tuple[Part, ...]
Filling = list[tuple[Microbatch, ...]]  # per slot, per replica


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One global batch (or what is left of it), samples in ascending order of length."""

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    total: int

    @property
    def full_mask(self) -> int:
        return (1 << len(self.tokens)) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is left to plan, and under which limits.

    Args:
        batches: per job, in order.
        ready: per job, the first slot in which its first batch may run (more than 0 when re-planning).
        first_batch: per job, the number of its first batch (more than 0 when re-planning).
        weights: per job.
        tiles: capacity of one microbatch in tiles.
    """

    jobs: tuple[AdapterJob, ...]
    batches: tuple[tuple[Batch, ...], ...]
    ready: tuple[int, ...]
    first_batch: tuple[int, ...]
    tiles: int
    tile_tokens: int
    num_stages: int
    data_parallel: int
    memo: dict = field(default_factory=dict, compare=False, repr=False)

    @property
    def num_samples(self) -> int:
        return sum(len(batch.tokens) for batches in self.batches for batch in batches)


def make_problem(
    jobs: Sequence[AdapterJob], *, capacity_tokens: int, tile_tokens: int, num_stages: int, data_parallel: int
) -> Problem:
    """All samples of all jobs, free to start in slot 0."""
    return Problem(
        jobs=tuple(jobs),
        batches=tuple(tuple(_batches(job, range(job.num_samples))) for job in jobs),
        ready=(0,) * len(jobs),
        first_batch=(0,) * len(jobs),
        tiles=capacity_tokens // tile_tokens,
        tile_tokens=tile_tokens,
        num_stages=num_stages,
        data_parallel=data_parallel,
    )


def _batches(job: AdapterJob, positions: Sequence[int]):
    """Groups positions of the stream (ascending) into their global batches."""
    lengths, count, g = job.sample_tokens, len(job.sample_tokens), job.global_batch
    start = 0
    while start < len(positions):
        end = start
        batch = positions[start] // g
        while end < len(positions) and positions[end] // g == batch:
            end += 1
        ordered = sorted((lengths[p % count], p) for p in positions[start:end])
        tokens = tuple(n for n, _ in ordered)
        yield Batch(tokens=tokens, positions=tuple(p for _, p in ordered), total=sum(tokens))
        start = end


def to_slots(problem: Problem, filling: Filling) -> tuple[Slot, ...]:
    """Names the samples behind the masks."""
    return tuple(Slot(replicas=tuple(_refs(problem, parts) for parts in replicas)) for replicas in filling)


def _refs(problem: Problem, parts: Microbatch) -> tuple[SampleRef, ...]:
    refs: list[SampleRef] = []
    for index, batch, mask in parts:
        job = problem.jobs[index]
        positions = problem.batches[index][batch].positions
        refs += [job.ref(positions[bit]) for bit in sorted(bits(mask), key=positions.__getitem__)]
    return tuple(refs)


def bits(mask: int) -> list[int]:
    """Indices of the set bits, ascending."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
