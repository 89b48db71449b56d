"""Segments of a packed microbatch. Dims: `T` packed tokens · `M` segment slots, a static bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

SMALLEST_BUCKET = 8


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Contiguous runs of rows that attend only to themselves: samples and padding.

    Attributes:
        ids: int32 [T], 0, 0, 1, 1, 1, …: an increasing number per run.
        offsets: int32 [M + 1], first row of each run; -1 in unused slots.
        lengths: int32 [M], rows of each run; -1 in unused slots.
    """

    ids: jax.Array | np.ndarray
    offsets: jax.Array | np.ndarray
    lengths: jax.Array | np.ndarray

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], total: int, *, bucket: int | None = None) -> Segments:
        """Builds consecutive segments on the host. The remaining rows form one more segment.

        Args:
            lengths: rows of each run, in order, at least 1.
            total: T.
            bucket: M. Default: the smallest of 8, 16, 32, … that fits. Keep it small: the time of cuDNN's backward
                grows with the bucket, not with the rows in use.
        Raises:
            ValueError: the runs do not fit into `total` rows or into `bucket` slots.

        Example:
            >>> Segments.from_lengths([2, 3], 8).ids.tolist()
            [0, 0, 1, 1, 1, 2, 2, 2]
        """
        runs = np.asarray(lengths, np.int32).reshape(-1)
        num_rows = int(runs.sum())
        if num_rows > total or np.any(runs < 1):
            raise ValueError(f"runs of {runs.tolist()} rows do not fit into {total} rows")
        if num_rows < total:
            runs = np.append(runs, np.int32(total - num_rows))
        slots = bucket or segment_bucket(len(runs))
        if len(runs) > slots:
            raise ValueError(f"{len(runs)} runs do not fit into {slots} segment slots")
        offsets_M, lengths_M = np.full(slots + 1, -1, np.int32), np.full(slots, -1, np.int32)
        offsets_M[: len(runs)] = np.cumsum(runs) - runs
        lengths_M[: len(runs)] = runs
        return cls(ids=np.repeat(np.arange(len(runs), dtype=np.int32), runs), offsets=offsets_M, lengths=lengths_M)

    def in_chunks(self, chunk: int) -> Segments:
        """Cuts every run into runs of `chunk` rows, counted from its first one.

        >>> Segments.from_lengths([5, 2], 8).in_chunks(2).ids.tolist()
        [0, 0, 1, 1, 2, 3, 3, 4]
        """
        rows_T, ids_T = jnp.arange(len(self.ids), dtype=jnp.int32), jnp.asarray(self.ids)
        begins_T = (rows_T - jnp.asarray(self.offsets)[ids_T]) % chunk == 0
        slots = len(self.lengths) + len(self.ids) // chunk
        (offsets_M,) = jnp.nonzero(begins_T, size=slots + 1, fill_value=-1)
        ends_M = jnp.where(offsets_M[1:] < 0, len(rows_T), offsets_M[1:])
        lengths_M = jnp.where(offsets_M[:-1] < 0, -1, ends_M - offsets_M[:-1])
        ids_T = jnp.cumsum(begins_T, dtype=jnp.int32) - 1
        return Segments(ids=ids_T, offsets=offsets_M.astype(jnp.int32), lengths=lengths_M.astype(jnp.int32))


def segment_bucket(num_runs: int) -> int:
    """Number of segment slots to compile for: the smallest of 8, 16, 32, … that holds `num_runs`."""
    return max(SMALLEST_BUCKET, 1 << max(num_runs - 1, 0).bit_length())
