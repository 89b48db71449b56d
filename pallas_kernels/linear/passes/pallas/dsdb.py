"""dS = scale dY B^T and dB = scale S^T dY in one pass over dY.

A program has a few row blocks of one adapter and a range of columns.  S and the dS accumulators of its rows stay in
registers over all columns; dB of a column block is summed over its rows and written as one partial sum.

T packed tokens · N out features · R padded rank · A adapters · C chunks of rows
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.linear.passes.config import DsdbConfig
from pallas_kernels.triton_call import call, dot


def dsdb(
    dy: jax.Array,
    s: jax.Array,
    b: jax.Array,
    chunk_adapter: jax.Array,
    *,
    rank_offset: int = 0,
    config: DsdbConfig,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns partial sums of dS [split_n, T, R] and of dB, float32 [C, N, R] (without scale; transposed).

    Those of dS are float32; a single one is in dy.dtype.

    Args:
        s: [T, >= R]; columns rank_offset .. rank_offset + R belong to this projection.
        b: [A, R, N], the scale folded in; padding rows are served by an adapter of zeros.
        chunk_adapter: int32 [T / config.chunk].
    """
    num_rows, num_out = dy.shape
    rank = b.shape[1]
    rows, columns, size = config.block_t, config.block_n, config.blocks_per_chunk
    steps = num_out // config.split_n // columns

    def kernel(dy_ref, s_ref, b_ref, adapter_ref, ds_ref, db_ref):
        chunk, part = pl.program_id(0), pl.program_id(1)
        adapter = adapter_ref[chunk]
        row_ranges = [pl.ds((chunk * size + j) * rows, rows) for j in range(size)]
        # S of a chunk stays in registers, and dS gathers there; dB of a column block is complete after one step.
        s_tiles = [s_ref[row_range, pl.ds(rank_offset, rank)] for row_range in row_ranges]

        def step(i, accs):
            col_range = pl.ds((part * steps + i) * columns, columns)
            b_tile = b_ref[adapter, :, col_range]
            db = jnp.zeros((columns, rank), jnp.float32)
            out = []
            for row_range, s_tile, acc in zip(row_ranges, s_tiles, accs, strict=True):
                dy_tile = dy_ref[row_range, col_range]  # read once, for both products
                out.append(acc + dot(dy_tile, b_tile, trans_rhs=True))
                db = db + dot(dy_tile, s_tile, trans_lhs=True)
            db_ref[chunk, col_range, :] = db
            return tuple(out)

        accs = lax.fori_loop(0, steps, step, tuple(jnp.zeros((rows, rank), jnp.float32) for _ in range(size)))
        for row_range, acc in zip(row_ranges, accs, strict=True):
            ds_ref[part, row_range, :] = acc.astype(ds_ref.dtype)

    num_chunks = num_rows // config.chunk
    ds_dtype = dy.dtype if config.split_n == 1 else jnp.float32
    return call(
        kernel,
        [dy, s, b, chunk_adapter],
        name="lora_dsdb",
        grid=(num_chunks, config.split_n),
        out_shape=(
            jax.ShapeDtypeStruct((config.split_n, num_rows, rank), ds_dtype),
            jax.ShapeDtypeStruct((num_chunks, num_out, rank), jnp.float32),
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        flops=4 * num_rows * num_out * rank,
    )
