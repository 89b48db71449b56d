"""Root-mean-square norm of rows, with the addition before it, in one pass over memory each way.

XLA makes two passes of either direction (a reduction, then the elementwise rest): 20 + 42 us forward and 67 + 91 us
backward for 8192 rows of 4096 on an H200, where reading and writing once takes 31 and 62.

T rows · D width
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp
from jax import lax

from pallas_kernels.sizes import power_of_two
from pallas_kernels.triton_call import call

BLOCK = 8192  # elements of a program: wide rows alone, narrow rows together
NUM_WARPS = 8


def norm_forward(
    x: jax.Array, delta: jax.Array | None, weight: jax.Array, *, eps: float, interpret: bool = False
) -> tuple[jax.Array, ...]:
    """y = weight · s / sqrt(mean(s²) + eps),  s = x (+ delta rounded to the dtype of x)

    Returns:
        (y [T, D], inverse root float32 [T]), and s [T, D] in front if there is a delta.
    """
    T, D = x.shape
    rows, columns = _rows(T, D), _Columns(D)

    def kernel(*refs):
        x_ref, *other_refs = refs
        delta_ref = other_refs.pop(0) if delta is not None else None
        weight_ref, *outs = other_refs
        index = columns.of(rows)
        s = plt.load(x_ref.at[index], mask=columns.inside(rows), other=0.0)
        if delta_ref is not None:
            added = plt.load(delta_ref.at[index], mask=columns.inside(rows), other=0.0)
            # Rounded as the two operations alone would: a model computes the same with and without this kernel.
            s = (s.astype(jnp.float32) + added.astype(jnp.float32)).astype(s.dtype)
            plt.store(outs.pop(0).at[index], s, mask=columns.inside(rows))
        y_ref, inverse_ref = outs
        wide = s.astype(jnp.float32)  # the rows stay in registers from here on: one read, one write
        # Columns beyond D are 0 and add nothing to the sum, which is divided by D.
        inverse = lax.rsqrt(jnp.sum(wide * wide, axis=1) * (1.0 / D) + eps)
        y = wide * inverse[:, None] * columns.weight(weight_ref)[None]
        plt.store(y_ref.at[index], y.astype(y_ref.dtype), mask=columns.inside(rows))
        # Four bytes a row spare backward the sum of squares.
        inverse_ref[pl.ds(pl.program_id(0) * rows, rows)] = inverse

    out = [jax.ShapeDtypeStruct((T, D), x.dtype), jax.ShapeDtypeStruct((T,), jnp.float32)]
    operands = [x, weight]
    if delta is not None:
        out.insert(0, jax.ShapeDtypeStruct((T, D), x.dtype))
        operands.insert(1, delta)
    return tuple(
        call(
            kernel,
            operands,
            name="rms_norm",
            grid=(T // rows,),
            out_shape=out,
            num_warps=NUM_WARPS,
            num_stages=1,
            interpret=interpret,
        )
    )


def norm_backward(
    dy: jax.Array, ds: jax.Array | None, s: jax.Array, inverse: jax.Array, weight: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """dx = (ds +) inverse · (u - s · inverse · mean(s · inverse · u)),  u = weight · dy"""
    T, D = s.shape
    rows, columns = _rows(T, D), _Columns(D)

    def kernel(dy_ref, *refs):
        *more, s_ref, inverse_ref, weight_ref, dx_ref = refs
        # Every operand is read once, as whole rows: both sums over a row are taken in registers.
        index, inside = columns.of(rows), columns.inside(rows)
        scale = inverse_ref[pl.ds(pl.program_id(0) * rows, rows)][:, None]
        u = plt.load(dy_ref.at[index], mask=inside, other=0.0).astype(jnp.float32) * columns.weight(weight_ref)[None]
        unit = plt.load(s_ref.at[index], mask=inside, other=0.0).astype(jnp.float32) * scale
        # Columns beyond D are 0 in u and unit, so both sums are those of D columns.
        dx = scale * (u - unit * (jnp.sum(unit * u, axis=1) * (1.0 / D))[:, None])
        if more:  # the gradient of s itself; added before the only rounding
            dx = dx + plt.load(more[0].at[index], mask=inside, other=0.0).astype(jnp.float32)
        plt.store(dx_ref.at[index], dx.astype(dx_ref.dtype), mask=inside)

    return call(
        kernel,
        [dy, *([] if ds is None else [ds]), s, inverse, weight],
        name="rms_norm_backward",
        grid=(T // rows,),
        out_shape=jax.ShapeDtypeStruct((T, D), s.dtype),
        num_warps=NUM_WARPS,
        num_stages=1,
        interpret=interpret,
    )


def _rows(T: int, D: int) -> int:
    """Rows of a program: a power of two that divides T and fills a block."""
    rows = max(1, BLOCK // power_of_two(D))
    while T % rows:  # programs have no mask for rows
        rows //= 2
    return rows


class _Columns:
    """Indices of a program's rows; columns beyond D, up to the next power of two, are masked."""

    def __init__(self, D: int):
        self._D, self._padded = D, power_of_two(D)

    def of(self, rows: int) -> tuple:
        row = pl.program_id(0) * rows + lax.broadcasted_iota(jnp.int32, (rows, self._padded), 0)
        return row, self._column(rows)

    def inside(self, rows: int) -> jax.Array:
        return lax.broadcasted_iota(jnp.int32, (rows, self._padded), 1) < self._D

    def weight(self, ref) -> jax.Array:
        inside = lax.broadcasted_iota(jnp.int32, (self._padded,), 0) < self._D
        # The address stays inside the array also where the value is masked.
        column = jnp.minimum(lax.broadcasted_iota(jnp.int32, (self._padded,), 0), self._D - 1)
        return plt.load(ref.at[column], mask=inside, other=0.0).astype(jnp.float32)

    def _column(self, rows: int) -> jax.Array:
        return lax.broadcasted_iota(jnp.int32, (rows, self._padded), 1)
