"""Lower bounds on the number of slots of a plan."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from scheduling.checks import check_sizes
from scheduling.types import AdapterJob, Limits

MOST_PARTS = 6  # of a microbatch, in bounds of its samples
THRESHOLDS, MOST_WORK = 32, 4_000_000  # lengths that are tried, and their number times the samples


def lower_bound(
    jobs: Sequence[AdapterJob],
    *,
    capacity_tokens: int | Sequence[int],
    num_stages: int,
    data_parallel: int = 1,
    tile_tokens: int = 128,
) -> int:
    """Computes a lower bound on the number of slots: the largest of three relaxations. Of several capacities the
    largest counts.

    * chain: Σ_batches n + (S - 1)·(batches - 1) of a single adapter, where its batch needs n slots without the others,
      by its tiles and by what fits beside its long samples;
    * long samples: those that cannot share a microbatch, plus slots for what does not fit next to them;
    * one machine: min head + ⌈Σ tiles / tiles of a slot⌉ + min tail over every set of batches, where a batch's head and
      tail are the slots that its adapter needs before and after it (solved exactly, as a preemptive schedule).
      The set of all batches gives ⌈all tiles / tiles of a slot⌉.

    >>> lower_bound([AdapterJob("law", [600, 600, 600], 1)], capacity_tokens=1024, num_stages=4)
    9
    """
    limits = Limits(
        capacity_tokens=check_sizes(capacity_tokens)[-1],
        num_stages=num_stages,
        data_parallel=data_parallel,
        tile_tokens=tile_tokens,
    )
    return bound_of_rest(jobs, [np.arange(job.num_samples) for job in jobs], [0] * len(jobs), limits)


def bound_of_rest(jobs: Sequence[AdapterJob], left: Sequence[np.ndarray], ready: Sequence[int], limits: Limits) -> int:
    """Computes `lower_bound` for the positions in `left`, when job k may not start before slot `ready[k]`."""
    tiles: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    lengths = [np.zeros(0, np.int64)]
    starts: list[int] = []
    room = limits.tiles * limits.tile_tokens
    for job, positions, first in zip(jobs, left, ready, strict=True):
        if not len(positions):
            continue
        tokens = job.stream[positions]
        cuts = np.flatnonzero(np.diff(job.batch_of(positions), prepend=-1))
        tiles.append(-(-np.add.reduceat(tokens, cuts) // limits.tile_tokens))
        by_tiles = -(-tiles[-1] // limits.slot_tiles)
        counts.append(np.maximum(by_tiles, -(-_bins_of_groups(tokens, cuts, room) // limits.data_parallel)))
        lengths.append(tokens)
        starts.append(first)
    samples = np.concatenate(lengths)
    all_samples = np.zeros(1, np.int64)
    parts = _bins_by_parts, _bins_of_two_lengths
    joint = max(int(bins(samples, all_samples, room)[0]) for bins in parts) if len(samples) else 0
    bins = -(-max(joint, _bins_for(samples, room)) // limits.data_parallel)
    return max(bins, _one_machine(tiles, counts, starts, limits.slot_tiles, limits.num_stages))


def formula_bound(jobs: Sequence[AdapterJob], *, capacity_tokens: int, num_stages: int) -> int:
    """Computes max(⌈tokens / capacity⌉, longest single adapter), without tiles; never above `lower_bound`."""
    batches = [batch_tokens(job) for job in jobs]
    alone = [
        int(np.maximum(1, -(-tokens // capacity_tokens)).sum()) + (num_stages - 1) * (len(tokens) - 1)
        for tokens in batches
    ]
    return max(*alone, -(-int(sum(tokens.sum() for tokens in batches)) // capacity_tokens))


def batch_tokens(job: AdapterJob) -> np.ndarray:
    """Tokens of each global batch, int64[num_batches]."""
    return np.add.reduceat(job.stream, job.batch_starts())


def _bins_of_groups(tokens: np.ndarray, starts: np.ndarray, room: int) -> np.ndarray:
    """Microbatches that each group of samples needs by itself, from dual feasible functions of the lengths.

    Such a function gives a microbatch at most 1 whatever it holds, so the sum over the samples is a bound. Those of
    Fekete and Schepers: see `_bins_by_parts`; or lengths below a threshold count nothing and those that leave no room
    for it a whole microbatch, which is more than the tokens only where there are some of these.
    """
    bins = _bins_by_parts(tokens, starts, room)
    shortest = np.unique(tokens[(tokens * 2 <= room) & (tokens + tokens.max() > room)])
    count = max(1, min(THRESHOLDS, MOST_WORK // len(tokens), shortest.size))
    for threshold in shortest[np.linspace(0, shortest.size - 1, count).astype(int)] if shortest.size else ():
        rounded_tokens = np.where(tokens > room - threshold, room, np.where(tokens < threshold, 0, tokens))
        bins = np.maximum(bins, -(-np.add.reduceat(rounded_tokens, starts) // room))
    return np.maximum(bins, _bins_of_two_lengths(tokens, starts, room))


def _bins_of_two_lengths(tokens: np.ndarray, starts: np.ndarray, room: int) -> np.ndarray:
    """The same where there are just two lengths, by every edge of the hull of the (long, short) that fit together."""
    bins, lengths = np.ones(len(starts), np.int64), np.unique(tokens)
    if lengths.size != 2:
        return bins
    short, long = lengths.tolist()
    most = room // long
    fillings = [(count, (room - count * long) // short) for count in range(most + 1)]
    hull: list[tuple[int, int]] = []
    for filling in dict.fromkeys([*fillings, (most, 0)]):
        while len(hull) > 1 and _turns_left(hull[-2], hull[-1], filling):
            hull.pop()
        hull.append(filling)
    of_long, of_short = (np.add.reduceat((tokens == length).astype(np.int64), starts) for length in (long, short))
    for (longs, shorts), (more, fewer) in pairwise(hull):
        filled = of_long * (shorts - fewer) + of_short * (more - longs)  # of the units that a full microbatch has
        bins = np.maximum(bins, -(-filled // (shorts * more - longs * fewer)))
    return bins


def _turns_left(first: tuple[int, int], middle: tuple[int, int], last: tuple[int, int]) -> bool:
    """Whether the middle point is on or below the line between the others."""
    (a, b), (c, d), (e, f) = first, middle, last
    return (c - a) * (f - b) >= (d - b) * (e - a)


def _bins_by_parts(tokens: np.ndarray, starts: np.ndarray, room: int) -> np.ndarray:
    """The same where a length above m/(k + 1) of the room counts m/k."""
    bins, fewest = np.ones(len(starts), np.int64), room // int(tokens.max())  # fewer parts count nothing
    for parts in range(max(1, fewest), MOST_PARTS + 1):
        shares = ((parts + 1) * tokens - 1) // room
        bins = np.maximum(bins, -(-np.add.reduceat(shares, starts) // parts))
    return bins


def _bins_for(lengths: np.ndarray, room: int) -> int:
    """Martello and Toth's bin-packing bound L2: microbatches that these samples need in any order."""
    ascending = np.sort(lengths)
    prefix: np.ndarray = np.r_[0, np.cumsum(ascending)]
    shortest = np.unique(ascending[ascending * 2 <= room])
    if shortest.size > 256:  # any subset of thresholds gives a valid bound
        shortest = shortest[np.linspace(0, shortest.size - 1, 256).astype(int)]
    thresholds: np.ndarray = np.r_[0, shortest]
    half = int(np.searchsorted(ascending, room // 2, side="right"))
    small = np.searchsorted(ascending, thresholds)  # shorter than the threshold: left out
    large = np.searchsorted(ascending, room - thresholds, side="right")  # no room left for a middle one
    free_tokens = (large - half) * room - (prefix[large] - prefix[half])
    excess = prefix[half] - prefix[small] - free_tokens
    return len(ascending) - half + max(0, -(-int(excess.max()) // room))


def _one_machine(
    tiles: list[np.ndarray], counts: list[np.ndarray], starts: list[int], slot_tiles: int, num_stages: int
) -> int:
    """Jackson's preemptive schedule: always run the waiting batch with the longest tail. Time is counted in tiles."""
    arrivals: list[tuple[int, int, int]] = []
    longest = 0
    for work, slots, start in zip(tiles, counts, starts, strict=True):
        heads = np.cumsum(np.r_[start, slots[:-1] + num_stages - 1])
        total = start + int(slots.sum()) + (num_stages - 1) * (len(slots) - 1)
        longest = max(longest, total)
        tails = total - heads - slots
        arrivals += zip((heads * slot_tiles).tolist(), (-tails * slot_tiles).tolist(), work.tolist(), strict=True)
    arrivals.sort()
    now, finish, index = 0, 0, 0
    waiting: list[list[int]] = []
    while waiting or index < len(arrivals):
        if not waiting:
            now = max(now, arrivals[index][0])
        while index < len(arrivals) and arrivals[index][0] <= now:
            heapq.heappush(waiting, [arrivals[index][1], arrivals[index][2]])
            index += 1
        tail, work = waiting[0]
        until = arrivals[index][0] if index < len(arrivals) else now + work
        step = min(work, until - now)
        now += step
        if step == work:
            heapq.heappop(waiting)
            finish = max(finish, now - tail)
        else:
            waiting[0][1] -= step
    return max(longest, -(-finish // slot_tiles))
