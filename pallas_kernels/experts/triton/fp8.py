"""The frozen product of 8-bit floats as a Triton kernel; see `experts.fp8`.

Both directions sum over the last axis of both operands, so backward reads the values in another order: XLA turns them
over before, which is a pass over one byte per weight.

M sorted rows · K in · N out · E experts · A adapters · Q rank padded to a power of two
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.device import interprets
from pallas_kernels.experts.fp8 import Fp8Experts
from pallas_kernels.experts.rows import ExpertRows
from pallas_kernels.experts.triton.blocks import FP8_CUTS, Blocks, add_low_rank, fastest_blocks
from pallas_kernels.sizes import row_block
from pallas_kernels.triton_call import call, dot_8bit


def widened(lhs: jax.Array, w: Fp8Experts, rows: ExpertRows, *, transposed: bool) -> tuple[jax.Array, jax.Array]:
    """The same factors of the product in the type of lhs, which holds them exactly."""
    # Kernels cannot convert to 8-bit floats on these GPUs, but XLA can.
    lhs8, row_scales = w.rounded(rows, lhs, transposed=transposed, interpret=None)
    # Backward has the scales of W in lhs.
    wide = w.dense(lhs.dtype, scaled=not transposed)
    return (lhs8.astype(jnp.float32) * row_scales).astype(lhs.dtype), wide


def gemm(
    lhs: jax.Array, w: Fp8Experts, rows: ExpertRows, experts: int, low: tuple[jax.Array, jax.Array] | None,
    cut: Blocks | None, *, transposed: bool,
) -> jax.Array:  # fmt: skip
    """lhs W[e] + low bank[p, e], or with both transposed, in the type of lhs."""
    width, values = (w.shape[0] // experts, w.values_turned) if transposed else (w.shape[1], w.values)
    lhs8, row_scales = w.rounded(rows, lhs, transposed=transposed, interpret=interprets())
    cut = cut or fastest_blocks(rows.tile, values.dtype.itemsize, FP8_CUTS)
    tile, columns, depth = rows.tile, row_block(width, cut.columns), row_block(values.shape[1], cut.depth)
    blocks, steps = width // columns, values.shape[1] // depth
    column_scales = [] if transposed else [w.scales]

    def kernel(lhs_ref, w_ref, expert_ref, row_ref, *rest):
        column_refs, low_refs, out_ref = rest[: len(column_scales)], rest[len(column_scales) : -1], rest[-1]
        number, column0 = pl.program_id(0) // blocks, pl.program_id(0) % blocks * columns
        expert = expert_ref[number]  # all rows of a tile belong to it
        tile_rows, tile_columns = pl.ds(number * tile, tile), pl.ds(column0, columns)

        @pl.when(expert < 0)
        def _():
            out_ref[tile_rows, tile_columns] = jnp.zeros((tile, columns), out_ref.dtype)

        @pl.when(expert >= 0)
        def _():
            def step(i, acc):
                inner = pl.ds(i * depth, depth)
                return dot_8bit(lhs_ref[tile_rows, inner], w_ref[pl.ds(expert * width + column0, columns), inner], acc)

            acc = lax.fori_loop(0, steps, step, jnp.zeros((tile, columns), jnp.float32))
            acc = acc * row_ref[tile_rows][:, None]
            for column_ref in column_refs:
                acc = acc * column_ref[expert, tile_columns][None, :]
            if low_refs:
                acc = add_low_rank(acc, number, tile_rows, tile_columns, experts, [*low_refs], transposed=transposed)
            out_ref[tile_rows, tile_columns] = acc.astype(out_ref.dtype)

    of_adapters = [] if low is None else [*low, rows.tile_segment, rows.segment_run, rows.run_start, rows.run_stop]
    return call(
        kernel,
        [lhs8, values, rows.tile_expert, row_scales[:, 0], *column_scales, *of_adapters],
        name="experts_fp8_dx" if transposed else "experts_fp8_forward",
        grid=(len(rows.tile_expert) * blocks,),
        out_shape=jax.ShapeDtypeStruct((len(lhs), width), lhs.dtype),
        num_warps=cut.num_warps if tile >= 64 else 4,
        num_stages=cut.num_stages,
        interpret=interprets(),
        flops=2 * len(lhs) * width * values.shape[1],
    )
