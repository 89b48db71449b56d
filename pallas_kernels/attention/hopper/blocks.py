"""Tables of work: the tiles of keys for each block of queries, and the tiles of queries for each block of keys.

Documents are contiguous, so a query attends to the rows from the first one of its document to itself, and a key is used
by the rows from itself to the last one of its document. Ranges of tiles follow from the first or last row of a block. A
table lists the blocks and their ranges, longest first, so that multiprocessors finish at the same time.
T packed rows · M document slots · B blocks
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

type Host = jax.Array | np.ndarray


def document_rows(
    ids_T: Host, offsets_M: Host, lengths_M: Host, window: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """The first row that row t attends to, and the end of the rows that attend to row t, int32 [T].

    first[t] = offsets[ids[t]], end[t] = first[t] + lengths[ids[t]];  with a window not before t - window + 1, and not
    after t + window

    Both increase with t, which is all that the tables of work need. So kernels skip the blocks outside of windows as
    those of other documents.

    Args:
        ids_T: 0, 0, 1, 1, 1, …: the document of each row, non-decreasing.
        offsets_M: first row of each document; unused slots may hold any value.
        lengths_M: rows of each document.
        window: rows that a row attends to, itself included (None: all from the first one of its document).

    Example:
        >>> first, end = document_rows(jnp.array([0, 0, 1, 1, 1]), jnp.array([0, 2, -1]), jnp.array([2, 3]))
        >>> first.tolist(), end.tolist()
        ([0, 0, 2, 2, 2], [2, 2, 5, 5, 5])
        >>> first, end = document_rows(jnp.array([0, 0, 0, 0]), jnp.array([0]), jnp.array([4]), window=2)
        >>> first.tolist(), end.tolist()
        ([0, 0, 1, 2], [2, 3, 4, 4])
    """
    first_T = jnp.asarray(offsets_M)[jnp.asarray(ids_T)].astype(jnp.int32)
    end_T = first_T + jnp.asarray(lengths_M)[jnp.asarray(ids_T)].astype(jnp.int32)
    if window is None:
        return first_T, end_T
    row_T = jnp.arange(len(first_T), dtype=jnp.int32)
    return jnp.maximum(first_T, row_T - (window - 1)), jnp.minimum(end_T, row_T + window)


def query_blocks(first_T: jax.Array, rows: int, keys: int) -> jax.Array:
    """Table of (block of `rows` queries, its first tile of `keys` keys, number of tiles), int32 [B, 3].

    Example:
        >>> query_blocks(jnp.array([0, 0, 0, 0, 0, 0, 6, 6]), 2, 2).tolist()
        [[2, 0, 3], [1, 0, 2], [0, 0, 1], [3, 3, 1]]
    """
    block = jnp.arange(first_T.shape[0] // rows, dtype=jnp.int32)
    begin = first_T[::rows] // keys
    return _longest_first(block, begin, -(-(block + 1) * rows // keys) - begin)


def key_blocks(end_T: jax.Array, rows: int, queries: int) -> jax.Array:
    """Table of (block of `rows` keys, its first tile of `queries` queries, number of tiles), int32 [B, 3].

    Example:
        >>> key_blocks(jnp.array([6, 6, 6, 6, 6, 6, 8, 8]), 2, 2).tolist()
        [[0, 0, 3], [1, 1, 2], [2, 2, 1], [3, 3, 1]]
    """
    block = jnp.arange(end_T.shape[0] // rows, dtype=jnp.int32)
    begin = block * rows // queries
    return _longest_first(block, begin, -(-end_T[rows - 1 :: rows] // queries) - begin)


def _longest_first(block: jax.Array, begin: jax.Array, num: jax.Array) -> jax.Array:
    """Sorts by counting predecessors, which is a single small kernel; XLA's sort needs several."""
    before = (num > num[:, None]) | ((num == num[:, None]) & (block < block[:, None]))
    position = before.sum(1, dtype=jnp.int32)
    is_at_position = position == block[:, None]
    rows = jnp.stack([block, begin, num], 1).astype(jnp.int32)
    return jnp.where(is_at_position[:, :, None], rows, 0).sum(1, dtype=jnp.int32)
