"""One projection of every expert as a module.

Dims: `M` sorted rows · `K` in · `N` out · `E` experts · `A` adapters · `R` padded rank
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from lorafusion_jax.layout.layer import Linear
from lorafusion_jax.modules import LoRAContext
from pallas_kernels.experts.api import Lora, expert_linear
from pallas_kernels.experts.fp8 import Fp8Experts
from pallas_kernels.experts.rows import ExpertRows
from pallas_kernels.tiles import spread


class ExpertLinear(nnx.Module):
    """One projection of every expert, frozen, and the low-rank pairs of the adapters, float32.

    kernel [E · in, out] · bias [E, out] · lora_a [A, E, in, R] · lora_b [A, E, R, out]
    """

    def __init__(self, linear: Linear, adapters: int, rank: int, *, dtype: Any, rngs: nnx.Rngs):
        self.linear, self.rank = linear, rank
        num_in, num_out = linear.shape
        values = jax.random.normal(rngs.params(), linear.kernel_shape, jnp.float32) * num_in**-0.5
        self.kernel = nnx.Param(values.astype(dtype))
        self.bias = nnx.Param(jnp.zeros((linear.experts, num_out), dtype)) if linear.bias else nnx.data(None)
        if rank:
            self.lora_a = nnx.LoRAParam(jnp.zeros((adapters, linear.experts, num_in, rank), jnp.float32))
            self.lora_b = nnx.LoRAParam(jnp.zeros((adapters, linear.experts, rank, num_out), jnp.float32))

    def __call__(self, x: Float[Array, "M K"], rows: ExpertRows, lora: LoRAContext | None) -> Float[Array, "M N"]:
        """Applies the projection of each row's expert, without the bias."""
        pairs = None
        if lora is not None and self.rank:
            pairs = Lora(self.lora_a[...], self.lora_b[...], lora.scale)
        implementation = None if lora is None or lora.implementation != "xla" else "xla"
        value = self.kernel.get_value()  # an array, or 8-bit floats
        kernel = value if isinstance(value, Fp8Experts) else self.kernel[...]
        return expert_linear(x, kernel, rows, pairs, experts=self.linear.experts, implementation=implementation)

    def bias_of(self, rows: ExpertRows) -> Float[Array, "M N"] | None:
        """The bias of each row's expert."""
        if self.bias is None:
            return None
        return self.bias[...][jnp.maximum(spread(rows.tile_expert, rows.tile), 0)]
