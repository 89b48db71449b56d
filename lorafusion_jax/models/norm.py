"""Root-mean-square normalisation in float32. Dims: `D` normalised width."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    """y = weight · x / √(mean(x²) + eps), in float32, cast back to the dtype of x."""

    def __init__(self, width: int, *, eps: float, dtype: Any):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((width,), dtype))

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        return rms_norm(x, self.weight[...], self.eps)


def rms_norm(x: Float[Array, "*B D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*B D"]:
    """Normalises the last axis; see `RMSNorm`."""
    wide = x.astype(jnp.float32)
    unit = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (unit * weight.astype(jnp.float32)).astype(x.dtype)
