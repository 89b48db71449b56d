"""Root-mean-square normalisation as a module. Dims: `D` normalised width."""

from __future__ import annotations

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
