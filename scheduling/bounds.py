"""How few slots any plan must have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scheduling.types import AdapterJob


def lower_bound(
    jobs: Sequence[AdapterJob],
    *,
    capacity_tokens: int,
    num_stages: int,
    data_parallel: int = 1,
    tile_tokens: int = 128,
) -> int:
    """Counts slots that no plan can do without.

    max( ⌈tiles of all batches / tiles of a slot⌉ ,  max over adapters Σ_batches n + (S - 1)·(batches - 1) ),
    n = max(1, ⌈tiles of the batch / tiles of a slot⌉)

    >>> lower_bound([AdapterJob("law", [600, 600, 600], 1)], capacity_tokens=1024, num_stages=4)
    9
    """
    slot_tiles = capacity_tokens // tile_tokens * data_parallel
    all_tiles, longest = 0, 0
    for job in jobs:
        tiles = -(-batch_tokens(job) // tile_tokens)
        slots = np.maximum(1, -(-tiles // slot_tiles))
        all_tiles += int(tiles.sum())
        longest = max(longest, int(slots.sum()) + (num_stages - 1) * (len(slots) - 1))
    return max(longest, -(-all_tiles // slot_tiles))


def batch_tokens(job: AdapterJob) -> np.ndarray:
    """Tokens of each global batch, int64[num_batches]."""
    return np.add.reduceat(job.stream, np.arange(0, job.num_samples, job.global_batch))
