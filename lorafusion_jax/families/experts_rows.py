"""Rows of families with experts in place of an MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lorafusion_jax.families.dense_rows import MROPE, QWEN_3_VL, SWITCHED
from lorafusion_jax.families.experts import Router
from lorafusion_jax.families.family import Family
from lorafusion_jax.layout.layer import ATTENTION, BLOCK, FEED_FORWARD, SHARED_MLP

# Experts as in DeepSeek-V3: groups, an offset that helps to choose, an MLP beside.
SIGMOID = Router(score="sigmoid", correction=True, least=1e-20)
_GROUPS = {
    "num_experts_per_tok": 8, "n_shared_experts": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
_GROUP_KEYS = {"num_local_experts": "num_experts", "n_routed_experts": "num_experts"}
PREDICTORS = (
    "num_mtp_layers",
    "num_nextn_predict_layers",
)  # how many layers after the last one predict further tokens; they are not loaded
_OF_DEEPSEEK = (
    *PREDICTORS, "head_dim", "qk_head_dim", "pretraining_tp", "ep_size", "moe_layer_freq", "scoring_func",
    "topk_method", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux",
)  # fmt: skip
_QWEN_3_VL_MOE = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
    "decoder_sparse_step": 1, "mlp_only_layers": None, "tie_word_embeddings": True,
}  # fmt: skip
GRANITE_MOE = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "attention_bias": False, "embedding_multiplier": 1.0, "attention_multiplier": 1.0,
    "residual_multiplier": 1.0, "logits_scaling": 1.0, "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
GRANITE_EXPERTS: dict[str, Any] = {
    "experts": {"router": Router(score="softmax_of_chosen"), "module": BLOCK},
    "keys": {"num_local_experts": "num_experts"}, "experts_transposed": True,
    "expert_names": (f"{BLOCK}.input_linear.weight", f"{BLOCK}.output_linear.weight"),
    "modules": {
        f"{BLOCK}.router": f"{BLOCK}.router.layer",
        f"{BLOCK}.{SHARED_MLP}.input_linear": f"{SHARED_MLP}.input_linear",
        f"{BLOCK}.{SHARED_MLP}.output_linear": f"{SHARED_MLP}.output_linear",
    },
}  # fmt: skip
# An indexer, see `ModelConfig.chosen`.
_INDEXER = (".self_attn.indexer.",)
_OF_INDEXER = (
    "index_head_dim", "index_n_heads", "index_topk_freq", "index_topk_pattern", "index_skip_topk_offset",
    "indexer_types", "indexer_rope_interleave", "layer_types", "rope_interleave",
)  # fmt: skip
_OF_LING = (
    "max_window_layers", "moe_shared_expert_intermediate_size", "mtp_loss_scaling_factor", "norm_topk_prob",
    "rotary_dim", "router_dtype", "score_function", "sliding_window", "use_rmsnorm", "use_sliding_window",
)  # fmt: skip
_OF_SARVAM = tuple(key for key in _OF_LING if key != "norm_topk_prob")
_OF_DOTS = ("scoring_func", "topk_method", "moe_layer_freq", "ep_size", "pretraining_tp")
_OF_MINIMAX = (
    "attn_type_list", "layernorm_full_attention_alpha", "layernorm_full_attention_beta",
    "layernorm_linear_attention_alpha", "layernorm_linear_attention_beta", "layernorm_mlp_alpha",
    "layernorm_mlp_beta", "mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "qk_norm_type",
    "scoring_func", "use_mtp", "use_qk_norm", "use_routing_bias",
)  # fmt: skip
# Where config.json has neither spelling, transformers' Gpt-oss and Ministral 3 have these.
_GPT_OSS_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_MISTRAL_4_ROPE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip

EXPERTS: dict[str, Family] = {
    "qwen3_moe": Family(
        models="Qwen3-MoE (30B-A3B, 235B-A22B)",
        beyond="experts, norms of q and k",
        architectures=("Qwen3MoeForCausalLM",), windows="all", fields={"qk_norm": True}, experts={},
        reads={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768, "attention_bias": False, "use_sliding_window": False,
            "sliding_window": 4096, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
            "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": None,
        },
        keys={"num_local_experts": "num_experts", "num_experts": "num_experts"},
        known=("max_window_layers", "router_aux_loss_coef"), modules={"mlp.router": "mlp.gate"},
    ),
    "mixtral": Family(
        models="Mixtral",
        beyond="experts",
        architectures=("MixtralForCausalLM",), windows="all", experts={},
        reads={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "sliding_window": None, "rope_theta": 1e6,
            "num_experts": 8, "num_experts_per_tok": 2,
        },
        keys={"num_local_experts": "num_experts"}, known=("router_aux_loss_coef",),
        modules={"mlp.router": "block_sparse_moe.gate"},
        expert_names=tuple(f"block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w3", "w2")),
    ),
    "gpt_oss": Family(
        models="gpt-oss",
        beyond="experts with biases and a limited gate, attention sinks, windows by layer, yarn",
        architectures=("GptOssForCausalLM",), windows=2, fields={"attention_sinks": True},
        reads={
            "num_key_value_heads": 8,
            "vocab_size": 201088, "head_dim": 64, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
            "rope_theta": 150000.0, "rope_parameters": _GPT_OSS_ROPE, "attention_bias": True, "sliding_window": 128,
            "layer_types": None,
            "num_experts": 128, "num_experts_per_tok": 4, "swiglu_limit": 7.0, "swiglu_alpha": 1.702,
        },
        keys={
            "num_local_experts": "num_experts", "num_experts_per_tok": "num_experts_per_tok",
        },
        known=("router_aux_loss_coef", "initial_context_length", "experts_per_token"),
        experts={
            "router": Router(score="softmax_of_chosen", bias=True), "bias": True, "interleaved": True,
        },
        expert_names=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ),
    "qwen2_moe": Family(
        models="Qwen2-MoE (Qwen1.5-MoE-A2.7B)",
        beyond="experts, an MLP with a gate beside them, an MLP alone in some layers",
        architectures=("Qwen2MoeForCausalLM",), windows="first",
        experts={"shared_gate": True},
        reads={
            "num_key_value_heads": 16,
            "max_position_embeddings": 32768, **SWITCHED, "num_experts": 60, "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "norm_topk_prob": False,
            "decoder_sparse_step": 1, "mlp_only_layers": None, "qkv_bias": True,
        },
        
        known=("num_local_experts", "router_aux_loss_coef"), modules={"mlp.router": "mlp.gate"},
    ),
    "glm4_moe": Family(
        models="GLM-4.5, GLM-4.5-Air, GLM-4.6",
        beyond=(
            "experts in groups, chosen with an offset, an MLP beside them, an MLP alone in the first layers; "
            "partial rotary embeddings"
        ),
        architectures=("Glm4MoeForCausalLM",), fields={"o_bias": False}, experts={"router": SIGMOID},
        reads=_GROUPS | {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "attention_bias": False, "use_qk_norm": False,
            "partial_rotary_factor": 0.5, "num_experts": 128, "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
        },
        keys=_GROUP_KEYS, known=PREDICTORS, modules={"mlp.router": "mlp.gate"},
    ),
    "deepseek_v3": Family(
        models="DeepSeek-V3, Kimi-K2",
        beyond="q, k and v from low-rank latents, experts in groups with one beside them, yarn",
        architectures=("DeepseekV3ForCausalLM",), model_types=("kimi_k2",), latent=True, experts={"router": SIGMOID},
        reads=_GROUPS | {
            "num_key_value_heads": 128,
            "max_position_embeddings": 4096, "attention_bias": False, "q_lora_rank": 1536, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_interleave": True,
            "num_experts": 256, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4,
        },
        keys=_GROUP_KEYS, modules={"mlp.router": "mlp.gate"},
        known=_OF_DEEPSEEK,
    ),
    "sarvam_moe": Family(
        models="Sarvam-30B",
        beyond="as GLM-4.5, with norms of q and k and whole rotary embeddings; q, k and v are one tensor in files",
        architectures=("SarvamMoEForCausalLM",), saved_as=("Glm4MoeForCausalLM",), fields={"o_bias": False},
        experts={"router": SIGMOID},
        keys=_GROUP_KEYS | {
            "num_experts": "num_experts", "num_shared_experts": "n_shared_experts",
            "n_shared_experts": "n_shared_experts", "use_qkv_bias": "attention_bias",
            "attention_bias": "attention_bias", "moe_router_enable_expert_bias": "use_expert_bias",
        },
        reads=_GROUPS | {
            "vocab_size": 262144, "hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 19,
            "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 131072,
            "attention_bias": False, "use_qk_norm": True, "rope_theta": 8e6, "partial_rotary_factor": 1.0,
            "num_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1024, "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5, "use_expert_bias": True,
        },
        known=(*PREDICTORS, *_OF_SARVAM),
        joined={"attention.query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")},
        modules={
            "model.embed_tokens": "model.word_embeddings", "self_attn.o_proj": "attention.dense",
            "self_attn.q_norm": "attention.query_layernorm", "self_attn.k_norm": "attention.key_layernorm",
            "mlp.router": "mlp.gate", "mlp.router.e_score_correction_bias": "mlp.gate.expert_bias",
            "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",  # as the class of transformers names it
        },
    ),
    "sarvam_mla": Family(
        models="Sarvam-105B",
        beyond="as DeepSeek-V3, without a latent of q",
        architectures=("SarvamMLAForCausalLM",), saved_as=("DeepseekV3ForCausalLM",), latent=True, cached_heads=True,
        experts={"router": SIGMOID}, meant={"rope_type": {"deepseek_yarn": "yarn"}},
        keys=_GROUP_KEYS | {
            "num_experts": "num_experts", "num_shared_experts": "n_shared_experts",
            "n_shared_experts": "n_shared_experts", "moe_router_enable_expert_bias": "use_expert_bias",
        },
        reads=_GROUPS | {
            "vocab_size": 262144, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 32,
            "num_attention_heads": 64, "max_position_embeddings": 4096, "attention_bias": False, "q_lora_rank": None,
            "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "rope_interleave": True, "num_experts": 128, "moe_intermediate_size": 2048, "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5, "use_expert_bias": True,
        },
        modules={"mlp.router": "mlp.gate"},
        known=(*_OF_DEEPSEEK, *_OF_SARVAM, "q_head_dim"),
    ),
    "glm4_moe_lite": Family(
        models="GLM-4.7-Flash",
        beyond="latents as DeepSeek-V3, experts with one beside them, an MLP alone in the first layer",
        architectures=("Glm4MoeLiteForCausalLM",), latent=True, experts={"router": SIGMOID},
        reads=_GROUPS | {
            "num_key_value_heads": 20,
            "rms_norm_eps": 1e-5, "max_position_embeddings": 202752, "attention_bias": False, "q_lora_rank": 768,
            "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
            "rope_interleave": True, "num_experts": 64, "moe_intermediate_size": 1536, "num_experts_per_tok": 4,
            "routed_scaling_factor": 1.8, "first_k_dense_replace": 1, "mlp_layer_types": None,
            "partial_rotary_factor": 1.0,
        },
        keys=_GROUP_KEYS, modules={"mlp.router": "mlp.gate"}, known=_OF_DEEPSEEK,
    ),
    "qwen3_vl_moe_text": Family(
        models="Qwen3-VL (30B-A3B), its text",
        beyond="as Qwen3-MoE, with positions as Qwen2-VL",
        architectures=("Qwen3VLMoeTextModel",), fields={"qk_norm": True}, known_of_rope=MROPE, experts={},
        reads=QWEN_3_VL | _QWEN_3_VL_MOE,
        keys={"num_local_experts": "num_experts", "num_experts": "num_experts"}, modules={"mlp.router": "mlp.gate"},
        known=("router_aux_loss_coef", "norm_topk_prob"), experts_transposed=True,
        expert_names=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ),
    "olmoe": Family(
        models="OLMoE",
        beyond="experts, norms over all heads",
        architectures=("OlmoeForCausalLM",), fields={"qk_norm": "full"}, experts={}, modules={"mlp.router": "mlp.gate"},
        reads={
            "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16,
            "num_attention_heads": 16, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "attention_bias": False,
            "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False,
        },
        keys={"num_local_experts": "num_experts", "num_experts": "num_experts"}, known=("router_aux_loss_coef",),
    ),
    "dots1": Family(
        models="dots.llm1",
        beyond="as Qwen3, with experts as DeepSeek-V3",
        architectures=("Dots1ForCausalLM",), windows="switched", fields={"qk_norm": True},
        experts={"router": SIGMOID}, modules={"mlp.router": "mlp.gate"}, keys=_GROUP_KEYS, known=_OF_DOTS,
        reads=_GROUPS | {
            "vocab_size": 152064, "hidden_size": 4608, "intermediate_size": 10944, "num_hidden_layers": 62,
            "num_attention_heads": 32, "num_key_value_heads": 32, "attention_bias": False, "sliding_window": 4096,
            "max_window_layers": 62, "layer_types": None, "num_experts": None, "num_experts_per_tok": None,
            "n_shared_experts": None, "moe_intermediate_size": 1408, "first_k_dense_replace": 0,
            "norm_topk_prob": False,
        },
    ),
    "deepseek_v2": Family(
        models="DeepSeek-V2, V2-Lite",
        beyond="latents as DeepSeek-V3; a softmax chooses, and the best expert of a group speaks for it",
        architectures=("DeepseekV2ForCausalLM",), latent=True, keys=_GROUP_KEYS, modules={"mlp.router": "mlp.gate"},
        experts={"router": Router(normalise=False, group_value="best", balanced=False)},
        reads={
            "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
            "num_attention_heads": 32, "attention_bias": False, "q_lora_rank": 1536, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 64,
            "num_experts_per_tok": None, "n_shared_experts": 2, "moe_intermediate_size": 1407, "n_group": None,
            "topk_group": None, "topk_method": "greedy", "routed_scaling_factor": 1.0, "first_k_dense_replace": 0,
        },
        known=tuple(key for key in _OF_DEEPSEEK if key != "topk_method"),
    ),
    "deepseek_v32": Family(
        models="DeepSeek-V3.2",
        beyond="as DeepSeek-V3; up to `index_topk` tokens a sample, where queries read all earlier ones",
        architectures=("DeepseekV32ForCausalLM",), latent=True, experts={"router": SIGMOID},
        reads=_GROUPS | {
            "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
            "num_attention_heads": 128, "num_key_value_heads": 128, "max_position_embeddings": 163840,
            "attention_bias": False, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 256, "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3, "mlp_layer_types": None, "routed_scaling_factor": 2.5, "n_group": 8,
            "topk_group": 4, "index_topk": 2048,
        },
        keys=_GROUP_KEYS, modules={"mlp.router": "mlp.gate"}, known=(*_OF_DEEPSEEK, *_OF_INDEXER),
        ignored=_INDEXER,
    ),
    "glm_moe_dsa": Family(
        models="GLM-5",
        beyond="as DeepSeek-V3.2",
        architectures=("GlmMoeDsaForCausalLM",), latent=True, experts={"router": SIGMOID},
        reads=_GROUPS | {
            "vocab_size": 154880, "hidden_size": 6144, "intermediate_size": 12288, "num_hidden_layers": 78,
            "num_attention_heads": 64, "num_key_value_heads": 64, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 202752, "attention_bias": False, "q_lora_rank": 2048, "kv_lora_rank": 512,
            "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "num_experts": 256,
            "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "mlp_layer_types": None,
            "routed_scaling_factor": 2.5, "index_topk": 2048,
        },
        keys=_GROUP_KEYS, modules={"mlp.router": "mlp.gate"}, known=(*_OF_DEEPSEEK, *_OF_INDEXER),
        ignored=_INDEXER,
    ),
    "bailing_moe_v2": Family(
        models="Ling 2.0, Ring 2.0",
        beyond=(
            "as GLM-4.5, with q, k and v as one projection and norms of q and k; the experts stay frozen, because"
            " PEFT has other names for them in its class"
        ),
        architectures=("BailingMoeV2ForCausalLM",), shared_types=("bailing_moe",),
        fields={
            "fused": "attention", "fused_name": "attention_query_key_value",
            "attention_module": ATTENTION, "attention_out": "attention_dense", "mlp_bias": False,
        },
        # Its class has a module for each expert, so that PEFT's names of them are others.
        experts={"router": replace(SIGMOID, normalise="several"), "adapted": False},
        keys={
            "num_experts": "num_experts", "num_shared_experts": "n_shared_experts", "use_qkv_bias": "qkv_bias",
            "use_bias": "attention_out_bias", "moe_router_enable_expert_bias": "use_expert_bias",
        },
        reads={
            "num_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 8, "topk_group": 4,
            "routed_scaling_factor": 2.5, "moe_intermediate_size": None, "first_k_dense_replace": 0,
            "qkv_bias": False, "attention_out_bias": True, "use_expert_bias": True, "partial_rotary_factor": 1.0,
            "rms_norm_eps": 1e-5, "max_position_embeddings": 16384, "use_qk_norm": False,
        },
        modules={
            "model.embed_tokens": "model.word_embeddings", "mlp.router": "mlp.gate",
            "mlp.router.e_score_correction_bias": "mlp.gate.expert_bias",
            "attention.q_norm": "attention.query_layernorm", "attention.k_norm": "attention.key_layernorm",
            "attention.attention_query_key_value": "attention.query_key_value",
            "attention.attention_dense": "attention.dense",
        },
        known=(*PREDICTORS, *_OF_LING),
        dropouts={"attention_dropout": 0.1, "embedding_dropout": 0.1, "output_dropout": 0.1},
    ),
    "llama4_text": Family(
        models="Llama 4 Scout, Maverick, their text",
        beyond=(
            "attention within chunks, no rotary embeddings but queries scaled by position in every fourth layer, "
            "norms of heads without weights; a row is weighed before its expert, an MLP beside the experts"
        ),
        architectures=("Llama4ForCausalLM",), windows="chunks", rope={"interleaved": True},
        fields={"qk_norm": "unit", "mlp_module": FEED_FORWARD}, shared_expert=f"{FEED_FORWARD}.shared_expert",
        experts={
            "router": Router(score="sigmoid_of_chosen", weighs_inputs=True, normalise=False), "module": FEED_FORWARD,
            "adapted": False,
        },
        expert_names=(f"{FEED_FORWARD}.experts.gate_up_proj", f"{FEED_FORWARD}.experts.down_proj"),
        keys={
            "intermediate_size": "moe_intermediate_size", "intermediate_size_mlp": "intermediate_size",
            "num_local_experts": "num_experts", "interleave_moe_layer_step": "decoder_sparse_step",
        },
        reads={
            "vocab_size": 202048, "hidden_size": 5120, "moe_intermediate_size": 8192, "intermediate_size": 16384,
            "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "num_experts": 16,
            "num_experts_per_tok": 1, "decoder_sparse_step": 1, "moe_layers": None, "use_qk_norm": True,
            "no_rope_layers": None, "no_rope_layer_interval": 4, "attention_chunk_size": 8192, "layer_types": None,
            "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1, "attention_bias": False,
        },
        known=("router_aux_loss_coef", "for_llm_compressor"),
    ),
    "mistral4": Family(
        models="Mistral Small 4",
        beyond="latents as DeepSeek-V3, a softmax chooses, queries scaled by position",
        architectures=("Mistral4ForCausalLM",), latent=True, whole_heads=True, keys=_GROUP_KEYS,
        experts={"router": Router(balanced=False)}, modules={"mlp.router": "mlp.gate"},
        reads=_GROUPS | {
            "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 1048576,
            "attention_bias": False, "q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_interleave": True, "num_experts": 128,
            "num_experts_per_tok": 4, "moe_intermediate_size": 2048, "first_k_dense_replace": 0,
            "llama_4_scaling_beta": None, "rope_parameters": _MISTRAL_4_ROPE,
        },
        known=("qk_head_dim", "pretraining_tp"),
    ),
    "minimax_m2": Family(
        models="MiniMax-M2",
        beyond="experts chosen with an offset, norms over all heads, partial rotary embeddings",
        architectures=("MiniMaxM2ForCausalLM",), fields={"qk_norm": "full"},
        experts={"router": SIGMOID},
        expert_names=tuple(f"block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w3", "w2")),
        modules={
            "mlp.router": "block_sparse_moe.gate",
            "mlp.router.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias",
        },
        keys={"num_local_experts": "num_experts", "num_experts": "num_experts"},
        reads={
            "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
            "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608,
            "rope_theta": 5e6, "num_experts": 256, "num_experts_per_tok": 8, "rotary_dim": None,
            "partial_rotary_factor": None,
        },
        known=("router_aux_loss_coef", *_OF_MINIMAX),
    ),
    "granitemoe": Family(
        models="Granite 3 with experts",
        beyond="as Granite 3, with experts",
        architectures=("GraniteMoeForCausalLM",), reads=GRANITE_MOE, **GRANITE_EXPERTS,
        known=("router_aux_loss_coef",),
    ),
    "granitemoeshared": Family(
        models="Granite 3 with experts and an MLP",
        beyond="as Granite 3, with experts, and an MLP beside them in some",
        architectures=("GraniteMoeSharedForCausalLM",), reads=GRANITE_MOE | {"shared_intermediate_size": 0},
        **GRANITE_EXPERTS, known=("router_aux_loss_coef",),
    ),
}  # fmt: skip
