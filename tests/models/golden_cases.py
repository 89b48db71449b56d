"""Small random models of every family: what each changes in its config of `transformers`."""

from __future__ import annotations

from golden_parts import LLAMA3, SMALL, YARN, longrope, plain

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

CASES = {
    "llama2": ("Llama", {"num_key_value_heads": 4}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 8}),
    "llama_tied_theta": ("Llama", {"tie_word_embeddings": True, "rope_parameters": plain(500000.0)}),
    "llama_biased_linear": (
        "Llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        },
    ),
    "llama_yarn_gelu": ("Llama", {"rope_parameters": YARN, "hidden_act": "gelu", "head_dim": 12}),
    "mistral": ("Mistral", {"head_dim": 8, "sliding_window": 4096}),
    "mistral_window": ("Mistral", {"head_dim": 6, "sliding_window": 7, "num_key_value_heads": 1}),
    "mistral_yarn": ("Mistral", {"sliding_window": None, "rope_parameters": YARN | {"attention_factor": 1.3}}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4, "q_lora_rank": 6, "kv_lora_rank": 10, "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 6, "v_head_dim": 7, "first_k_dense_replace": 2,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
        },
    ),
    "deepseek_v3_experts": (
        "DeepseekV3",
        {
            "num_hidden_layers": 3, "num_key_value_heads": 4, "q_lora_rank": 5, "kv_lora_rank": 6,
            "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "first_k_dense_replace": 1,
            "moe_intermediate_size": 7, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
            "n_shared_experts": 2, "routed_scaling_factor": 1.7,
            "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek_v3_biased": (
        "DeepseekV3",
        {
            "num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 18, "q_lora_rank": 5, "kv_lora_rank": 4,
            "qk_nope_head_dim": 3, "qk_rope_head_dim": 4, "v_head_dim": 12, "first_k_dense_replace": 7,
            "attention_bias": True, "tie_word_embeddings": True, "rope_interleave": False, "rms_norm_eps": 1e-3,
        },
    ),
    "deepseek_v3_plain_q": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 2, "v_head_dim": 10, "first_k_dense_replace": 2, "rope_parameters": plain(300.0),
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {
            "num_hidden_layers": 3, "num_key_value_heads": 4, "q_lora_rank": 5, "kv_lora_rank": 6,
            "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 9, "moe_intermediate_size": 7,
            "n_routed_experts": 6, "num_experts_per_tok": 2, "rms_norm_eps": 1e-4,
        },
    ),
    "glm4_moe_lite_groups": (
        "Glm4MoeLite",
        {
            "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 2, "v_head_dim": 5, "moe_intermediate_size": 5, "n_routed_experts": 9,
            "num_experts_per_tok": 4, "n_group": 3, "topk_group": 2, "n_shared_experts": 2, "norm_topk_prob": False,
            "mlp_layer_types": ["sparse", "dense"], "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0},
        },
    ),
    "glm4_moe_lite_tied": (
        "Glm4MoeLite",
        {
            "num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 18, "q_lora_rank": 7, "kv_lora_rank": 4,
            "qk_nope_head_dim": 3, "qk_rope_head_dim": 4, "v_head_dim": 12, "attention_bias": True,
            "tie_word_embeddings": True, "rope_interleave": False, "moe_intermediate_size": 9, "n_routed_experts": 4,
            "num_experts_per_tok": 1, "mlp_layer_types": ["sparse", "sparse"], "routed_scaling_factor": 0.4,
        },
    ),
    "ministral": (
        "Ministral",
        {"head_dim": 10, "sliding_window": 9, "num_hidden_layers": 4, "layer_types": [SLIDING, SLIDING, FULL, SLIDING]},
    ),
    "ministral_yarn": ("Ministral", {
        "head_dim": 6, "sliding_window": 5, "tie_word_embeddings": True, "num_key_value_heads": 1,
        "rope_parameters": YARN,
    }),
    "ministral_full": ("Ministral", {
        "head_dim": 4, "layer_types": [FULL] * 2, "hidden_act": "gelu", "num_key_value_heads": 4, "rms_norm_eps": 1e-3,
    }),
    "ministral3_tied": ("Ministral3", {
        "head_dim": 6, "tie_word_embeddings": True, "num_key_value_heads": 1, "hidden_act": "gelu",
        "rope_parameters": YARN | {"llama_4_scaling_beta": 0.2},
    }),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 8,
            "rope_parameters": YARN
            | {"mscale": 0.7, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3, "truncate": False},
        },
    ),
    "ministral3_window": (
        "Ministral3",
        {"head_dim": 4, "sliding_window": 11, "rope_parameters": plain(100.0)
            | {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 10}},
    ),
    "qwen2": ("Qwen2", {"rms_norm_eps": 1e-5}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2_window": (
        "Qwen2",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "qwen3_window_yarn": (
        "Qwen3",
        {
            "head_dim": 10, "attention_bias": True, "tie_word_embeddings": True, "num_hidden_layers": 3,
            "use_sliding_window": True, "sliding_window": 5, "layer_types": [SLIDING, FULL, SLIDING],
            "rope_parameters": YARN,
        },
    ),
    "qwen3_one_head": ("Qwen3", {
        "head_dim": 6, "num_key_value_heads": 1, "num_hidden_layers": 3, "rms_norm_eps": 1e-3,
        "hidden_act": "gelu", "rope_parameters": plain(33.0),
    }),
    "gemma": ("Gemma", {"head_dim": 8, "tie_word_embeddings": True}),
    "gemma_untied": ("Gemma", {
        "head_dim": 6, "tie_word_embeddings": False, "attention_bias": True, "num_key_value_heads": 1,
        "num_hidden_layers": 3,
    }),
    "gemma_gelu": ("Gemma", {  # transformers writes the approximation by tanh
        "head_dim": 10, "tie_word_embeddings": True, "hidden_act": "gelu", "num_key_value_heads": 4,
        "rms_norm_eps": 1e-3, "rope_parameters": plain(60.0),
    }),
    "gemma2": (
        "Gemma2",
        {"head_dim": 10, "query_pre_attn_scalar": 7, "sliding_window": 6, "tie_word_embeddings": True},
    ),
    "gemma2_untied": (
        "Gemma2",
        {
            "head_dim": 6, "sliding_window": 30, "attention_bias": True, "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0, "num_key_value_heads": 4, "num_hidden_layers": 3,
            "layer_types": [FULL, SLIDING, SLIDING], "rms_norm_eps": 1e-4,
        },
    ),
    "gemma2_uncapped": (
        "Gemma2",
        {
            "head_dim": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None, "num_key_value_heads": 1,
            "hidden_activation": "gelu", "sliding_window": 1, "rope_parameters": plain(50.0),
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 8, "query_pre_attn_scalar": 11, "sliding_window": 6, "num_hidden_layers": 3,
            "layer_types": [SLIDING, SLIDING, FULL], "tie_word_embeddings": True,
            "rope_parameters": {FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, SLIDING: plain(1e4)},
        },
    ),
    "gemma3_untied": (
        "Gemma3",
        {
            "head_dim": 6, "sliding_window": 20, "attention_bias": True, "final_logit_softcapping": 4.0,
            "num_key_value_heads": 4, "layer_types": [FULL, SLIDING],
            "rope_parameters": {FULL: plain(300.0), SLIDING: plain(20.0)},
        },
    ),
    "gemma3_all_windows": (
        "Gemma3",
        {"head_dim": 12, "num_key_value_heads": 1, "sliding_window": 4, "layer_types": [SLIDING, SLIDING]},
    ),
    "gemma4": (
        "Gemma4",
        {
            "head_dim": 6, "global_head_dim": 10, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
            "sliding_window": 6, "num_hidden_layers": 3, "layer_types": [SLIDING, FULL, FULL], "intermediate_size": 20,
            "tie_word_embeddings": True, "final_logit_softcapping": 4.0, "hidden_size_per_layer_input": 0,
        },
    ),
    "gemma4_untied": (
        "Gemma4",
        {
            "head_dim": 8, "global_head_dim": 4, "sliding_window": 30, "attention_bias": True,
            "num_key_value_heads": 4, "layer_types": [SLIDING, FULL], "hidden_size_per_layer_input": 0,
            "rope_parameters": {
                FULL: {"rope_type": "proportional", "rope_theta": 50.0, "partial_rotary_factor": 0.5, "factor": 3.0},
                SLIDING: plain(20.0),
            },
        },
    ),
    "gemma4_unified": (
        "Gemma4Unified",
        {
            "head_dim": 12, "global_head_dim": 16, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
            "attention_bias": True, "num_key_value_heads": 1, "sliding_window": 4, "rms_norm_eps": 1e-3,
            "num_hidden_layers": 4, "layer_types": [FULL, SLIDING, SLIDING, FULL], "hidden_activation": "gelu",
            "rope_parameters": {FULL: plain(300.0), SLIDING: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e3}},
        },
    ),
    "gemma4_experts": ("Gemma4", {
        "head_dim": 6, "global_head_dim": 10, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "sliding_window": 6, "num_hidden_layers": 3, "layer_types": [SLIDING, FULL, FULL],
        "tie_word_embeddings": True, "final_logit_softcapping": 4.0, "hidden_size_per_layer_input": 0,
        "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 10,
    }),
    "gemma4_experts_biased": ("Gemma4", {
        "head_dim": 8, "global_head_dim": 4, "sliding_window": 30, "attention_bias": True,
        "rms_norm_eps": 1e-3, "num_key_value_heads": 4, "layer_types": [SLIDING, FULL],
        "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 4,
        "moe_intermediate_size": 7, "hidden_activation": "gelu",
    }),
    "gemma4_experts_one": ("Gemma4", {
        "head_dim": 12, "global_head_dim": 6, "sliding_window": 3, "num_key_value_heads": 1,
        "layer_types": [SLIDING, FULL], "hidden_size_per_layer_input": 0, "hidden_activation": "silu",
        "enable_moe_block": True, "num_experts": 3, "top_k_experts": 1, "moe_intermediate_size": 24,
    }),
    "gemma4_shared": ("Gemma4", {
        "head_dim": 10, "global_head_dim": 12, "sliding_window": 6, "num_hidden_layers": 5, "num_kv_shared_layers": 3,
        "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL], "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": SMALL["vocab_size"],
        "tie_word_embeddings": True, "final_logit_softcapping": 4.0, "rms_norm_eps": 1e-3,
    }),
    "gemma4_per_layer": ("Gemma4", {
        "head_dim": 8, "global_head_dim": 4, "sliding_window": 30, "attention_bias": True, "rms_norm_eps": 1e-3,
        "num_key_value_heads": 4, "layer_types": [SLIDING, FULL], "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 5, "vocab_size_per_layer_input": SMALL["vocab_size"] + 3,
    }),
    "gemma4_shared_values": ("Gemma4", {
        "head_dim": 12, "global_head_dim": 16, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
        "num_key_value_heads": 1, "sliding_window": 3, "num_hidden_layers": 5, "num_kv_shared_layers": 2,
        "layer_types": [FULL, SLIDING, FULL, SLIDING, FULL], "hidden_activation": "gelu", "attention_bias": True,
        "hidden_size_per_layer_input": 7, "vocab_size_per_layer_input": SMALL["vocab_size"],
    }),
    "gemma4_shared_one": ("Gemma4", {
        "head_dim": 6, "global_head_dim": 8, "sliding_window": 9, "num_hidden_layers": 4, "num_kv_shared_layers": 3,
        "layer_types": [FULL, FULL, FULL, FULL], "use_double_wide_mlp": True, "hidden_activation": "silu",
        "hidden_size_per_layer_input": 9, "vocab_size_per_layer_input": SMALL["vocab_size"],
    }),
    "olmo2": ("Olmo2", {}),
    "olmo2_biased": ("Olmo2", {"attention_bias": True, "num_key_value_heads": 1, "rope_parameters": plain(77.0)}),
    "olmo2_tied": ("Olmo2", {"tie_word_embeddings": True, "num_key_value_heads": 4, "rms_norm_eps": 1e-3}),
    "olmo3": ("Olmo3", {"num_hidden_layers": 4, "sliding_window": 5}),
    "olmo3_yarn": (
        "Olmo3",
        {
            "sliding_window": 9, "layer_types": [FULL, SLIDING], "num_key_value_heads": 4, "attention_bias": True,
            "rope_parameters": {FULL: YARN | {"attention_factor": 1.2}, SLIDING: plain(1000.0)},
        },
    ),
    "olmo3_tied": ("Olmo3", {"tie_word_embeddings": True, "layer_types": [SLIDING, SLIDING], "sliding_window": 3}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "smollm3_biased": (
        "SmolLM3",
        {
            "num_hidden_layers": 3, "no_rope_layers": [0, 1, 0], "attention_bias": True, "mlp_bias": True,
            "num_key_value_heads": 1, "rope_parameters": plain(40.0),
        },
    ),
    "smollm3_window": (
        "SmolLM3",
        {
            "num_hidden_layers": 4, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 8,
            "rope_parameters": YARN,
        },
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0, "attention_multiplier": 0.3, "residual_multiplier": 0.22,
            "logits_scaling": 8.0, "tie_word_embeddings": True,
        },
    ),
    "granite_biased": (
        "Granite",
        {
            "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4, "residual_multiplier": 1.7,
            "attention_multiplier": 0.05, "rope_parameters": LLAMA3 | {"rope_theta": 900.0},
        },
    ),
    "granite_plain": ("Granite", {"num_key_value_heads": 1, "logits_scaling": 0.5, "attention_multiplier": 0.5}),
    "phi3": ("Phi3", {"original_max_position_embeddings": 256}),
    "phi3_partial": (
        "Phi3",
        {
            "hidden_size": 32, "num_key_value_heads": 4, "rope_parameters": plain(500.0)
            | {"partial_rotary_factor": 0.75}, "sliding_window": 6, "tie_word_embeddings": True,
        },
    ),
    "phi3_long": (
        "Phi3",
        {"original_max_position_embeddings": 16, "rope_parameters": longrope(2, 16), "num_key_value_heads": 1},
    ),
    "phi3_short": (
        "Phi3",
        {
            "hidden_size": 32, "original_max_position_embeddings": 64,
            "rope_parameters": longrope(2, 64) | {"partial_rotary_factor": 0.5},
        },
    ),
    "seed_oss": (
        "SeedOss",
        {"head_dim": 10, "attention_dropout": 0.0, "residual_dropout": 0.0, "attention_out_bias": False},
    ),
    "seed_oss_biased": (
        "SeedOss",
        {
            "head_dim": 6, "attention_dropout": 0.0, "residual_dropout": 0.0, "attention_bias": False,
            "attention_out_bias": True, "mlp_bias": True, "rope_parameters": plain(60.0),
        },
    ),
    "seed_oss_tied": (
        "SeedOss",
        {
            "head_dim": 4, "attention_dropout": 0.0, "residual_dropout": 0.0, "tie_word_embeddings": True,
            "num_key_value_heads": 1, "rope_parameters": YARN,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 8, "moe_intermediate_size": 10, "num_experts": 6, "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_moe_unnormalised": (
        "Qwen3Moe",
        {
            "head_dim": 6, "moe_intermediate_size": 7, "num_experts": 5, "num_experts_per_tok": 3,
            "norm_topk_prob": False, "attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1,
            "rope_parameters": YARN, "use_sliding_window": True, "sliding_window": 6,
        },
    ),
    "qwen3_moe_one_of_each": (
        "Qwen3Moe",
        {
            "head_dim": 10, "moe_intermediate_size": 12, "num_experts": 3, "num_experts_per_tok": 1,
            "norm_topk_prob": False, "num_key_value_heads": 4, "hidden_act": "gelu", "rope_parameters": plain(50.0),
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            "head_dim": 8, "layer_types": [LINEAR, FULL], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 6, "linear_value_head_dim": 10, "num_experts": 5, "num_experts_per_tok": 2,
            "moe_intermediate_size": 7, "shared_expert_intermediate_size": 9, "norm_topk_prob": True,
        },
    ),
    "qwen3_next_tied": ("Qwen3Next", {
        "head_dim": 10, "layer_types": [LINEAR, FULL], "tie_word_embeddings": True, "attention_bias": True,
        "num_key_value_heads": 1, "linear_num_key_heads": 1, "linear_num_value_heads": 3,
        "linear_key_head_dim": 7, "linear_value_head_dim": 6, "num_experts": 3, "num_experts_per_tok": 1,
        "moe_intermediate_size": 10, "shared_expert_intermediate_size": 6,
    }),
    "qwen3_next_dense": (
        "Qwen3Next",
        {
            "head_dim": 12, "num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR], "num_experts": 4,
            "num_experts_per_tok": 3, "moe_intermediate_size": 6, "shared_expert_intermediate_size": 5,
            "norm_topk_prob": False, "mlp_only_layers": [0, 2], "linear_num_key_heads": 3, "linear_num_value_heads": 3,
            "linear_key_head_dim": 5, "linear_value_head_dim": 4, "linear_conv_kernel_dim": 3,
            "tie_word_embeddings": True, "rope_parameters": plain(90.0) | {"partial_rotary_factor": 0.5},
        },
    ),
    "qwen3_5": (
        "Qwen3_5",
        {
            "head_dim": 8, "num_hidden_layers": 3, "full_attention_interval": 2, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10,
        },
    ),
    "qwen3_5_tied": (
        "Qwen3_5",
        {
            "head_dim": 12, "layer_types": [FULL, LINEAR], "tie_word_embeddings": True, "attention_bias": True,
            "num_key_value_heads": 1, "linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_key_head_dim": 5,
            "linear_value_head_dim": 4, "linear_conv_kernel_dim": 2, "rms_norm_eps": 1e-3,
            "rope_parameters": plain(90.0) | {"partial_rotary_factor": 0.5},
        },
    ),
    "qwen3_5_gelu": (
        "Qwen3_5",
        {
            "head_dim": 6, "layer_types": [LINEAR, FULL], "hidden_act": "gelu",
            "linear_num_key_heads": 1, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
            "linear_value_head_dim": 3, "linear_conv_kernel_dim": 7,
            "rope_parameters": YARN | {"partial_rotary_factor": 1.0},
        },
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {
            "head_dim": 8, "num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR], "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10, "num_experts": 5,
            "num_experts_per_tok": 2, "moe_intermediate_size": 7, "shared_expert_intermediate_size": 9,
        },
    ),
    "qwen3_5_moe_tied": (
        "Qwen3_5Moe",
        {
            "head_dim": 12, "layer_types": [FULL, LINEAR], "tie_word_embeddings": True, "attention_bias": True,
            "num_key_value_heads": 1, "linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_key_head_dim": 5,
            "linear_value_head_dim": 4, "linear_conv_kernel_dim": 2, "num_experts": 4, "num_experts_per_tok": 3,
            "moe_intermediate_size": 6, "shared_expert_intermediate_size": 5,
            "rope_parameters": plain(90.0) | {"partial_rotary_factor": 0.5},
        },
    ),
    "qwen3_5_moe_one": (
        "Qwen3_5Moe",
        {
            "head_dim": 8, "full_attention_interval": 2, "hidden_act": "gelu", "linear_num_key_heads": 1,
            "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 3,
            "linear_conv_kernel_dim": 7, "num_experts": 6, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "mixtral_window": (
        "Mixtral",
        {
            "num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 5, "head_dim": 6,
            "num_key_value_heads": 1, "tie_word_embeddings": True,
        },
    ),
    "mixtral_yarn": (
        "Mixtral",
        {
            "num_local_experts": 7, "num_experts_per_tok": 1, "sliding_window": None, "rope_parameters": YARN,
            "num_key_value_heads": 4, "head_dim": 4,
        },
    ),
    "gpt_oss": ("GptOss", {"head_dim": 8, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 6}),
    "gpt_oss_unbiased": (
        "GptOss",
        {
            "head_dim": 6, "num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 9,
            "attention_bias": False, "swiglu_limit": 1.5, "num_hidden_layers": 3,
            "layer_types": [FULL, SLIDING, FULL], "rope_parameters": YARN | {"truncate": False},
        },
    ),
    "gpt_oss_tied": (
        "GptOss",
        {
            "head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 3,
            "tie_word_embeddings": True, "num_key_value_heads": 1, "layer_types": [SLIDING, SLIDING],
            "rope_parameters": plain(70.0),
        },
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_hidden_layers": 3, "moe_intermediate_size": 7, "shared_expert_intermediate_size": 11,
            "num_experts": 5, "num_experts_per_tok": 2, "mlp_only_layers": [1],
        },
    ),
    "qwen2_moe_one": ("Qwen2Moe", {
        "moe_intermediate_size": 9, "shared_expert_intermediate_size": 13, "num_experts": 3,
        "num_experts_per_tok": 1, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1,
        "hidden_act": "gelu", "num_key_value_heads": 4,
    }),
    "qwen2_moe_sparse": (
        "Qwen2Moe",
        {
            "num_hidden_layers": 4, "moe_intermediate_size": 6, "shared_expert_intermediate_size": 4,
            "num_experts": 4, "num_experts_per_tok": 3, "norm_topk_prob": True, "decoder_sparse_step": 2,
            "tie_word_embeddings": True, "qkv_bias": False, "num_key_value_heads": 1,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "head_dim": 8, "num_hidden_layers": 3, "moe_intermediate_size": 7, "n_routed_experts": 6,
            "num_experts_per_tok": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7, "use_qk_norm": True,
        },
    ),
    "glm4_moe_groups": (
        "Glm4Moe",
        {
            "head_dim": 12, "num_hidden_layers": 4, "moe_intermediate_size": 5, "n_routed_experts": 9,
            "num_experts_per_tok": 4, "n_group": 3, "topk_group": 2, "n_shared_experts": 2,
            "first_k_dense_replace": 2, "norm_topk_prob": False, "attention_bias": True, "tie_word_embeddings": True,
        },
    ),
    "glm4_moe_no_dense": (
        "Glm4Moe",
        {
            "moe_intermediate_size": 9, "n_routed_experts": 4, "num_experts_per_tok": 1, "first_k_dense_replace": 0,
            "num_key_value_heads": 1, "hidden_act": "gelu", "routed_scaling_factor": 0.4,
            "rope_parameters": plain(30.0) | {"partial_rotary_factor": 1.0},
        },
    ),
}  # fmt: skip
