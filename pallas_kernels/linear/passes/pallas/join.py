"""dS of all projections of an input from its partial sums: added up, cast, joined and transposed in one launch.

XLA launches a kernel per projection, and more for joining, padding and transposing, 2 us each on an H200.

T packed tokens · R padded rank
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_kernels.sizes import row_block
from pallas_kernels.triton_call import call

TILE = 32 * 16  # elements of a partial sum that a program adds: 4 of a thread, one load


def join(
    pieces: Sequence[jax.Array], dtype: jnp.dtype, *, columns: int = 0, rows: int = 0, interpret: bool = False
) -> tuple[jax.Array, ...]:
    """Returns dS [T, columns], where columns are asked for, then dS^T [rows, T], where rows are.

    Both hold the sum of every piece side by side, and zeros after them.

    Args:
        pieces: [parts, T, R_i] each, added up in float32 and in this order, then rounded once; T divides by 16 and R_i
            is a power of two from 16 on.
    """
    num_rows = pieces[0].shape[1]
    block = row_block(num_rows, max(16, TILE // max(piece.shape[2] for piece in pieces)))
    *starts, end = itertools.accumulate((piece.shape[2] for piece in pieces), initial=0)
    assert all(end <= extent for extent in (columns, rows) if extent), (end, columns, rows)
    shapes = [(num_rows, columns)] * (columns > 0) + [(rows, num_rows)] * (rows > 0)

    def kernel(*refs):  # a program has some rows of a piece, or of the zeros after all pieces
        row_range, number = pl.ds(pl.program_id(0) * block, block), pl.program_id(1)
        joined_ref, transposed_ref = refs[len(pieces)], refs[-1]  # the same array if only one is asked for

        for i, piece in enumerate(pieces):

            @pl.when(number == i)
            def _(ref=refs[i], parts=piece.shape[0], start=starts[i], rank=piece.shape[2]):
                total = ref[0, row_range, :].astype(jnp.float32)
                for part in range(1, parts):
                    total = total + ref[part, row_range, :]
                if columns:
                    joined_ref[row_range, pl.ds(start, rank)] = total.astype(dtype)
                if rows:
                    transposed_ref[pl.ds(start, rank), row_range] = total.astype(dtype).T

        @pl.when(number == len(pieces))
        def _():
            for start, size in _powers_of_two(end, columns):
                joined_ref[row_range, pl.ds(start, size)] = jnp.zeros((block, size), dtype)
            for start, size in _powers_of_two(end, rows):
                transposed_ref[pl.ds(start, size), row_range] = jnp.zeros((size, block), dtype)

    return call(
        kernel,
        pieces,
        name="lora_join",
        grid=(num_rows // block, len(pieces) + (max(columns, rows) > end)),
        out_shape=tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes),
        num_warps=4,
        num_stages=1,
        interpret=interpret,
    )


def _powers_of_two(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cuts a range into pieces that a kernel can write: first element and length, a power of two."""
    while start < stop:
        size = (stop - start) & -(stop - start)
        yield start, size
        start += size
