"""The gated MLP of a layer as a module: executes `families.mlp.Mlp`.

Dims: `T` packed tokens · `D` model width · `F` MLP width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from lorafusion_jax.families.mlp import Mlp
from lorafusion_jax.models.build import Builder
from lorafusion_jax.modules import LoRAContext, LoRALinear, lora_mlp, lora_siblings
from pallas_kernels.mlp.xla import gate_with


class MLP(nnx.Module):
    """down_proj(activation(gate_proj x) · up_proj x); see `families.mlp.Mlp`."""

    gate_proj: LoRALinear
    up_proj: LoRALinear
    gate_up_proj: LoRALinear  # instead of the two above, where they are fused
    down_proj: LoRALinear

    def __init__(self, build: Builder, spec: Mlp):
        self.spec = spec
        self.sites = build.layer.site_index(spec.linears[0].name), build.layer.site_index("down_proj")
        for linear in spec.linears:
            setattr(self, linear.name, build.linear(linear.name))

    def __call__(self, x_TD: jax.Array, lora: LoRAContext | None) -> jax.Array:
        if self.spec.as_one_op:
            return lora_mlp(x_TD, self.gate_proj, self.up_proj, self.down_proj, lora, sites=self.sites)
        x_site, down_site = self.sites
        gates = (self.gate_up_proj,) if self.spec.fused else (self.gate_proj, self.up_proj)
        outputs = lora_siblings(x_TD, gates, lora, site=x_site)
        gate_TF, up_TF = jnp.split(outputs[0], 2, axis=-1) if self.spec.fused else outputs
        gated_TF = gate_with(self.spec.activation, checkpoint_name(gate_TF, "gate"), checkpoint_name(up_TF, "up"))
        return self.down_proj(gated_TF, lora, site=down_site)
