"""A gated short convolution as a module: executes `families.short_convolution.ShortConvolution`.

T packed tokens · D model width
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from lorafusion_jax.families.short_convolution import IN, ShortConvolution
from lorafusion_jax.models.build import Builder
from lorafusion_jax.models.cache import Cache
from lorafusion_jax.models.delta_net import Convolution
from lorafusion_jax.models.inputs import LayerInputs
from lorafusion_jax.modules import LoRALinear


class GatedConvolution(nnx.Module):
    """out_proj(C · convolution(B · x)); see `families.short_convolution.ShortConvolution`."""

    in_proj: LoRALinear
    out_proj: LoRALinear

    def __init__(self, build: Builder, spec: ShortConvolution):
        self.spec = spec
        self.sites = build.layer.site_index("in_proj"), build.layer.site_index("out_proj")
        for linear in spec.linears:
            setattr(self, linear.name, build.linear(linear.name))
        self.conv = Convolution((spec.width, 1, spec.kernel), bias=spec.bias, dtype=build.dtype, rngs=build.rngs)

    def __call__(self, x_TD: Float[Array, "T D"], inputs: LayerInputs) -> Float[Array, "T D"]:
        mixed = checkpoint_name(self.in_proj(x_TD, inputs.lora, site=self.sites[0]), IN)

        def gated(mixed: jax.Array) -> jax.Array:
            b_TD, c_TD, x_TD = jnp.split(mixed, 3, axis=-1)
            return (c_TD * self.conv(b_TD * x_TD, inputs.segments)).astype(mixed.dtype)

        return self.out_proj(jax.checkpoint(gated)(mixed), inputs.lora, site=self.sites[1])

    def with_cache(self, x_TD: jax.Array, inputs: LayerInputs, cache: Cache) -> tuple[jax.Array, Cache]:
        """Like a call, and returns the cache with the last rows of these rows' sequences."""
        b_TD, c_TD, x_TD = jnp.split(self.in_proj(x_TD, inputs.lora, site=self.sites[0]), 3, axis=-1)
        y_TD, last_rows = self.conv.with_cache(b_TD * x_TD, cache["last_rows"], inputs)
        gated_TD = (c_TD * y_TD).astype(x_TD.dtype)
        return self.out_proj(gated_TD, inputs.lora, site=self.sites[1]), {"last_rows": last_rows}
