"""The batches and microbatches that every peer gets. No torch, no jax."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from benchmarks.workloads import LONGEST, WORKLOADS, sample_lengths

Microbatch = list[int]  # lengths of its samples


def global_batches(workload: str, batch: int, count: int, scale: float = 1, longest: int = LONGEST) -> list[list[int]]:
    """Lengths of the samples of one adapter's optimizer steps, from the distribution that ours is measured on."""
    draw = np.random.default_rng(WORKLOADS.index(workload))
    lengths = sample_lengths(draw, workload, 0, batch * count, scale, longest)
    return [lengths[start : start + batch] for start in range(0, len(lengths), batch)]


def pack(lengths: Iterable[int], capacity: int) -> list[Microbatch]:
    """First fit, longest first.

    Example:
        >>> pack([5, 3, 4, 2], capacity=8)
        [[5, 3], [4, 2]]
    """
    bins: list[Microbatch] = []
    for length in sorted(lengths, reverse=True):
        for held in bins:
            if sum(held) + length <= capacity:
                held.append(length)
                break
        else:
            bins.append([length])
    return bins


def full_steps(steps: Sequence[Sequence[int]], capacity: int, least: float = 0.9) -> list[list[Microbatch]]:
    """Steps of one full microbatch each: what several adapters could at best share, whoever's samples they are."""
    bins = pack([length for step in steps for length in step], capacity)
    return [[held] for held in bins if sum(held) >= least * capacity]


def padded(step: Sequence[int], rows: int) -> list[Microbatch]:
    """Microbatches of so many samples in the order they come, each padded to its longest."""
    return [list(step[start : start + rows]) for start in range(0, len(step), rows)]
