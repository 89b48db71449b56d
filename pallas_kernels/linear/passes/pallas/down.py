"""S = drop(x) A: one pass over x for all projections that share it.

T packed tokens · K in features · R padded rank (of all projections together) · A adapters
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.linear.passes.config import DownConfig
from pallas_kernels.triton_call import call, dot, keep_tile


def down(
    x: jax.Array,
    a: jax.Array,
    block_adapter: jax.Array,
    bits: jax.Array | None,
    *,
    config: DownConfig,
    interpret: bool = False,
) -> jax.Array:
    """Returns S [T, R] in x.dtype.

    Args:
        a: [A, K, R], the dropout scale folded in; padding rows are served by an adapter of zeros.
        block_adapter: int32 [T / block_t].
        bits: uint32 [T, K / 256, 8]; None without dropout.
    """
    num_rows, num_in = x.shape
    rank = a.shape[2]
    rows, columns = config.block_t, config.block_k
    steps = num_in // config.split_k // columns

    def kernel(x_ref, a_ref, adapter_ref, *rest):
        out_ref = rest[-1]
        row0, part = pl.program_id(0) * rows, pl.program_id(1)
        adapter = adapter_ref[pl.program_id(0)]  # of all rows of the block

        # A program has a part of the features: S is narrow, and its rows alone would not fill the device.
        def step(i, acc):
            col0 = (part * steps + i) * columns
            x_tile = x_ref[pl.ds(row0, rows), pl.ds(col0, columns)]
            if bits is not None:
                keep = keep_tile(rest[0], row0, col0, rows, columns)
                x_tile = jnp.where(keep, x_tile, jnp.zeros_like(x_tile))
            return acc + dot(x_tile, a_ref[adapter, pl.ds(col0, columns), :])

        acc = lax.fori_loop(0, steps, step, jnp.zeros((rows, rank), jnp.float32))
        out_ref[part, pl.ds(row0, rows), :] = acc.astype(out_ref.dtype)

    partial_dtype = x.dtype if config.split_k == 1 else jnp.float32
    partials = call(
        kernel,
        [x, a, block_adapter] + ([] if bits is None else [bits]),
        name="lora_down",
        grid=(num_rows // rows, config.split_k),
        out_shape=jax.ShapeDtypeStruct((config.split_k, num_rows, rank), partial_dtype),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        flops=2 * num_rows * num_in * rank,
    )
    return partials[0] if config.split_k == 1 else partials.sum(0).astype(x.dtype)
