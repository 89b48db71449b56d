"""Profile of a job's batches: their tokens, and the microbatches that they fill at any capacity."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import batched
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduling.online.costs import SlotCost
from scheduling.online.types import Job

TILE = 128
REPLICAS = (1, 2, 4, 8)
LARGEST_CAPACITY = 16384
BATCHES = 12  # batches of a job that are packed to estimate how well they fill microbatches
TOGETHER = 16  # jobs that are packed at once
PACKED_SAMPLES = 96  # samples of a batch that are packed; larger batches are extrapolated
LADDER = tuple(sorted({round(256 * 1.2**step / TILE) * TILE for step in range(24)} | {4096, 8192, LARGEST_CAPACITY}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Statistics of a job's batches.

    Args:
        batch_tokens: mean tokens of a batch.
        longest: tokens of the longest sample, in whole tiles.
        squares: Σ length² / Σ length.
        capacities: capacities that the longest sample fits, ascending.
        slots: per number of replicas, mean slots of a batch that shares no microbatch, at each capacity.
        eval_every, eval_tokens: as those of the job.
    """

    batch_tokens: float
    longest: int
    squares: float
    capacities: tuple[int, ...]
    slots: dict[int, tuple[float, ...]]
    eval_every: int = 0
    eval_tokens: int = 0
    _known: dict[tuple[int, ...], Any] = field(default_factory=dict[tuple[int, ...], Any], repr=False)  # cache

    def slots_at(self, capacity_tokens: int, replicas: int) -> float:
        """Mean slots of a batch that shares no microbatch, at any capacity that fits the longest sample."""
        return self.slots[replicas][bisect_right(self.capacities, capacity_tokens) - 1]

    def wanted(self, mesh: tuple[int, int, int]) -> tuple[float, float]:
        """Largest number of tokens per slot that the job can use on a mesh, without and with padding to whole tiles.

        Its batch fills some slots, and stages - 1 more slots pass before the next batch may start.

        Args:
            mesh: stages, replicas, capacity in tokens.
        """
        demand = self._known.get(mesh)
        if demand is None:
            stages, replicas, capacity_tokens = mesh
            tokens = self.batch_tokens / (self.slots_at(capacity_tokens, replicas) + stages - 1)
            padding = TILE / 2 * (1 + self.batch_tokens / capacity_tokens) / self.batch_tokens
            demand = self._known[mesh] = (tokens, tokens * (1 + padding))
        return demand

    def between_steps_s(self, mesh: tuple[int, int, int], cost: SlotCost) -> float:
        """Seconds for which a group stops per step of the job: its update, and its part of an evaluation.

        An evaluation is forward passes over full slots, and it drains the pipeline.
        """
        if not self.eval_every:
            return cost.update_s
        stages, replicas, capacity_tokens = mesh
        slots = -(-self.eval_tokens // (replicas * capacity_tokens)) + stages - 1
        slot_s = cost.forward * cost.seconds(capacity_tokens, capacity_tokens * self.squares)
        return cost.update_s + slots * slot_s / self.eval_every


def make_profile(job: Job) -> Profile:
    """Packs some of the job's batches at every candidate capacity, by first fit decreasing.

    >>> from scheduling.online import Job
    >>> profile = make_profile(Job("law", "ann", "llama-3.1-8b", 0.0, [1000, 900], global_batch=4, steps=10))
    >>> profile.batch_tokens, profile.longest, profile.capacities[0], profile.slots[1][0]
    (3800.0, 1024, 1024, 4.0)
    """
    return make_profiles([job])[0]


def make_profiles(jobs: Sequence[Job]) -> list[Profile]:
    """The profiles of many jobs. Those whose batches have equally many samples are packed at once."""
    profiles: dict[int, Profile] = {}
    by_size: dict[int, list[int]] = {}
    for index, job in enumerate(jobs):
        by_size.setdefault(min(job.global_batch, PACKED_SAMPLES), []).append(index)
    for size, indices in by_size.items():
        for batch in batched(indices, TOGETHER):
            profiles |= zip(batch, _packed([jobs[index] for index in batch], size), strict=True)
    return [profiles[index] for index in range(len(jobs))]


def _packed(jobs: Sequence[Job], size: int) -> list[Profile]:
    """Profiles from packing so many samples of each batch."""
    lengths = [np.asarray(job.lengths, np.int64) for job in jobs]
    longest = [int(-(-of.max() // TILE) * TILE) for of in lengths]
    capacities = [_capacities(tokens) for tokens in longest]
    counts = [len(of) for of in capacities]
    positions = np.arange(BATCHES * size)
    batches = np.stack([of[positions % len(of)] for of in lengths]).reshape(len(jobs), BATCHES, size)
    samples = np.repeat(-np.sort(-batches, axis=2), counts, axis=0).reshape(-1, size)
    bins = _first_fit(samples, np.repeat(np.concatenate(capacities), BATCHES)).reshape(-1, BATCHES)
    scale = np.repeat([job.global_batch / size for job in jobs], counts)[:, None]
    bins = np.ceil(bins * scale).astype(np.int64)  # a batch has at least one bin
    slots = {replicas: ((-(-bins // replicas)).sum(axis=1) / BATCHES).tolist() for replicas in REPLICAS}
    ends = np.cumsum(counts).tolist()
    return [
        Profile(
            batch_tokens=job.global_batch * float(of.sum() / len(of)),
            longest=tokens,
            squares=float((of * of).sum() / of.sum()),
            capacities=ladder,
            slots={replicas: tuple(values[end - len(ladder) : end]) for replicas, values in slots.items()},
            eval_every=job.eval_every,
            eval_tokens=job.eval_tokens,
        )
        for job, of, tokens, ladder, end in zip(jobs, lengths, longest, capacities, ends, strict=True)
    ]


def _capacities(longest: int) -> tuple[int, ...]:
    """Capacities that the longest sample fits, ascending."""
    first = (longest,) if longest not in LADDER else ()
    return first + tuple(tokens for tokens in LADDER if tokens >= longest)


def _first_fit(samples: NDArray[np.int64], capacities: NDArray[np.int64]) -> NDArray[np.int64]:
    """Microbatches of every row of samples, longest first, at the row's capacity: int[rows].

    A microbatch of one job is padded to whole tiles only at its end.
    """
    num_bins = np.ones(len(samples), np.int64)
    rest = np.flatnonzero(samples.sum(axis=1) > capacities)  # the others need one
    rows, size = len(rest), samples.shape[1]
    left, room = samples[rest].astype(np.int32), np.repeat(capacities[rest].astype(np.int32), size).reshape(rows, size)
    flat, first = room.reshape(-1), np.arange(rows) * size
    last = np.zeros(rows, np.int64)
    for position in range(size if rows else 0):
        tokens = left[:, position]
        fits = room[:, : int(last.max()) + 2] >= tokens[:, None]
        index = fits.argmax(axis=1)
        flat[first + index] -= tokens
        np.maximum(last, index, out=last)
    num_bins[rest] = last + 1
    return num_bins
