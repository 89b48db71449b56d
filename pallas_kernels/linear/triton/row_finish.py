"""What finishes the products of decoding: sums of parts, scales, biases and S B of each row's adapter, in one launch.

    y[t] = round(Σ_z parts[z, t] · row_scale[t] · column_scale + bias + round(scale · S[t]) B[slot of t])

Each row's S stands in the columns of its adapter and 0 in the others, so one product with the B of all adapters serves
rows in any order, and nothing but zeros is added to a row for the others.

T rows · N out features · C columns: ranks of all adapters side by side · Z parts · A adapters
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.device import interprets
from pallas_kernels.linear.triton.row_sums import ROWS, by_tile
from pallas_kernels.triton_call import call, dot

WIDTH = 64  # columns of a program


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """One projection.

    Attributes:
        parts: float32 [Z, T, N].
        b_CN: [A · R, N], adapters below each other; None without LoRA.
        rank: R, a power of two.
        offset: of its columns in S.
        bias, column_scale: [N]; the second with 8-bit weights.
        row_scale: float32 [T], as well.
    """

    parts: Array
    b_CN: Array | None = None
    rank: int = 0
    offset: int = 0
    bias: Array | None = None
    column_scale: Array | None = None
    row_scale: Array | None = None


def row_finish(
    projections: Sequence[Finish],
    s_ZTR: Float[Array, "Z T _"] | None,
    slot_T: Int[Array, " T"],
    scale_A: Float[Array, " A"],
    dtypes: Sequence[Any],
) -> tuple[Array, ...]:
    """Returns y of each projection.

    Args:
        s_ZTR: parts of S, see `row_sums`.
        slot_T: int32, -1 for none.
        dtypes: of each y. S is rounded to the type of B before and after its scale.
    """
    T = len(slot_T)
    counts = [p.parts.shape[2] // WIDTH for p in projections]
    fields = ("parts", "b_CN", "bias", "column_scale", "row_scale")
    arrays = [slot_T, scale_A] + ([] if s_ZTR is None else [s_ZTR.reshape(-1, s_ZTR.shape[2])])
    positions = []  # of the arrays of each projection among the operands
    for p in projections:
        present = {name: array for name in fields if (array := getattr(p, name)) is not None}
        positions.append(dict(zip(present, range(len(arrays), len(arrays) + len(present)), strict=True)))
        arrays += present.values()

    def kernel(*refs):
        row, tile = pl.program_id(0), pl.program_id(1)
        rows = pl.ds(row * ROWS, ROWS)

        def finish(number: int, tile: Array) -> None:
            p, at = projections[number], pl.ds(tile * WIDTH, WIDTH)
            ref = {name: refs[position] for name, position in positions[number].items()}
            y = ref["parts"][0, rows, at]
            for part in range(1, p.parts.shape[0]):
                y += ref["parts"][part, rows, at]
            if p.row_scale is not None:
                y *= ref["row_scale"][rows][:, None]
            if p.column_scale is not None:
                y *= ref["column_scale"][at][None, :]
            if p.bias is not None:
                y += ref["bias"][at].astype(jnp.float32)[None, :]
            if p.b_CN is not None:
                y += _low_rank(p, ref["b_CN"], refs[:3], row * ROWS, at)
            out_ref = refs[len(arrays) + number]
            out_ref[rows, at] = y.astype(out_ref.dtype)

        by_tile(tile, counts, [(finish, number) for number in range(len(projections))])

    return tuple(
        call(
            kernel,
            arrays,
            name="row_finish",
            grid=(T // ROWS, sum(counts)),
            out_shape=[
                jax.ShapeDtypeStruct(p.parts.shape[1:], dtype) for p, dtype in zip(projections, dtypes, strict=True)
            ],
            num_warps=4,
            num_stages=4,
            interpret=interprets(),
        )
    )


def _low_rank(p: Finish, b_ref: Any, row_refs: Sequence[Any], first: Array, at: Any) -> Array:
    """S B of a tile of rows, float32.

    Args:
        row_refs: slots, scales, and S with its parts below each other.
        first: row of the tile.
        at: columns of B.
    """
    assert p.b_CN is not None
    (slot_ref, scale_ref, s_ref), num_columns = row_refs, p.b_CN.shape[0]
    T, step_columns = slot_ref.shape[0], max(WIDTH, p.rank)
    cell, column = first + lax.iota(jnp.int32, ROWS), lax.iota(jnp.int32, step_columns)
    shape = (ROWS, step_columns)
    # S of a row stands as often as adapters fit into a step; each step selects its own.
    own_column = jnp.broadcast_to(p.offset + lax.rem(column, jnp.int32(p.rank)), shape)
    s = jnp.zeros(shape, jnp.float32)
    for part in range(s_ref.shape[0] // T):
        s += s_ref[jnp.broadcast_to((part * T + cell)[:, None], shape), own_column]
    slot = slot_ref[pl.ds(first, ROWS)]
    scale = scale_ref[jnp.maximum(slot, 0)]
    low_dtype = b_ref.dtype
    s = (s.astype(low_dtype).astype(jnp.float32) * scale[:, None]).astype(low_dtype)

    def step(number, total):
        columns = number * step_columns + column
        mine = slot[:, None] == lax.div(columns, jnp.int32(p.rank))[None, :]
        # Selected, not multiplied: rows without an adapter have anything in S.
        selected = jnp.where(mine, s, jnp.zeros_like(s))
        if num_columns % step_columns:  # rows of B beyond the last meet zeros
            return total + dot(selected, b_ref[jnp.minimum(columns, num_columns - 1), at])
        return total + dot(selected, b_ref[pl.ds(number * step_columns, step_columns), at])

    return lax.fori_loop(0, -(-num_columns // step_columns), step, jnp.zeros((ROWS, WIDTH), jnp.float32))
