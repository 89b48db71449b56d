"""Root-mean-square normalisation in float32. Dims: `D` normalised width."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    """y = weight · x / √(mean(x²) + eps), in float32, cast back to the dtype of x."""

    def __init__(self, width: int, *, eps: float, dtype: Any):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((width,), dtype))

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        return rms_norm(self.eps, x, self.weight[...])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def rms_norm(eps: float, x: Float[Array, "*B D"], weight: Float[Array, " D"]) -> Float[Array, "*B D"]:
    """Normalises the last axis; see `RMSNorm`. Backward keeps x and one number per row."""
    return _forward(eps, x, weight)[0]


def _forward(eps, x, weight):
    wide = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * inverse * weight.astype(jnp.float32)).astype(x.dtype), (x, weight, inverse)


def _backward(eps, residuals, dy):
    del eps  # unused: it is in `inverse`
    x, weight, inverse = residuals
    wide, dy = x.astype(jnp.float32), dy.astype(jnp.float32)
    unit, du = wide * inverse, dy * weight.astype(jnp.float32)
    dx = inverse * (du - unit * jnp.mean(unit * du, axis=-1, keepdims=True))
    dweight = jnp.sum(dy * unit, axis=tuple(range(x.ndim - 1)))  # dropped by the compiler where the base is frozen
    return dx.astype(x.dtype), dweight.astype(weight.dtype)


rms_norm.defvjp(_forward, _backward)
