"""The norm in plain jnp, compiled by XLA.

T rows · D width
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def norm_forward(
    x: jax.Array, delta: jax.Array | None, weight: jax.Array, *, eps: float, interpret: bool = False
) -> tuple[jax.Array, ...]:
    """y = weight · s / sqrt(mean(s²) + eps),  s = x (+ delta)

    Returns:
        (y [T, D], inverse root float32 [T]), and s [T, D] in front if there is a delta.
    """
    del interpret
    added = () if delta is None else (x + delta,)
    wide = (added[0] if added else x).astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(wide * wide, axis=-1) + eps)
    y = (wide * inverse[:, None] * weight.astype(jnp.float32)).astype(x.dtype)
    return *added, y, inverse


def norm_backward(
    dy: jax.Array, ds: jax.Array | None, s: jax.Array, inverse: jax.Array, weight: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """dx = (ds +) inverse · (u - s · inverse · mean(s · inverse · u)),  u = weight · dy"""
    del interpret
    unit, u = s.astype(jnp.float32) * inverse[:, None], dy.astype(jnp.float32) * weight.astype(jnp.float32)
    dx = inverse[:, None] * (u - unit * jnp.mean(unit * u, axis=-1, keepdims=True))
    return (dx if ds is None else dx + ds.astype(jnp.float32)).astype(s.dtype)
