"""config.json by architecture, with the values that its published models share."""

from __future__ import annotations

from typing import Any

COMMON = {
    "transformers_version": "4.50.0",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "initializer_range": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
LLAMA3_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
SHORT, LONG = [1.0 + 0.01 * i for i in range(48)], [1.0 + 1.25 * i for i in range(48)]


def qwen3_5(hidden: int, inner: int, layers: int, heads: int, kv: int, **changes: Any) -> dict[str, Any]:
    """The text part; the whole model has it under `text_config`."""
    sizes = sizes_of(hidden, inner, layers, heads, kv, 248320, 262144)
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    changes = {
        "head_dim": 256, "rms_norm_eps": 1e-6, "hidden_act": "silu", "full_attention_interval": 4,
        "attn_output_gate": True, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1, "mlp_only_layers": [],
        "rope_parameters": rope | {"mrope_section": [11, 11, 10], "mrope_interleaved": True},
    } | changes  # fmt: skip
    return COMMON | sizes | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"} | changes


def deepseek(hidden: int, inner: int, layers: int, heads: int, **changes: Any) -> dict[str, Any]:
    rope = {
        "type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    changes = {
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "first_k_dense_replace": 3, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
        "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "rope_theta": 10000.0, "rope_scaling": rope, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "num_nextn_predict_layers": 1, "ep_size": 1, "moe_layer_freq": 1,
        "attention_bias": False,
    } | changes  # fmt: skip
    named = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    return COMMON | sizes_of(hidden, inner, layers, heads, heads, 129280, 163840) | named | changes


def sizes_of(hidden: int, inner: int, layers: int, heads: int, kv: int, vocab: int, positions: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
    }


def config_of(architecture: str, model_type: str, *sizes: int, **more: Any) -> dict[str, Any]:
    base = {"architectures": [architecture], "model_type": model_type, "hidden_act": "silu", "rms_norm_eps": 1e-5}
    return COMMON | base | sizes_of(*sizes) | more


def llama(*sizes: int, **more: Any) -> dict[str, Any]:
    plain = {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "rope_theta": 5e5, "rope_scaling": None}
    return config_of("LlamaForCausalLM", "llama", *sizes, **(plain | {"tie_word_embeddings": False} | more))


def qwen(version: int, *sizes: int, **more: Any) -> dict[str, Any]:
    plain = {
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "sliding_window": 131072,
        "max_window_layers": 28,
        "tie_word_embeddings": False,
    }
    return config_of(f"Qwen{version}ForCausalLM", f"qwen{version}", *sizes, **(plain | more))


def gemma(version: str, architecture: str, *sizes: int, **more: Any) -> dict[str, Any]:
    plain = {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "head_dim": 256,
        "rope_theta": 10000.0,
    }
    return config_of(architecture, version, *sizes, **(plain | more))


def gemma2(*sizes: int, **more: Any) -> dict[str, Any]:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256}
    return gemma(
        "gemma2",
        "Gemma2ForCausalLM",
        *sizes,
        **(caps | {"sliding_window": 4096, "cache_implementation": "hybrid"} | more),
    )


def gemma4(*sizes: int, **more: Any) -> dict[str, Any]:
    """The text part; the whole model has it under `text_config`."""
    ropes = {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    types = ["sliding_attention" if (number + 1) % 6 else "full_attention" for number in range(sizes[2])]
    plain = {
        "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "attention_bias": False, "head_dim": 256,
        "global_head_dim": 512, "attention_k_eq_v": True, "sliding_window": 1024, "layer_types": types,
        "final_logit_softcapping": 30.0, "tie_word_embeddings": True, "rope_parameters": ropes,
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "enable_moe_block": False,
        "use_double_wide_mlp": False, "use_bidirectional_attention": "vision", "vocab_size_per_layer_input": 262144,
    }  # fmt: skip
    named = {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text"}
    return COMMON | sizes_of(*sizes, 262144, 262144) | named | plain | more


def gemma4_small(*sizes: int, every: int, **more: Any) -> dict[str, Any]:
    """Models whose layers have inputs of their own; each n-th layer is a full one."""
    types = ["sliding_attention" if (number + 1) % every else "full_attention" for number in range(sizes[2])]
    plain = {
        "layer_types": types, "attention_k_eq_v": False, "sliding_window": 512, "hidden_size_per_layer_input": 256,
        "use_bidirectional_attention": None, "num_global_key_value_heads": None, "max_position_embeddings": 131072,
    }  # fmt: skip
    return gemma4(*sizes, **(plain | more))


def phi(*sizes: int, **more: Any) -> dict[str, Any]:
    plain = {
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "original_max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "auto_map": {"AutoConfig": "x.y"},
        "attention_bias": False,
        "rope_scaling": None,
    }
    return config_of("Phi3ForCausalLM", "phi3", *sizes, **(plain | more))


def granite(*sizes: int, **more: Any) -> dict[str, Any]:
    plain = {
        "attention_bias": False,
        "mlp_bias": False,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.015625,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
        "rope_theta": 1e7,
        "rope_scaling": None,
        "tie_word_embeddings": True,
    }
    return config_of("GraniteForCausalLM", "granite", *sizes, **(plain | more))


def qwen3_moe(*sizes: int, **more: Any) -> dict[str, Any]:
    plain = {
        "head_dim": 128,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "rope_scaling": None,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 48,
        "tie_word_embeddings": False,
    }
    return config_of("Qwen3MoeForCausalLM", "qwen3_moe", *sizes, **(plain | more))


def glm4_moe(*sizes: int, **more: Any) -> dict[str, Any]:
    plain = {
        "head_dim": 128,
        "attention_bias": True,
        "attention_dropout": 0.0,
        "partial_rotary_factor": 0.5,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
    }
    return config_of("Glm4MoeForCausalLM", "glm4_moe", *sizes, **(plain | more))


GLM_4_5 = {
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}


def mixtral(*sizes: int, **more: Any) -> dict[str, Any]:
    plain = {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.02,
        "rope_theta": 1e6,
        "sliding_window": None,
        "tie_word_embeddings": False,
    }
    return config_of("MixtralForCausalLM", "mixtral", *sizes, **(plain | more))


def gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    more = {
        "attention_bias": True,
        "experts_per_token": 4,
        "head_dim": 64,
        "initial_context_length": 4096,
        "layer_types": [f"{('sliding', 'full')[number % 2]}_attention" for number in range(layers)],
        "num_experts_per_tok": 4,
        "num_local_experts": experts,
        "output_router_logits": False,
        "quantization_config": {
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
            "quant_method": "mxfp4",
        },
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
    }
    return config_of("GptOssForCausalLM", "gpt_oss", 2880, 2880, layers, 64, 8, 201088, 131072, **more)
