"""Inputs that layers have of their own: executes `families.per_layer_input.PerLayerInput`, and makes the inputs.

Dims: `T` packed tokens · `D` model width · `L` layers · `P` width of a layer's input · `V` vocabulary
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.families.per_layer_input import GATE, MIX, MIX_NORM, NORM, PROJECTION, PerLayerInput
from lorafusion_jax.models.build import Builder
from lorafusion_jax.models.norm import RMSNorm, shifted
from lorafusion_jax.modules import LoRAContext, LoRALinear
from pallas_kernels.exact import precision_of
from pallas_kernels.mlp.xla import gate_with
from pallas_kernels.norm import rms_norm


class OwnInput(nnx.Module):
    """x + norm(projection(activation(gate x) · input)); see `families.per_layer_input.PerLayerInput`."""

    per_layer_input_gate: LoRALinear
    per_layer_projection: LoRALinear
    norm: RMSNorm

    def __init__(self, build: Builder, spec: PerLayerInput):
        self.spec = spec
        self.sites = build.layer.site_index(GATE), build.layer.site_index(PROJECTION)
        for linear in spec.linears:
            setattr(self, linear.name, build.linear(linear.name))
        setattr(self, NORM, build.norm(f"{spec.module}.{NORM}"))

    def __call__(
        self, x_TD: Float[Array, "T D"], input_TP: Float[Array, "T P"], lora: LoRAContext | None
    ) -> Float[Array, "T D"]:
        gate_TP = checkpoint_name(self.per_layer_input_gate(x_TD, lora, site=self.sites[0]), "per_layer_gate")
        gated_TP = gate_with(self.spec.activation, gate_TP, input_TP)
        y_TD = self.per_layer_projection(gated_TP, lora, site=self.sites[1])
        return x_TD + self.norm(checkpoint_name(y_TD, "per_layer_out"))


def own_inputs(
    looked_up: Float[Array, "T L*P"], x_TD: Float[Array, "T D"], weights: Mapping[str, jax.Array], config: ModelConfig
) -> Float[Array, "L T P"]:
    """Returns the inputs of all layers.

    (√P · table[token] + norm(x W / √D)) / √2

    Args:
        looked_up: the tokens' rows of the table.
        x_TD: embeddings of the tokens, with their scale.
        weights: projection and norm by their leaf names.
    """
    T, P = len(x_TD), config.input_width
    kernel_LPD = weights[MIX].reshape(-1, P, config.hidden_size)
    projected_LTP = jnp.einsum("td,lpd->ltp", x_TD, kernel_LPD, precision=precision_of(x_TD.dtype))
    norm_P = shifted(weights[MIX_NORM], config.norm_offset)
    projected_LTP = rms_norm(_times(projected_LTP, config.hidden_size**-0.5), norm_P, eps=config.norm_eps)
    looked_up_LTP = _times(looked_up, P**0.5).reshape(T, -1, P).swapaxes(0, 1)
    return _times(projected_LTP + looked_up_LTP, 2**-0.5)


def _times(x: jax.Array, factor: float) -> jax.Array:
    return x * jnp.asarray(factor, x.dtype)
