"""One transformer layer: attention and gated MLP with LoRA on their seven projections.

Dims: `T` packed tokens · `D` model width · `H` heads · `K` key heads · `C` head width · `F` MLP width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from ..adapters.spec import AdapterSpec, bank_rank
from ..config.model import ModelConfig
from ..layout.layer import LAYER, Half
from ..modules import LoRAContext, LoRALinear, lora_mlp, lora_siblings
from .attention import AttentionImplementation, attention
from .norm import RMSNorm
from .rope import apply_rope
from .segments import Segments


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """Inputs that all layers of a forward pass share."""

    rope: tuple[jax.Array, jax.Array]
    segments: Segments
    lora: LoRAContext | None

    def at_layer(self, number: int | jax.Array) -> LayerInputs:
        """The inputs of one layer, with its own dropout."""
        return self if self.lora is None else replace(self, lora=self.lora.at_layer(number))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Builder:
    """Builds the projections and norms of a layer from `LAYER`."""

    config: ModelConfig
    adapters: Sequence[AdapterSpec]
    dtype: Any
    rngs: nnx.Rngs

    def linear(self, name: str) -> LoRALinear:
        linear = LAYER.linear(name)
        return LoRALinear(
            *linear.shape(self.config),
            num_adapters=len(self.adapters),
            rank=bank_rank(self.adapters, name),
            kinds=[spec.kind for spec in self.adapters],
            use_bias=linear.bias(self.config),
            dtype=self.dtype,
            param_dtype=self.dtype,
            rngs=self.rngs,
        )

    def norm(self, path: str) -> RMSNorm:
        return RMSNorm(LAYER.norm(path).width(self.config), eps=self.config.norm_eps, dtype=self.dtype)

    def norm_if_any(self, path: str) -> RMSNorm | None:
        return self.norm(path) if LAYER.norm(path).present(self.config) else nnx.data(None)


class Attention(nnx.Module):
    """o_proj(attention(rope(q_proj x), rope(k_proj x), v_proj x)); some families normalise q and k per head."""

    def __init__(self, build: _Builder):
        self.head_dim = build.config.head_dim
        self.q_proj, self.k_proj, self.v_proj = (build.linear(name) for name in ("q_proj", "k_proj", "v_proj"))
        self.o_proj = build.linear("o_proj")
        self.q_norm, self.k_norm = (build.norm_if_any(f"self_attn.{name}") for name in ("q_norm", "k_norm"))

    def __call__(
        self, x_TD: jax.Array, inputs: LayerInputs, implementation: AttentionImplementation | None
    ) -> jax.Array:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (
            y.reshape(y.shape[0], -1, self.head_dim)
            for y in lora_siblings(x_TD, projections, inputs.lora, site=LAYER.site_index("q_proj"))
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = checkpoint_name(q, "qk_in"), checkpoint_name(k, "qk_in")  # a norm's gradient needs its input
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, inputs.rope), apply_rope(k, inputs.rope)
        o_TD = attention(q, k, v, inputs.segments, implementation=implementation, flat=True)
        return self.o_proj(o_TD, inputs.lora, site=LAYER.site_index("o_proj"))


class MLP(nnx.Module):
    """down_proj(silu(gate_proj x) · up_proj x)."""

    def __init__(self, build: _Builder):
        self.gate_proj, self.up_proj = build.linear("gate_proj"), build.linear("up_proj")
        self.down_proj = build.linear("down_proj")

    def __call__(self, x_TD: jax.Array, lora: LoRAContext | None) -> jax.Array:
        sites = LAYER.site_index("gate_proj"), LAYER.site_index("down_proj")
        return lora_mlp(x_TD, self.gate_proj, self.up_proj, self.down_proj, lora, sites=sites)


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    The tensors of `LAYER.checkpoints` have names for rematerialisation policies. Backward can recompute everything else
    from them without a matrix product.

    Args:
        half: builds only one half, for a layer that two pipeline stages share: "attention" is the first sum, "mlp" the
            second.
    """

    def __init__(
        self,
        config: ModelConfig,
        adapters: Sequence[AdapterSpec],
        *,
        half: Half | None = None,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        build = _Builder(config=config, adapters=adapters, dtype=dtype, rngs=rngs)
        self.half = half
        if half != "mlp":
            self.input_layernorm = build.norm("input_layernorm")
            self.self_attn = Attention(build)
        if half != "attention":
            self.post_attention_layernorm = build.norm("post_attention_layernorm")
            self.mlp = MLP(build)

    def __call__(
        self, x_TD: Float[Array, "T D"], inputs: LayerInputs, implementation: AttentionImplementation | None = None
    ) -> Float[Array, "T D"]:
        if self.half == "mlp":
            x_TD, h_TD = self.post_attention_layernorm.rms_norm_with_residual(x_TD)
            return x_TD + self.mlp(h_TD, inputs.lora)
        x_TD, h_TD = self.input_layernorm.rms_norm_with_residual(x_TD)
        o_TD = self.self_attn(h_TD, inputs, implementation)
        if self.half == "attention":
            return x_TD + o_TD
        x_TD, h_TD = self.post_attention_layernorm.add_rms_norm(x_TD, checkpoint_name(o_TD, "o_out"))
        return x_TD + self.mlp(h_TD, inputs.lora)
