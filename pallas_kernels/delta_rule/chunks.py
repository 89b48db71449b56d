"""Rows in chunks that belong to one segment each, so that no product mixes segments.

A segment fills its chunks from its first row on. So a sample has the same chunks wherever it is packed, and a NaN stays
in its own segment.

T rows · M segment slots · N chunks · B rows of a chunk
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

ROWS = 64  # of a chunk, at most
FEWEST = 8


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """Where rows are in chunks.

    Attributes:
        row_NB: row of each place; T where a chunk has none.
        place_T: place of each row, N · B where it has none.
        first_N: whether a chunk begins a segment.
    """

    row_NB: Int[Array, "N B"]
    place_T: Int[Array, " T"]
    first_N: Int[Array, " N"]


def chunk_rows(total: int) -> int:
    """B for T rows: a power of two.

    >>> chunk_rows(8192), chunk_rows(20), chunk_rows(3)
    (64, 32, 8)
    """
    return min(ROWS, max(FEWEST, 1 << max(total - 1, 0).bit_length()))


def num_chunks(total: int, segments: int) -> int:
    """N for T rows in at most M segments: each may leave its last chunk almost empty.

    >>> num_chunks(8192, 8)
    135
    """
    rows = chunk_rows(total)
    return (total + segments * (rows - 1)) // rows


def make_chunks(ids_T: Int[Array, " T"], offsets_M1: Int[Array, " M+1"], lengths_M: Int[Array, " M"]) -> Chunks:
    """Deals the rows of each segment to chunks.

    Args:
        ids_T: of the segment of each row.
        offsets_M1, lengths_M: first row and number of rows of each segment, -1 in unused slots.
    """
    ids_T, offsets_M, lengths_M = (jnp.asarray(x) for x in (ids_T, offsets_M1[:-1], lengths_M))
    T, M = len(ids_T), len(lengths_M)
    B, N = chunk_rows(T), num_chunks(T, M)
    count_M = jnp.where(lengths_M > 0, -(-lengths_M // B), 0)
    stop_M = jnp.cumsum(count_M)
    number_N = jnp.arange(N)
    segment_N = jnp.minimum(jnp.searchsorted(stop_M, number_N, side="right"), M - 1)
    within_N = number_N - (stop_M - count_M)[segment_N]
    place_NB = within_N[:, None] * B + jnp.arange(B)
    has_row = (number_N < stop_M[-1])[:, None] & (place_NB < lengths_M[segment_N][:, None])
    row_NB = jnp.where(has_row, offsets_M[segment_N][:, None] + place_NB, T)
    segment_T = ids_T
    place_T = (stop_M - count_M)[segment_T] * B + jnp.arange(T) - offsets_M[segment_T]
    place_T = jnp.where(lengths_M[segment_T] > 0, place_T, N * B)
    return Chunks(row_NB=row_NB.astype(jnp.int32), place_T=place_T.astype(jnp.int32), first_N=within_N == 0)


def last_chunks(lengths_M: Int[Array, " M"], total: int) -> Int[Array, " M"]:
    """The last chunk of each segment, and any of unused slots."""
    rows = chunk_rows(total)
    return jnp.maximum(jnp.cumsum(jnp.where(lengths_M > 0, -(-lengths_M // rows), 0)) - 1, 0)


@jax.custom_vjp
def to_chunks(x: jax.Array, chunks: Chunks) -> jax.Array:
    """[T, ...] → [N, B, ...], zeros where a chunk has no row. Backward is a gather, too."""
    return jnp.take(x, chunks.row_NB, axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def to_rows(y: jax.Array, chunks: Chunks) -> jax.Array:
    """[N, B, ...] → [T, ...]"""
    flat = y.reshape(-1, *y.shape[2:])
    return jnp.take(flat, chunks.place_T, axis=0, mode="fill", fill_value=0)


to_chunks.defvjp(lambda x, chunks: (to_chunks(x, chunks), chunks), lambda chunks, dy: (to_rows(dy, chunks), None))
to_rows.defvjp(lambda y, chunks: (to_rows(y, chunks), chunks), lambda chunks, dx: (to_chunks(dx, chunks), None))
