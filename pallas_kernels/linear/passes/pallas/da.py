"""dA = drop(x)^T dS: one pass over x for all projections that share it.

T packed tokens · K in features · R padded rank (of all projections together) · A adapters · C chunks
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.linear.chunks import Chunks
from pallas_kernels.linear.passes.config import DaConfig
from pallas_kernels.triton_call import call, dot, keep_tile


def da(
    x: jax.Array,
    ds: jax.Array,
    bits: jax.Array | None,
    chunks: Chunks,
    *,
    config: DaConfig,
    contiguous: bool,
    interpret: bool = False,
) -> jax.Array:
    """Returns partial sums of dA, float32 [C, K, R] (without the dropout scale)."""
    num_in, rank = x.shape[1], ds.shape[1]
    rows, columns, size = config.block_t, config.block_k, config.blocks_per_chunk
    total = chunks.blocks.shape[0]

    def kernel(x_ref, ds_ref, blocks_ref, count_ref, *rest):
        out_ref = rest[-1]
        col0, chunk = pl.program_id(0) * columns, pl.program_id(1)

        # Blocks of rows of one adapter stream by; x is masked as it is loaded, and the sum stays in registers.
        def step(i, acc):
            row0 = (chunk * size + i if contiguous else blocks_ref[chunk, i]) * rows
            x_tile = x_ref[pl.ds(row0, rows), pl.ds(col0, columns)]
            if bits is not None:
                keep = keep_tile(rest[0], row0, col0, rows, columns)
                x_tile = jnp.where(keep, x_tile, jnp.zeros_like(x_tile))
            return acc + dot(x_tile, ds_ref[pl.ds(row0, rows), :], trans_lhs=True)

        count = size if contiguous else count_ref[chunk]
        out_ref[chunk, pl.ds(col0, columns), :] = lax.fori_loop(0, count, step, jnp.zeros((columns, rank), jnp.float32))

    return call(
        kernel,
        [x, ds, chunks.blocks, chunks.count] + ([] if bits is None else [bits]),
        name="lora_da",
        grid=(num_in // columns, total),
        out_shape=jax.ShapeDtypeStruct((total, num_in, rank), jnp.float32),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        flops=2 * x.shape[0] * num_in * rank,
    )
