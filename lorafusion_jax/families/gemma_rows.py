"""Rows of Gemma's families."""

from __future__ import annotations

from typing import Any

from lorafusion_jax.families.experts import Router
from lorafusion_jax.families.family import Family
from lorafusion_jax.layout.layer import GLOBAL_ATTENTION, PARALLEL, PER_LAYER, PER_LAYER_NAMES, WIDE_MLP

_GEMMA = {
    "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "attention_bias": False,
    "max_position_embeddings": 8192,
}  # fmt: skip
_GEMMA_2 = _GEMMA | {
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": None, "final_logit_softcapping": None,
}  # fmt: skip
_SANDWICH = {"norms": "sandwich", "norm_offset": 1.0, "embedding_scale": "sqrt"}
_GEMMA_ACTIVATION = {
    "keys": {"hidden_activation": "hidden_act"},
    "known": ("hidden_act", "_sliding_window_pattern"),
}
# Gemma 4: heads of full layers have other widths, and their keys may be their values.
_GEMMA_4: dict[str, Any] = {
    "windows": 6, "scaled_layers": "full_attention", "keys": {"hidden_activation": "hidden_act"},
    "fields": {
        "norms": "sandwich", "embedding_scale": "sqrt", "qk_norm": True, "v_norm": True, "layer_scalar": True,
        "attention_scale": 1.0,
    },
    "modules": {
        f"{GLOBAL_ATTENTION}.{name}": f"self_attn.{name}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    },
}  # fmt: skip
_PER_LAYER = {  # layers with inputs of their own, and layers without keys, which may have a wider MLP
    **{f"{WIDE_MLP}.{name}": f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
    **{f"{PER_LAYER}.{name}": name for name in PER_LAYER_NAMES},
    f"{PER_LAYER}.norm": "post_per_layer_input_norm",
}  # fmt: skip
_GEMMA_4_KEYS = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072, "tie_word_embeddings": True, "attention_bias": False, "sliding_window": 512,
    "layer_types": None, "final_logit_softcapping": None, "attention_k_eq_v": False, "global_head_dim": 512,
    "num_global_key_value_heads": None, "per_layer_config": None, "use_bidirectional_attention": None,
    "num_kv_shared_layers": 0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
}  # fmt: skip
_PARALLEL = {  # experts beside the MLP
    "keys": _GEMMA_4["keys"] | {"num_experts": "num_experts", "top_k_experts": "num_experts_per_tok"},
    "modules": _GEMMA_4["modules"] | {
        f"{PARALLEL}.router": "router", f"{PARALLEL}.router.weight": "router.proj.weight",
        f"{PARALLEL}.mlp_norm": "post_feedforward_layernorm_1", f"{PARALLEL}.input_norm": "pre_feedforward_layernorm_2",
        f"{PARALLEL}.output_norm": "post_feedforward_layernorm_2",
    } | _PER_LAYER,
}  # fmt: skip
_GEMMA_4_KNOWN = ("hidden_act",)

GEMMA: dict[str, Family] = {
    "gemma": Family(
        models="Gemma",
        beyond="norms with an offset, GeGLU, scaled embeddings",
        architectures=("GemmaForCausalLM",), reads=_GEMMA | {"num_key_value_heads": 16}, known=("hidden_activation",),
        meant={"hidden_act": {"gelu": "gelu_pytorch_tanh"}},  # as transformers reads the first published files
        fields={"norm_offset": 1.0, "embedding_scale": "sqrt"},
    ),
    "gemma2": Family(
        models="Gemma 2",
        beyond="norms before and after, soft caps of scores and logits, every second layer with a window",
        architectures=("Gemma2ForCausalLM",), windows=2, fields=_SANDWICH, **_GEMMA_ACTIVATION,
        reads=_GEMMA_2 | {"num_key_value_heads": 4, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    ),
    "gemma3_text": Family(
        models="Gemma 3, text models",
        beyond="norms before and after, norms of q and k, windows 5 : 1 with a rope of their own",
        architectures=("Gemma3ForCausalLM",), windows=6, fields=_SANDWICH | {"qk_norm": True},
        scaled_layers="full_attention",
        reads=_GEMMA_2 | {
            "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4,
            "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": None,
            "max_position_embeddings": 131072,
        },
        **_GEMMA_ACTIVATION,
    ),
    "gemma4_text": Family(
        models="Gemma 4 (31B, E2B, E4B, 26B-A4B)",
        beyond=(
            "norms before and after, a norm of v; in full layers wider heads, keys that are the values, and a "
            "rope of a share of the pairs; a factor of each layer. E2B, E4B: values of their own, inputs of each "
            "layer, and the last layers read keys and values of earlier ones. 26B-A4B: experts beside the MLP, "
            "both with norms of their own"
        ),
        architectures=("Gemma4ForCausalLM",), **_GEMMA_4 | _PARALLEL,
        reads=_GEMMA_4_KEYS | {
            "use_double_wide_mlp": False, "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262144, "enable_moe_block": False, "num_experts": None,
            "num_experts_per_tok": None, "moe_intermediate_size": None,
        },
        known=_GEMMA_4_KNOWN,
        experts={"router": Router(scaled=True)}, expert_names=("experts.gate_up_proj", "experts.down_proj"),
        experts_transposed=True,
    ),
    "gemma4_unified_text": Family(
        models="Gemma 4 12B",
        beyond="as Gemma 4 31B",
        architectures=("Gemma4UnifiedForCausalLM",), **_GEMMA_4, known=(*_GEMMA_4_KNOWN, "use_double_wide_mlp"),
        reads=_GEMMA_4_KEYS | {"sliding_window": 1024, "max_position_embeddings": 262144},
    ),
}  # fmt: skip
