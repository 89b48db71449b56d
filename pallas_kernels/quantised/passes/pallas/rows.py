"""Rounding of rows to 8-bit floats in one pass: XLA reads the array twice, once for the largest of a row.

T rows · K columns
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.quantised.rows import E4M3, power_of_two_scales
from pallas_kernels.sizes import power_of_two
from pallas_kernels.triton_call import call

BLOCK = 8192  # elements of a program: wide rows one by one, narrow rows together
NUM_WARPS = 8


def round_rows(
    x: Float[Array, "T K"],
    factor: Float[Array, "*E K"] | None = None,
    owner: Int[Array, " blocks"] | None = None,
    *,
    dtype: Any = E4M3,
    interpret: bool = False,
) -> tuple[Float[Array, "T K"], Float[Array, "T 1"]]:
    """The same values and scales as `quantised.rows.round_rows` of x, or of x · factor in float32.

    Args:
        factor: [K], or with `owner` [E, K].
        owner: e of every block of T / blocks rows, a power of two.
        dtype: that the values are written in.
    """
    T, K = x.shape
    padded = power_of_two(K)
    of_owner = T if owner is None else T // len(owner)  # rows
    rows = min(rows_of_program(T, padded), of_owner)

    def kernel(x_ref, *refs):
        *factor_ref, out_ref, scale_ref = refs
        row = pl.program_id(0) * rows + lax.broadcasted_iota(jnp.int32, (rows, padded), 0)
        column = lax.broadcasted_iota(jnp.int32, (rows, padded), 1)
        wide = plt.load(x_ref.at[row, column], mask=column < K, other=0.0).astype(jnp.float32)
        if factor_ref:
            index = lax.broadcasted_iota(jnp.int32, (padded,), 0)
            at = (index,) if owner is None else (factor_ref[1][pl.program_id(0) * rows // of_owner], index)
            wide = wide * plt.load(factor_ref[0].at[at], mask=index < K, other=0.0)[None]
        scales, inverse = power_of_two_scales(jnp.max(jnp.abs(wide), axis=1))
        plt.store(
            out_ref.at[row, column], (wide * inverse[:, None]).astype(E4M3).astype(out_ref.dtype), mask=column < K
        )
        scale_ref[pl.ds(pl.program_id(0) * rows, rows)] = scales

    values, scales = call(
        kernel,
        [x, *(array for array in (factor, owner) if array is not None)],
        name="round_rows",
        grid=(T // rows,),
        out_shape=(jax.ShapeDtypeStruct((T, K), dtype), jax.ShapeDtypeStruct((T,), jnp.float32)),
        num_warps=NUM_WARPS,
        num_stages=1,
        interpret=interpret,
    )
    return values, scales[:, None]


def rows_of_program(T: int, padded: int) -> int:
    """A power of two that divides T and fills a block."""
    rows = max(1, BLOCK // padded)
    while T % rows:
        rows //= 2
    return rows
