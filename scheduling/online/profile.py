"""Profile of a job's batches: their tokens, and the microbatches that they fill at any capacity."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduling.online.costs import SlotCost
from scheduling.online.types import Job

TILE = 128
REPLICAS = (1, 2, 4, 8)
LARGEST_CAPACITY = 16384
BATCHES = 12  # batches of a job that are packed to estimate how well they fill microbatches
PACKED_SAMPLES = 96  # samples of a batch that are packed; larger batches are extrapolated
LADDER = tuple(sorted({round(256 * 1.2**step / TILE) * TILE for step in range(24)} | {4096, 8192, LARGEST_CAPACITY}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Statistics of a job's batches.

    Args:
        batch_tokens: mean tokens of a batch.
        spread: standard deviation of a batch's tokens over its mean.
        longest: tokens of the longest sample, in whole tiles.
        mean_tokens: mean tokens of a sample.
        squares: Σ length² / Σ length.
        capacities: capacities that the longest sample fits, ascending.
        slots: per number of replicas, mean slots of a batch that shares no microbatch, at each capacity.
        eval_every, eval_tokens: as those of the job.
    """

    batch_tokens: float
    spread: float
    longest: int
    mean_tokens: float
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
        known = self._known.get(mesh)
        if known is None:
            stages, replicas, capacity_tokens = mesh
            tokens = self.batch_tokens / (self.slots_at(capacity_tokens, replicas) + stages - 1)
            padding = TILE / 2 * (1 + self.batch_tokens / capacity_tokens) / self.batch_tokens
            known = self._known[mesh] = (tokens, tokens * (1 + padding))
        return known

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
    lengths = np.asarray(job.lengths, np.int64)
    longest = int(-(-lengths.max() // TILE) * TILE)
    first = [longest] if longest not in LADDER else []
    capacities = tuple(first + [tokens for tokens in LADDER if tokens >= longest])
    size = min(job.global_batch, PACKED_SAMPLES)
    batches = np.resize(lengths, (BATCHES, size))
    bins = _first_fit(-np.sort(-batches, axis=1), np.asarray(capacities))
    if size < job.global_batch:
        bins = np.maximum(1, np.ceil(bins * (job.global_batch / size)).astype(np.int64))
    mean = float(lengths.mean())
    return Profile(
        batch_tokens=job.global_batch * mean,
        spread=float(lengths.std() / mean / np.sqrt(job.global_batch)),
        longest=longest,
        mean_tokens=mean,
        squares=float((lengths.astype(float) ** 2).sum() / lengths.sum()),
        capacities=capacities,
        slots={replicas: tuple((-(-bins // replicas)).mean(axis=0).tolist()) for replicas in REPLICAS},
        eval_every=job.eval_every,
        eval_tokens=job.eval_tokens,
    )


def _first_fit(batches: NDArray[np.int64], capacities: NDArray[np.int64]) -> NDArray[np.int64]:
    """Microbatches of every batch at every capacity, int[batches, capacities]. Samples are sorted, longest first.

    A microbatch of one job is padded to whole tiles only at its end.
    """
    count, size = batches.shape
    most = size + 1
    room = np.broadcast_to(capacities[None, :, None], (count, len(capacities), most)).copy()
    rows, columns = np.ogrid[:count, : len(capacities)]
    used = np.zeros((count, len(capacities)), np.int64)
    for position in range(size):
        tokens = batches[:, position][:, None]
        bins = int(used.max()) + 1
        bin_index = (room[:, :, :bins] >= tokens[:, :, None]).argmax(axis=2)
        room[rows, columns, bin_index] -= tokens
        np.maximum(used, bin_index + 1, out=used)
    return used
