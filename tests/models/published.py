"""config.json of published models, written from their documented values, and what becomes of them.

A value is (what it extends, changes, key that is refused or None).
"""

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
_SHORT, _LONG = [1.0 + 0.01 * i for i in range(48)], [1.0 + 1.25 * i for i in range(48)]


def _qwen3_5(hidden: int, inner: int, layers: int, heads: int, kv: int, **changes: Any) -> dict[str, Any]:
    """The text part; the whole model has it under `text_config`."""
    sizes = _sizes(hidden, inner, layers, heads, kv, 248320, 262144)
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    changes = {
        "head_dim": 256, "rms_norm_eps": 1e-6, "hidden_act": "silu", "full_attention_interval": 4,
        "attn_output_gate": True, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1, "mlp_only_layers": [],
        "rope_parameters": rope | {"mrope_section": [11, 11, 10], "mrope_interleaved": True},
    } | changes  # fmt: skip
    return COMMON | sizes | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"} | changes


def _deepseek(hidden: int, inner: int, layers: int, heads: int, **changes: Any) -> dict[str, Any]:
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
    return COMMON | _sizes(hidden, inner, layers, heads, heads, 129280, 163840) | named | changes


def _sizes(hidden: int, inner: int, layers: int, heads: int, kv: int, vocab: int, positions: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
    }


def _of(architecture: str, model_type: str, *sizes: int, **more: Any) -> dict[str, Any]:
    base = {"architectures": [architecture], "model_type": model_type, "hidden_act": "silu", "rms_norm_eps": 1e-5}
    return COMMON | base | _sizes(*sizes) | more


def _llama(*sizes: int, **more: Any) -> dict[str, Any]:
    plain = {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "rope_theta": 5e5, "rope_scaling": None}
    return _of("LlamaForCausalLM", "llama", *sizes, **(plain | {"tie_word_embeddings": False} | more))


def _qwen(version: int, *sizes: int, **more: Any) -> dict[str, Any]:
    plain = {
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "sliding_window": 131072,
        "max_window_layers": 28,
        "tie_word_embeddings": False,
    }
    return _of(f"Qwen{version}ForCausalLM", f"qwen{version}", *sizes, **(plain | more))


def _gemma(version: str, architecture: str, *sizes: int, **more: Any) -> dict[str, Any]:
    plain = {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "head_dim": 256,
        "rope_theta": 10000.0,
    }
    return _of(architecture, version, *sizes, **(plain | more))


def _gemma2(*sizes: int, **more: Any) -> dict[str, Any]:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256}
    return _gemma(
        "gemma2",
        "Gemma2ForCausalLM",
        *sizes,
        **(caps | {"sliding_window": 4096, "cache_implementation": "hybrid"} | more),
    )


def _gemma4(*sizes: int, **more: Any) -> dict[str, Any]:
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
    return COMMON | _sizes(*sizes, 262144, 262144) | named | plain | more


def _phi(*sizes: int, **more: Any) -> dict[str, Any]:
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
    return _of("Phi3ForCausalLM", "phi3", *sizes, **(plain | more))


def _granite(*sizes: int, **more: Any) -> dict[str, Any]:
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
    return _of("GraniteForCausalLM", "granite", *sizes, **(plain | more))


def _qwen3_moe(*sizes: int, **more: Any) -> dict[str, Any]:
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
    return _of("Qwen3MoeForCausalLM", "qwen3_moe", *sizes, **(plain | more))


def _glm4_moe(*sizes: int, **more: Any) -> dict[str, Any]:
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
    return _of("Glm4MoeForCausalLM", "glm4_moe", *sizes, **(plain | more))


_GLM_4_5 = {
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}


def _mixtral(*sizes: int, **more: Any) -> dict[str, Any]:
    plain = {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.02,
        "rope_theta": 1e6,
        "sliding_window": None,
        "tie_word_embeddings": False,
    }
    return _of("MixtralForCausalLM", "mixtral", *sizes, **(plain | more))


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
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
    return _of("GptOssForCausalLM", "gpt_oss", 2880, 2880, layers, 64, 8, 201088, 131072, **more)


SERVED: dict[str, dict[str, Any]] = {
    "Llama-2-7b": _llama(4096, 11008, 32, 32, 32, 32000, 4096, rope_theta=10000.0),
    "Meta-Llama-3-8B": _llama(4096, 14336, 32, 32, 8, 128256, 8192),
    "Llama-3.1-8B": _llama(4096, 14336, 32, 32, 8, 128256, 131072, rope_scaling=LLAMA3_ROPE),
    "Llama-3.1-70B": _llama(8192, 28672, 80, 64, 8, 128256, 131072, rope_scaling=LLAMA3_ROPE),
    "Llama-3.2-1B": _llama(
        2048,
        8192,
        16,
        32,
        8,
        128256,
        131072,
        rope_scaling=LLAMA3_ROPE | {"factor": 32.0},
        head_dim=64,
        tie_word_embeddings=True,
    ),
    "TinyLlama-1.1B": _llama(2048, 5632, 22, 32, 4, 32000, 2048, rope_theta=10000.0),
    "SmolLM2-135M": _llama(
        576, 1536, 30, 9, 3, 49152, 8192, rope_theta=100000, is_llama_config=None, tie_word_embeddings=True
    ),
    "Yi-1.5-9B": _llama(4096, 11008, 48, 32, 4, 64000, 4096, rope_theta=5e6, pad_token_id=0),
    "DeepSeek-R1-Distill-Llama-8B": _llama(4096, 14336, 32, 32, 8, 128256, 131072, rope_scaling=LLAMA3_ROPE),
    "Mistral-7B-v0.1": _of("MistralForCausalLM", "mistral", 4096, 14336, 32, 32, 8, 32000, 32768, sliding_window=4096),
    "Mistral-7B-v0.3": _of(
        "MistralForCausalLM",
        "mistral",
        4096,
        14336,
        32,
        32,
        8,
        32768,
        32768,
        sliding_window=None,
        rope_theta=1e6,
        tie_word_embeddings=False,
    ),
    "Mistral-Nemo-12B": _of(
        "MistralForCausalLM",
        "mistral",
        5120,
        14336,
        40,
        32,
        8,
        131072,
        131072,
        sliding_window=None,
        head_dim=128,
        rope_theta=1e6,
    ),
    "Mistral-Small-24B": _of(
        "MistralForCausalLM",
        "mistral",
        5120,
        32768,
        40,
        32,
        8,
        131072,
        32768,
        sliding_window=None,
        head_dim=128,
        rope_theta=1e8,
    ),
    "Qwen2-7B": _qwen(2, 3584, 18944, 28, 28, 4, 152064, 131072),
    "Qwen2.5-0.5B": _qwen(2, 896, 4864, 24, 14, 2, 151936, 32768, tie_word_embeddings=True),
    "Qwen2.5-7B-yarn": _qwen(
        2,
        3584,
        18944,
        28,
        28,
        4,
        152064,
        32768,
        rope_scaling={"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    ),
    "Qwen2.5-32B": _qwen(2, 5120, 27648, 64, 40, 8, 152064, 131072),
    "DeepSeek-R1-Distill-Qwen-7B": _qwen(2, 3584, 18944, 28, 28, 4, 152064, 131072, rope_theta=10000),
    "Qwen3-0.6B": _qwen(
        3,
        1024,
        3072,
        28,
        16,
        8,
        151936,
        40960,
        head_dim=128,
        attention_bias=False,
        sliding_window=None,
        tie_word_embeddings=True,
        rope_scaling=None,
    ),
    "Qwen3-8B": _qwen(
        3, 4096, 12288, 36, 32, 8, 151936, 40960, head_dim=128, attention_bias=False, sliding_window=None
    ),
    "Qwen3-32B": _qwen(
        3, 5120, 25600, 64, 64, 8, 151936, 40960, head_dim=128, attention_bias=False, sliding_window=None
    ),
    "gemma-2b": _gemma("gemma", "GemmaForCausalLM", 2048, 16384, 18, 8, 1, 256000, 8192, hidden_activation=None),
    "gemma-2-2b": _gemma2(2304, 9216, 26, 8, 4, 256000, 8192),
    "gemma-2-9b": _gemma2(3584, 14336, 42, 16, 8, 256000, 8192),
    "gemma-2-27b": _gemma2(4608, 36864, 46, 32, 16, 256000, 8192, head_dim=128, query_pre_attn_scalar=144),
    "gemma-3-1b": _gemma(
        "gemma3_text",
        "Gemma3ForCausalLM",
        1152,
        6912,
        26,
        4,
        1,
        262144,
        32768,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        query_pre_attn_scalar=256,
        rope_theta=1e6,
        rope_local_base_freq=10000,
        rope_scaling=None,
        sliding_window=512,
        sliding_window_pattern=6,
        cache_implementation="hybrid",
    ),
    "Phi-3-mini-4k": _phi(3072, 8192, 32, 32, 32, 32064, 4096, sliding_window=2047),
    "Phi-3-mini-128k": _phi(
        3072,
        8192,
        32,
        32,
        32,
        32064,
        131072,
        sliding_window=262144,
        rope_scaling={"long_factor": _LONG, "short_factor": _SHORT, "type": "longrope"},
    ),
    "phi-4": _phi(5120, 17920, 40, 40, 10, 100352, 16384, original_max_position_embeddings=16384, rope_theta=250000),
    "Phi-4-mini": _phi(
        3072,
        8192,
        32,
        24,
        8,
        200064,
        131072,
        partial_rotary_factor=0.75,
        tie_word_embeddings=True,
        sliding_window=262144,
        rope_scaling={"long_factor": _LONG, "short_factor": _SHORT, "type": "longrope"},
    ),
    "OLMo-2-7B": _of(
        "Olmo2ForCausalLM",
        "olmo2",
        4096,
        11008,
        32,
        32,
        32,
        100352,
        4096,
        rope_theta=500000,
        rope_scaling=None,
        rms_norm_eps=1e-6,
        attention_bias=False,
        tie_word_embeddings=False,
    ),
    "Olmo-3-7B": _of(
        "Olmo3ForCausalLM",
        "olmo3",
        4096,
        11008,
        32,
        32,
        32,
        100278,
        65536,
        rope_theta=500000,
        rms_norm_eps=1e-6,
        attention_bias=False,
        sliding_window=4096,
        tie_word_embeddings=False,
        rope_scaling={
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
    ),
    "SmolLM3-3B": _of(
        "SmolLM3ForCausalLM",
        "smollm3",
        2048,
        11008,
        36,
        16,
        4,
        128256,
        65536,
        rope_theta=5e6,
        rope_scaling=None,
        no_rope_layers=[int((i + 1) % 4 != 0) for i in range(36)],
        no_rope_layer_interval=4,
        max_window_layers=28,
        layer_types=["full_attention"] * 36,
        sliding_window=None,
        use_sliding_window=False,
        pretraining_tp=2,
        attention_bias=False,
        mlp_bias=False,
    ),
    "granite-3.1-8b": _granite(
        4096, 12800, 40, 32, 8, 49155, 131072, logits_scaling=16.0, attention_multiplier=0.0078125
    ),
    "granite-3.1-2b": _granite(2048, 8192, 40, 32, 8, 49155, 131072),
    "Seed-OSS-36B without its dropout": _of(
        "SeedOssForCausalLM",
        "seed_oss",
        5120,
        27648,
        64,
        80,
        8,
        155136,
        524288,
        head_dim=128,
        attention_bias=True,
        attention_out_bias=False,
        mlp_bias=False,
        residual_dropout=0.0,
        rope_theta=1e7,
        pretraining_tp=1,
        rope_scaling={"rope_type": "default"},
        rms_norm_eps=1e-6,
    ),
    "Mixtral-8x7B": _mixtral(4096, 14336, 32, 32, 8, 32000, 32768),
    "Mixtral-8x22B": _mixtral(6144, 16384, 56, 48, 8, 32768, 65536),
    "Qwen3-30B-A3B": _qwen3_moe(2048, 6144, 48, 32, 4, 151936, 40960, moe_intermediate_size=768),
    "Qwen3-30B-A3B-Instruct-2507": _qwen3_moe(
        2048, 6144, 48, 32, 4, 151936, 262144, moe_intermediate_size=768, rope_theta=1e7
    ),
    "Qwen3-Coder-30B-A3B": _qwen3_moe(2048, 5472, 48, 32, 4, 151936, 262144, moe_intermediate_size=768, rope_theta=1e7),
    "Qwen3-235B-A22B": _qwen3_moe(4096, 12288, 94, 64, 4, 151936, 40960, moe_intermediate_size=1536),
    "Qwen3-30B-A3B with an MLP in some layers": _qwen3_moe(
        2048, 6144, 48, 32, 4, 151936, 40960, moe_intermediate_size=768, mlp_only_layers=[0, 1]
    ),
    "Qwen1.5-MoE-A2.7B": _of(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        2048,
        5632,
        24,
        16,
        16,
        151936,
        8192,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        num_experts=60,
        num_experts_per_tok=4,
        norm_topk_prob=False,
        decoder_sparse_step=1,
        output_router_logits=False,
        router_aux_loss_coef=0.001,
        use_sliding_window=False,
        sliding_window=32768,
        max_window_layers=21,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=False,
    ),
    "GLM-4.5-Air": _glm4_moe(
        4096,
        10944,
        46,
        96,
        8,
        151552,
        131072,
        moe_intermediate_size=1408,
        n_routed_experts=128,
        first_k_dense_replace=1,
        routed_scaling_factor=1.0,
        use_qk_norm=False,
    ),
    "GLM-4.5": _glm4_moe(5120, 12288, 92, 96, 8, 151552, 131072, **_GLM_4_5),
    "GLM-4.6": _glm4_moe(5120, 12288, 92, 96, 8, 151552, 202752, **_GLM_4_5),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
}
SERVED |= {
    "DeepSeek-V3 in bfloat16": _deepseek(7168, 18432, 61, 128),
    "Kimi-K2 in bfloat16": _deepseek(
        7168,
        18432,
        61,
        64,
        vocab_size=163840,
        model_type="kimi_k2",
        n_routed_experts=384,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.827,
        first_k_dense_replace=1,
    ),
    "Qwen3-Next-80B-A3B": COMMON
    | _sizes(2048, 5120, 48, 16, 2, 151936, 262144)
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "full_attention_interval": 4,
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e7,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.001,
    },
    "gemma-4-31B": _gemma4(5376, 21504, 60, 32, 16, num_global_key_value_heads=4),
    "gemma-4-26B-A4B": _gemma4(
        2816,
        2112,
        30,
        16,
        8,
        num_global_key_value_heads=2,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
    "GLM-4.7-Flash": _deepseek(
        2048,
        10240,
        47,
        20,
        architectures=["Glm4MoeLiteForCausalLM"],
        model_type="glm4_moe_lite",
        vocab_size=154880,
        max_position_embeddings=202752,
        q_lora_rank=768,
        qk_nope_head_dim=192,
        v_head_dim=256,
        n_routed_experts=64,
        num_experts_per_tok=4,
        moe_intermediate_size=1536,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.8,
        first_k_dense_replace=1,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        rope_scaling=None,
        partial_rotary_factor=1.0,
    ),
    "Qwen3.5-35B-A3B": _qwen3_5(
        2048,
        512,
        40,
        16,
        2,
        architectures=["Qwen3_5MoeForCausalLM"],
        model_type="qwen3_5_moe_text",
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        router_aux_loss_coef=0.001,
    ),
    "Qwen3.5-9B": _qwen3_5(4096, 12288, 32, 16, 4),
    "Qwen3.5-27B": _qwen3_5(5120, 17408, 64, 24, 4, linear_num_value_heads=48),
}
# Models of mechanisms that are not served: architecture, model_type, sizes.
OTHERS: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "Llama-4-Scout": ("Llama4ForCausalLM", "llama4_text", (5120, 8192, 48, 40, 8, 202048, 10485760)),
    "Phi-3.5-MoE": ("PhimoeForCausalLM", "phimoe", (4096, 6400, 32, 32, 8, 32064, 131072)),
    "OLMoE-1B-7B": ("OlmoeForCausalLM", "olmoe", (2048, 1024, 16, 16, 16, 50304, 4096)),
    "LFM2-1.2B": ("Lfm2ForCausalLM", "lfm2", (2048, 8192, 16, 32, 8, 65536, 128000)),
    "Nemotron-3-Nano-30B-A3B": ("NemotronHForCausalLM", "nemotron_h", (2688, 1856, 52, 32, 2, 131072, 262144)),
    "granite-4.0-h-small": ("GraniteMoeHybridForCausalLM", "granitemoehybrid", (4096, 768, 40, 32, 8, 100352, 131072)),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Qwen3.5-27B without gates": (SERVED["Qwen3.5-27B"] | {"attn_output_gate": False}, "attn_output_gate=False"),
    "DeepSeek-V3 as published": (
        SERVED["DeepSeek-V3 in bfloat16"]
        | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        "quantization_config",
    ),
    "Falcon3-Mamba": (
        _of("FalconMambaForCausalLM", "falcon_mamba", 4096, 8192, 64, 32, 32, 65024, 4096),
        "FalconMamba",
    ),
    "Qwen3-30B-A3B with its auxiliary loss": (
        SERVED["Qwen3-30B-A3B"] | {"output_router_logits": True},
        "output_router_logits=True",
    ),
    "Qwen3-30B-A3B-FP8": (
        SERVED["Qwen3-30B-A3B"] | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        "quantization_config",
    ),
    "Mixtral-8x7B with noise in its router": (
        SERVED["Mixtral-8x7B"] | {"router_jitter_noise": 0.01},
        "router_jitter_noise=0.01",
    ),
    "gpt-oss-20b with another gate": (SERVED["gpt-oss-20b"] | {"swiglu_alpha": 1.5}, "swiglu_alpha=1.5"),
    "Phi-2": (_of("PhiForCausalLM", "phi", 2560, 10240, 32, 32, 32, 51200, 2048), "PhiForCausalLM"),
    "Llama-3.1-8B-dynamic": (
        _llama(4096, 14336, 32, 32, 8, 128256, 8192, rope_scaling={"type": "dynamic", "factor": 2.0}),
        "dynamic",
    ),
    "Seed-OSS-36B": (SERVED["Seed-OSS-36B without its dropout"] | {"attention_dropout": 0.1}, "attention_dropout=0.1"),
    "embeddinggemma": (
        SERVED["gemma-3-1b"] | {"use_bidirectional_attention": True},
        "use_bidirectional_attention=True",
    ),
    "gemma-4-E2B": (
        SERVED["gemma-4-31B"]
        | {"hidden_size_per_layer_input": 256, "num_kv_shared_layers": 20, "use_double_wide_mlp": True},
        "num_kv_shared_layers=20, hidden_size_per_layer_input=256",
    ),
    "gemma-4-26B-A4B with the loss of its routers": (
        SERVED["gemma-4-26B-A4B"] | {"output_router_logits": True},
        "output_router_logits=True",
    ),
    "gemma-4-31B that looks ahead": (
        SERVED["gemma-4-31B"] | {"use_bidirectional_attention": "all"},
        "use_bidirectional_attention='all'",
    ),
    "gemma-3-1b with a cap that transformers leaves out": (
        SERVED["gemma-3-1b"] | {"attn_logit_softcapping": 50.0},
        "attn_logit_softcapping=50.0",
    ),
    "Llama-2-7b-gptq": (
        SERVED["Llama-2-7b"] | {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        "quantised weights (gptq)",
    ),
}
REFUSED |= {
    name: (_of(architecture, kind, *sizes), architecture) for name, (architecture, kind, sizes) in OTHERS.items()
}
