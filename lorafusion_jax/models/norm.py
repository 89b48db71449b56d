"""Root-mean-square and layer normalisation as modules. Dims: `D` normalised width."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pallas_kernels.norm import add_rms_norm, rms_norm, rms_norm_with_residual


class RMSNorm(nnx.Module):
    """y = (weight + offset) · x / √(mean(x²) + eps), in float32, cast back to the dtype of x."""

    def __init__(self, width: int, *, eps: float, dtype: Any, offset: float = 0.0):
        self.eps, self.offset = eps, offset
        self.weight = nnx.Param(jnp.full((width,), 1 - offset, dtype))  # a new norm scales nothing

    def _scale(self) -> jax.Array:
        return shifted(self.weight[...], self.offset)

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        return rms_norm(x, self._scale(), eps=self.eps)

    def rms_norm_with_residual(self, x: Float[Array, "*B D"]) -> tuple[Float[Array, "*B D"], Float[Array, "*B D"]]:
        """Returns (x, norm of x). Backward adds the two gradients of x in the kernel of the norm."""
        return rms_norm_with_residual(x, self._scale(), eps=self.eps)

    def add_rms_norm(
        self, x: Float[Array, "*B D"], delta: Float[Array, "*B D"]
    ) -> tuple[Float[Array, "*B D"], Float[Array, "*B D"]]:
        """Returns (x + delta, norm of x + delta), in one pass."""
        return add_rms_norm(x, delta, self._scale(), eps=self.eps)


def shifted(weight: Float[Array, " D"], offset: float) -> Float[Array, " D"]:
    """weight + offset, in float32 so that small weights are not rounded away."""
    return weight if offset == 0 else weight.astype(jnp.float32) + offset


class LayerNorm(nnx.Module):
    """y = weight · (x - mean(x)) / √(var(x) + eps) + bias, in float32, cast back to the dtype of x.

    Args:
        bias: whether there is one; the leaf is then [2, D].
    """

    def __init__(self, width: int, *, eps: float, dtype: Any, bias: bool):
        self.eps = eps
        ones = jnp.ones((width,), dtype)
        self.weight = nnx.Param(jnp.stack([ones, jnp.zeros_like(ones)]) if bias else ones)

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        return layer_norm(x, self.weight[...], self.eps)

    def rms_norm_with_residual(self, x: Float[Array, "*B D"]) -> tuple[Float[Array, "*B D"], Float[Array, "*B D"]]:
        """Returns (x, norm of x)."""
        return x, self(x)

    def add_rms_norm(
        self, x: Float[Array, "*B D"], delta: Float[Array, "*B D"]
    ) -> tuple[Float[Array, "*B D"], Float[Array, "*B D"]]:
        """Returns (x + delta, norm of x + delta)."""
        return x + delta, self(x + delta)


@functools.partial(jax.checkpoint, static_argnums=(2,), prevent_cse=False)
def layer_norm(x: Float[Array, "*B D"], weight: jax.Array, eps: float) -> Float[Array, "*B D"]:
    """The norm of `LayerNorm`, with a weight [D] or a weight and a bias [2, D]. Backward keeps x only."""
    wide, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    y = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + eps)
    y = y * weight if weight.ndim == 1 else y * weight[0] + weight[1]
    return y.astype(x.dtype)
