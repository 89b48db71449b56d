"""What a job's lengths say about its batches: their tokens, and the microbatches they fill at any capacity."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduling.online.types import Job

TILE = 128
LARGEST_CAPACITY = 16384
BATCHES = 12  # of a job that are packed to learn how well they fill microbatches
PACKED_SAMPLES = 96  # of a batch; larger ones fill microbatches like that many
LADDER = tuple(sorted({round(256 * 1.2**step / TILE) * TILE for step in range(24)} | {4096, 8192, LARGEST_CAPACITY}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A job's batches in figures.

    Args:
        batch_tokens: of a mean batch.
        spread: standard deviation of a batch's tokens over its mean.
        longest: sample, in whole tiles.
        mean_tokens: of a sample.
        squares: Σ length² / Σ length.
        capacities: that its longest sample fits, ascending.
        bins: microbatches of each of some batches at each capacity, int[batches, capacities].
    """

    batch_tokens: float
    spread: float
    longest: int
    mean_tokens: float
    squares: float
    capacities: tuple[int, ...]
    bins: NDArray[np.int64]
    _known: dict[tuple[int, ...], Any] = field(
        default_factory=dict[tuple[int, ...], Any], repr=False
    )  # answers, asked for again and again

    def slots(self, place: int, replicas: int) -> float:
        """Mean slots of a batch that is trained alone, at `capacities[place]` on so many replicas."""
        known = self._known.get((place, replicas))
        if known is None:
            known = self._known[place, replicas] = float((-(-self.bins[:, place] // replicas)).mean())
        return known

    def slots_at(self, capacity_tokens: int, replicas: int) -> float:
        """The same at any capacity that the longest sample fits."""
        return self.slots(bisect_right(self.capacities, capacity_tokens) - 1, replicas)

    def wanted(self, stages: int, replicas: int, capacity_tokens: int) -> tuple[float, float]:
        """Tokens per slot that the job can take at most on a mesh, without and with padding to whole tiles.

        Its batch fills some slots, and stages - 1 more pass before the next one may start.
        """
        known = self._known.get((stages, replicas, capacity_tokens))
        if known is None:
            tokens = self.batch_tokens / (self.slots_at(capacity_tokens, replicas) + stages - 1)
            padding = TILE / 2 * (1 + self.batch_tokens / capacity_tokens) / self.batch_tokens
            known = self._known[stages, replicas, capacity_tokens] = (tokens, tokens * (1 + padding))
        return known


def make_profile(job: Job) -> Profile:
    """Packs some of the job's batches, first fit decreasing, at every capacity of the ladder.

    >>> from scheduling.online import Job
    >>> profile = make_profile(Job("law", "ann", "llama-3.1-8b", 0.0, [1000, 900], global_batch=4, steps=10))
    >>> profile.batch_tokens, profile.longest, profile.capacities[0], profile.slots(0, 1)
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
        bins=bins,
    )


def _first_fit(batches: NDArray[np.int64], capacities: NDArray[np.int64]) -> NDArray[np.int64]:
    """Microbatches of every batch at every capacity, int[batches, capacities]; samples come longest first.

    A microbatch of one job needs no padding between its samples, only whole tiles.
    """
    count, size = batches.shape
    most = size + 1
    room = np.broadcast_to(capacities[None, :, None], (count, len(capacities), most)).copy()
    rows, columns = np.ogrid[:count, : len(capacities)]
    used = np.zeros((count, len(capacities)), np.int64)
    for position in range(size):
        tokens = batches[:, position][:, None]
        bins = int(used.max()) + 1
        place = (room[:, :, :bins] >= tokens[:, :, None]).argmax(axis=2)
        room[rows, columns, place] -= tokens
        np.maximum(used, place + 1, out=used)
    return used
