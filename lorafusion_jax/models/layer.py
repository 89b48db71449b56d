"""One transformer layer: attention and gated MLP with LoRA on their seven projections.

Dims: `T` packed tokens · `D` model width · `H` heads · `K` key heads · `C` head width · `F` MLP width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from ..config.model import ModelConfig
from ..modules import LoRAContext, LoRALinear, lora_mlp, lora_siblings
from ..modules.spec import AdapterSpec, bank_rank
from .attention import AttentionImplementation, attention
from .norm import RMSNorm
from .rope import apply_rope
from .segments import Segments

# Dropout sites: one per input, so that siblings share a mask.
ATTENTION_INPUT, O_INPUT, MLP_INPUT, DOWN_INPUT = range(4)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """What all layers of a forward pass share."""

    rope: tuple[jax.Array, jax.Array]
    segments: Segments
    lora: LoRAContext | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Linears:
    """Makes the projections of a layer: rank by name, one dtype."""

    adapters: Sequence[AdapterSpec]
    dtype: Any
    rngs: nnx.Rngs

    def __call__(self, name: str, in_features: int, out_features: int, *, bias: bool = False) -> LoRALinear:
        return LoRALinear(
            in_features,
            out_features,
            num_adapters=len(self.adapters),
            rank=bank_rank(self.adapters, name),
            kinds=[spec.kind for spec in self.adapters],
            use_bias=bias,
            dtype=self.dtype,
            param_dtype=self.dtype,
            rngs=self.rngs,
        )


class Attention(nnx.Module):
    """o_proj(attention(rope(q_proj x), rope(k_proj x), v_proj x)), with q and k normalised per head where the family
    does."""

    def __init__(self, config: ModelConfig, linear: _Linears):
        D, C = config.hidden_size, config.head_dim
        self.head_dim = C
        self.q_proj = linear("q_proj", D, config.num_heads * C, bias=config.qkv_bias)
        self.k_proj = linear("k_proj", D, config.num_kv_heads * C, bias=config.qkv_bias)
        self.v_proj = linear("v_proj", D, config.num_kv_heads * C, bias=config.qkv_bias)
        self.o_proj = linear("o_proj", config.num_heads * C, D, bias=config.o_bias)
        self.q_norm = self.k_norm = nnx.data(None)
        if config.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(C, eps=config.norm_eps, dtype=linear.dtype) for _ in range(2))

    def __call__(
        self, x_TD: jax.Array, inputs: LayerInputs, implementation: AttentionImplementation | None
    ) -> jax.Array:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (
            y.reshape(y.shape[0], -1, self.head_dim)
            for y in lora_siblings(x_TD, projections, inputs.lora, site=ATTENTION_INPUT)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = checkpoint_name(q, "qk_in"), checkpoint_name(k, "qk_in")  # a norm's slope needs its input
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, inputs.rope), apply_rope(k, inputs.rope)
        o_TD = attention(q, k, v, inputs.segments, implementation=implementation, flat=True)
        return self.o_proj(o_TD, inputs.lora, site=O_INPUT)


class MLP(nnx.Module):
    """down_proj(silu(gate_proj x) · up_proj x)."""

    def __init__(self, config: ModelConfig, linear: _Linears):
        D, F, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = linear("gate_proj", D, F, bias=bias)
        self.up_proj = linear("up_proj", D, F, bias=bias)
        self.down_proj = linear("down_proj", F, D, bias=bias)

    def __call__(self, x_TD: jax.Array, lora: LoRAContext | None) -> jax.Array:
        return lora_mlp(x_TD, self.gate_proj, self.up_proj, self.down_proj, lora, sites=(MLP_INPUT, DOWN_INPUT))


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Tensors from which backward can make everything else without repeating a product carry names for rematerialisation
    policies: "qk_in", "attention", "o_out", "gate", "up", and the LoRA ops' "lora_s" and "lora_bits".

    Args:
        half: only this half, where two pipeline stages share a layer: "attention" is the first sum, "mlp" the second.
    """

    def __init__(
        self,
        config: ModelConfig,
        adapters: Sequence[AdapterSpec],
        *,
        half: Literal["attention", "mlp"] | None = None,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        linear = _Linears(adapters=adapters, dtype=dtype, rngs=rngs)
        self.half = half
        if half != "mlp":
            self.input_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
            self.self_attn = Attention(config, linear)
        if half != "attention":
            self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
            self.mlp = MLP(config, linear)

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
