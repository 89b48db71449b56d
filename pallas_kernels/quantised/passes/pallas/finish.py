"""The last step of a product of 8-bit floats: its scales, and the low-rank part of each row's adapter.

    y[t, n] = sums[t, n] · row_scale[t] · column_scale[n] + S[t] B[k, :, n],  k = adapter of row t

One pass over the sums, which the scales need anyway. A low-rank product of its own would write an array as wide as y,
and another pass would read it.

T rows · N columns · R padded rank · A adapters
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.sizes import row_block
from pallas_kernels.triton_call import call, dot

COLUMNS = 128
NUM_WARPS = 4


def finish(
    sums: Float[Array, "T N"],
    row_scales: Float[Array, "T 1"],
    column_scales: Float[Array, " N"] | None,
    s: Float[Array, "T _"],
    bank: Float[Array, "A R N"],
    block_adapter: Int[Array, " blocks"],
    *,
    rank_offset: int = 0,
    interpret: bool = False,
) -> Float[Array, "T N"]:
    """Returns y in the type of S.

    Args:
        s: columns rank_offset .. rank_offset + R belong to this product.
        bank: scales folded in; padding rows are served by an adapter of zeros.
        block_adapter: of every block of T / blocks rows, a power of two.
    """
    T, N = sums.shape
    rank = bank.shape[1]
    rows, columns = T // len(block_adapter), row_block(N, COLUMNS)

    def kernel(sums_ref, row_ref, s_ref, bank_ref, adapter_ref, *refs):
        *column_ref, out_ref = refs
        block = pl.program_id(0)
        row_range, features = pl.ds(block * rows, rows), pl.ds(pl.program_id(1) * columns, columns)
        low = dot(s_ref[row_range, pl.ds(rank_offset, rank)], bank_ref[adapter_ref[block], :, features])
        y = sums_ref[row_range, features].astype(jnp.float32) * row_ref[row_range][:, None]
        if column_ref:
            y = y * column_ref[0][features][None]
        out_ref[row_range, features] = (y + low).astype(out_ref.dtype)

    return call(
        kernel,
        [sums, row_scales[:, 0], s, bank, block_adapter, *([] if column_scales is None else [column_scales])],
        name="fp8_finish",
        grid=(len(block_adapter), N // columns),
        out_shape=jax.ShapeDtypeStruct((T, N), s.dtype),
        num_warps=NUM_WARPS,
        num_stages=1,
        interpret=interpret,
        flops=2 * T * N * rank,
    )
