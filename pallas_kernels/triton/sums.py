"""Partial sums of several adapters, added up per adapter in one pass and in a fixed order.

Every program owns a block of one adapter's gradient and walks all partial sums; a masked load skips those of other
adapters, so nothing foreign is read, and the order of the additions does not depend on who else is in the call.

C chunks · M rows of a partial sum · R padded rank · A adapters
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp
from jax import lax

from pallas_kernels.triton.common import call

UNROLL = 8  # loads in flight per step


def sum_partials(
    partials: jax.Array, adapter: jax.Array, factor: jax.Array, *, transposed: bool, interpret: bool = False
) -> jax.Array:
    """Returns factor[k] * sum of the partial sums of adapter k: float32 [A, M, R], or [A, R, M] when transposed.

    Args:
        partials: float32 [C, M, R]; M divides by 32.
        adapter: int32 [C]; chunks of other numbers than 0 .. A - 1 belong to nobody.
        factor: float32 [A].
    """
    chunks, size, rank = partials.shape
    num_adapters = factor.shape[0]
    rows = 32
    steps = -(-chunks // UNROLL)
    adapter = jnp.pad(adapter, (0, steps * UNROLL - chunks), constant_values=-1)

    def kernel(partials_ref, adapter_ref, factor_ref, out_ref):
        own, row0 = pl.program_id(1), pl.program_id(0) * rows

        def step(i, acc):
            for j in range(UNROLL):
                chunk = i * UNROLL + j
                mine = jnp.broadcast_to(adapter_ref[chunk] == own, (rows, rank))
                chunk = jnp.minimum(chunk, chunks - 1)
                source = partials_ref.at[chunk, pl.ds(row0, rows), :]
                acc = acc + plt.load(source, mask=mine, other=0.0)
            return acc

        acc = lax.fori_loop(0, steps, step, jnp.zeros((rows, rank), jnp.float32)) * factor_ref[own]
        if transposed:
            out_ref[own, :, pl.ds(row0, rows)] = acc.T
        else:
            out_ref[own, pl.ds(row0, rows), :] = acc

    shape = (num_adapters, rank, size) if transposed else (num_adapters, size, rank)
    return call(
        kernel,
        [partials, adapter, factor],
        name="lora_sum",
        grid=(size // rows, num_adapters),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        num_warps=4,
        num_stages=3,
        interpret=interpret,
    )
