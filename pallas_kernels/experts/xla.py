"""The projections of experts in plain jnp, for every device: tile after tile, each with its own expert and adapter.

`jax.lax.ragged_dot` is not used: but on a TPU it is lowered to a dense product with every expert, E times the work.

M sorted rows · K in · N out · E experts · A adapters · R padded rank · J rows of a tile
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.experts.rows import ExpertRows


def kernels(w: jax.Array, experts: int) -> jax.Array:
    """[E · K, N] → [E, K, N]"""
    return w.reshape(experts, -1, w.shape[1])


def product(x: jax.Array, w: jax.Array, rows: ExpertRows, experts: int, *, transposed: bool = False) -> jax.Array:
    """Multiplies each tile by its expert's kernel, or by its transpose."""
    w_EKN, tile_expert = kernels(w, experts), rows.tile_expert
    out = w_EKN.shape[1 if transposed else 2]

    def product_of_tile(tile):
        x_JK, expert = tile
        return lax.cond(
            expert >= 0,
            lambda: _dot("jn,kn->jk" if transposed else "jk,kn->jn", x_JK, w_EKN[expert]).astype(x.dtype),
            lambda: jnp.zeros((x_JK.shape[0], out), x.dtype),
        )

    return lax.map(product_of_tile, (_tiles(x, tile_expert), tile_expert)).reshape(-1, out)


def forward(
    x: jax.Array, w: jax.Array, rows: ExpertRows, experts: int, a: jax.Array, b: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns y and S = x A, in the type of x."""
    w_EKN, tile_expert, tile_adapter = kernels(w, experts), rows.tile_expert, rows.tile_adapter
    out = w.shape[1]

    def product_of_tile(tile):
        x_JK, expert, adapter = tile
        e, p = jnp.maximum(expert, 0), jnp.maximum(adapter, 0)

        def with_rows():
            y_JN = _dot("jk,kn->jn", x_JK, w_EKN[e])
            s_JR = _dot("jk,kr->jr", x_JK, a[p, e].astype(x.dtype)).astype(x.dtype)
            low_JN = _dot("jr,rn->jn", s_JR, (b[p, e] * scale[p]).astype(x.dtype))
            has = adapter >= 0  # selected: a NaN in the adapter of another tile must not reach these rows
            return jnp.where(has, y_JN + low_JN, y_JN).astype(x.dtype), jnp.where(has, s_JR, jnp.zeros((), x.dtype))

        nothing = lambda: (jnp.zeros((len(x_JK), out), x.dtype), jnp.zeros((len(x_JK), a.shape[-1]), x.dtype))  # noqa: E731
        return lax.cond(expert >= 0, with_rows, nothing)

    y, s = lax.map(product_of_tile, (_tiles(x, tile_expert), tile_expert, tile_adapter))
    return y.reshape(-1, out), s.reshape(-1, a.shape[-1])


def backward(
    x: jax.Array, w: jax.Array, rows: ExpertRows, experts: int, a: jax.Array, b: jax.Array, scale: jax.Array,
    s: jax.Array, dy: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Returns dx, and dA and dB in float32."""
    w_EKN, tile_expert, tile_adapter = kernels(w, experts), rows.tile_expert, rows.tile_adapter

    def product_of_tile(sums, tile):
        x_JK, s_JR, dy_JN, expert, adapter = tile
        e, p = jnp.maximum(expert, 0), jnp.maximum(adapter, 0)

        def frozen():
            return _dot("jn,kn->jk", dy_JN, w_EKN[e])

        def with_adapter():
            da, db = sums
            ds_JR = _dot("jn,rn->jr", dy_JN, (b[p, e] * scale[p]).astype(x.dtype)).astype(x.dtype)
            dx_JK = frozen() + _dot("jr,kr->jk", ds_JR, a[p, e].astype(x.dtype))
            da = da.at[p, e].add(_dot("jk,jr->kr", x_JK, ds_JR), unique_indices=True)
            db = db.at[p, e].add(_dot("jr,jn->rn", s_JR, dy_JN) * scale[p], unique_indices=True)
            return (da, db), dx_JK.astype(x.dtype)

        def without():
            return sums, frozen().astype(x.dtype)

        def nothing():
            return sums, jnp.zeros_like(x_JK)

        kind = jnp.where(expert < 0, 0, jnp.where(adapter < 0, 1, 2))
        return lax.switch(kind, [nothing, without, with_adapter])

    zeros = jnp.zeros(a.shape, jnp.float32), jnp.zeros(b.shape, jnp.float32)
    of_tiles = (
        _tiles(x, tile_expert),
        _tiles(s, tile_expert),
        _tiles(dy.astype(x.dtype), tile_expert),
        tile_expert,
        tile_adapter,
    )
    (da, db), dx = lax.scan(product_of_tile, zeros, of_tiles)
    return dx.reshape(x.shape), da, db


def _tiles(x: jax.Array, tile_expert: jax.Array) -> jax.Array:
    return x.reshape(len(tile_expert), -1, x.shape[-1])


def _dot(spec: str, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    precision = "highest" if lhs.dtype == jnp.float32 else None  # tf32 does not keep what float32 promises
    return jnp.einsum(spec, lhs, rhs, precision=precision, preferred_element_type=jnp.float32)
