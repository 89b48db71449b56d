"""The numbers of a microbatch's rows whose losses clients choose, on the host.

T packed tokens · K targets of a position
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lorafusion_jax.objective.rows import MOST_TARGETS, NO_ROW, RowNumbers

TARGET_SIZES = (1, 4, 16, MOST_TARGETS)  # few, because each compiles the head


class RowTable(NamedTuple):
    """What decides the losses of positions, see `RowNumbers`. Positions of other samples have the kind `NO_ROW`."""

    kind: np.ndarray  # int32 [T]
    targets: np.ndarray  # int32 [T, K]
    factors: np.ndarray  # float32 [T, K]
    old: np.ndarray  # float32 [T]
    low: np.ndarray  # float32 [T]
    high: np.ndarray  # float32 [T]
    beta: np.ndarray  # float32 [T]
    in_ratio: np.ndarray  # bool [T]
    learned: np.ndarray  # bool [T], whether the position has a gradient

    @classmethod
    def empty(cls, capacity_tokens: int, targets: int) -> RowTable:
        by_target = (capacity_tokens, targets)
        old, low, high, beta = (np.zeros(capacity_tokens, np.float32) for _ in range(4))
        return cls(
            kind=np.full(capacity_tokens, NO_ROW, np.int32),
            targets=np.zeros(by_target, np.int32),
            factors=np.zeros(by_target, np.float32),
            old=old,
            low=low,
            high=high,
            beta=beta,
            in_ratio=np.zeros(capacity_tokens, bool),
            learned=np.zeros(capacity_tokens, bool),
        )

    def put(self, row: RowNumbers, start: int) -> None:
        """Writes a row that begins at a position."""
        length, targets = row.targets.shape
        span = slice(start, start + length)
        self.kind[span] = row.kind
        self.targets[span, :targets], self.factors[span, :targets] = row.targets, row.factors
        for name in ("old", "low", "high", "beta", "in_ratio", "learned"):
            getattr(self, name)[span] = getattr(row, name)


def target_size(targets: int) -> int:
    """Returns the size of a table that holds so many targets.

    >>> [target_size(targets) for targets in (1, 2, 20)]
    [1, 4, 64]
    """
    return next(size for size in TARGET_SIZES if size >= targets)
