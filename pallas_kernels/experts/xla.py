"""The projections of experts in plain jnp, for every device: tile after tile, then the low-rank terms run by run.

`jax.lax.ragged_dot` is not used: but on a TPU it is lowered to a dense product with every expert, E times the work.

M sorted rows · K in · N out · E experts · A adapters · R padded rank · J rows of a tile
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.exact import contract
from pallas_kernels.experts.fp8 import Fp8Experts, Kernels
from pallas_kernels.experts.rows import ExpertRows
from pallas_kernels.quantised.fp8 import sum_last


def kernels(w: jax.Array, experts: int) -> jax.Array:
    """[E · K, N] → [E, K, N]"""
    return w.reshape(experts, -1, w.shape[1])


def product(x: jax.Array, w: Kernels, rows: ExpertRows, experts: int, *, transposed: bool = False) -> jax.Array:
    """Multiplies each tile by its expert's kernel, or by its transpose."""
    return _product(x, w, rows, experts, transposed=transposed).astype(x.dtype)


def forward(
    x: jax.Array,
    w: Kernels,
    rows: ExpertRows,
    experts: int,
    a: jax.Array,
    b: jax.Array,
    scale: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns y and S = x A, in the type of x."""
    x_wide = _lengthened(x, rows)

    def add(sums, row0, inside, p, e):
        y, s = sums
        s_JR = contract("jk,kr->jr", _rows(x_wide, row0, rows), a[p, e].astype(x.dtype)).astype(x.dtype)
        low_JN = contract("jr,rn->jn", s_JR, (b[p, e] * scale[p]).astype(x.dtype))
        return _put(y, row0, inside, _rows(y, row0, rows) + low_JN), _put(s, row0, inside, s_JR)

    y = _lengthened(_product(x, w, rows, experts, transposed=False), rows)
    s = jnp.zeros((len(x_wide), a.shape[-1]), x.dtype)
    y, s = _over_runs(rows, len(scale), experts, add, (y, s))
    return y[: len(x)].astype(x.dtype), s[: len(x)]


def backward(
    x: jax.Array, w: Kernels, rows: ExpertRows, experts: int, a: jax.Array, b: jax.Array, scale: jax.Array,
    s: jax.Array, dy: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Returns dx, and dA and dB in float32."""
    dy = dy.astype(x.dtype)
    wide = [_lengthened(array, rows) for array in (x, s, dy)]

    def add(sums, row0, inside, p, e):
        dx, da, db = sums
        x_JK, s_JR, dy_JN = (jnp.where(inside, _rows(array, row0, rows), 0) for array in wide)
        ds_JR = contract("jn,rn->jr", dy_JN, (b[p, e] * scale[p]).astype(x.dtype)).astype(x.dtype)
        low_JK = contract("jr,kr->jk", ds_JR, a[p, e].astype(x.dtype))
        ds_JR = jnp.where(inside, ds_JR, 0)  # B may have a NaN, and zero times it is one
        da = da.at[p, e].add(contract("jk,jr->kr", x_JK, ds_JR), unique_indices=True)
        db = db.at[p, e].add(contract("jr,jn->rn", s_JR, dy_JN) * scale[p], unique_indices=True)
        return _put(dx, row0, inside, _rows(dx, row0, rows) + low_JK), da, db

    dx = _lengthened(_product(dy, w, rows, experts, transposed=True), rows)
    zeros = jnp.zeros(a.shape, jnp.float32), jnp.zeros(b.shape, jnp.float32)
    dx, da, db = _over_runs(rows, len(scale), experts, add, (dx, *zeros))
    return dx[: len(x)].astype(x.dtype), da, db


def _product(x: jax.Array, w: Kernels, rows: ExpertRows, experts: int, *, transposed: bool) -> jax.Array:
    """In float32."""
    if isinstance(w, Fp8Experts):
        return _fp8_product(x, w, rows, transposed=transposed)
    w_EKN = kernels(w, experts)
    spec = "jn,kn->jk" if transposed else "jk,kn->jn"
    return _over_tiles(x, rows, lambda x_JK, expert: contract(spec, x_JK, w_EKN[expert]))


def _fp8_product(x: jax.Array, w: Fp8Experts, rows: ExpertRows, *, transposed: bool) -> jax.Array:
    x8, row_scales = w.rounded(rows, x, transposed=transposed, interpret=None)

    def product_of_tile(x8_J: jax.Array, expert: jax.Array) -> jax.Array:
        values_NK = w.values_ENK[expert]
        if transposed:
            return sum_last(x8_J, values_NK.T, jnp.float32)
        return sum_last(x8_J, values_NK, jnp.float32) * w.scales[expert]

    return _over_tiles(x8, rows, product_of_tile) * row_scales


def _over_tiles(x: jax.Array, rows: ExpertRows, product: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """Runs product(rows of a tile, expert) on every tile; zero where a tile has no rows."""

    def product_of_tile(tile):
        x_J, expert = tile
        shape = jax.eval_shape(product, x_J, expert).shape
        return lax.cond(expert >= 0, lambda: product(x_J, expert), lambda: jnp.zeros(shape, jnp.float32))

    tiles = x.reshape(len(rows.tile_expert), -1, x.shape[-1])
    out = lax.map(product_of_tile, (tiles, rows.tile_expert))
    return out.reshape(len(x), -1)


def _over_runs(rows: ExpertRows, adapters: int, experts: int, add: Callable[..., Any], start: Any) -> Any:
    """Folds add(carry, row0, inside [J, 1], p, e) over blocks of J rows, which begin where the run of (p, e) does.

    So what is summed in which order does not depend on the rows of other adapters.
    """

    def add_run(pair, carry):
        p, e = pair // experts, pair % experts
        run = e * (adapters + 1) + p
        first, stop = rows.run_start[run], rows.run_stop[run]

        def add_block(block, carry):
            row0 = first + block * rows.tile
            inside = row0 + jnp.arange(rows.tile) < stop
            return add(carry, row0, inside[:, None], p, e)

        return lax.fori_loop(0, -(-(stop - first) // rows.tile), add_block, carry)

    return lax.fori_loop(0, adapters * experts, add_run, start)


def _lengthened(array: jax.Array, rows: ExpertRows) -> jax.Array:
    """With a tile more, because a run's last block may go beyond the last row."""
    return jnp.pad(array, ((0, rows.tile), (0, 0)))


def _rows(array: jax.Array, row0: jax.Array, rows: ExpertRows) -> jax.Array:
    return lax.dynamic_slice_in_dim(array, row0, rows.tile)


def _put(array: jax.Array, row0: jax.Array, inside: jax.Array, values: jax.Array) -> jax.Array:
    """Selects: a NaN in the adapter of these rows must not reach others."""
    current_rows = lax.dynamic_slice_in_dim(array, row0, len(values))
    return lax.dynamic_update_slice_in_dim(array, jnp.where(inside, values, current_rows), row0, axis=0)
