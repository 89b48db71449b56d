"""Rows of families in which other layers than those of attention mix the rows of a sample."""

from __future__ import annotations

from lorafusion_jax.families.experts import Router
from lorafusion_jax.families.experts_rows import GRANITE_EXPERTS, GRANITE_MOE, PREDICTORS, SIGMOID
from lorafusion_jax.families.family import Family
from lorafusion_jax.layout.layer import FEED_FORWARD, LINEAR_ATTENTION, MIXER, SHARED_MLP

# Qwen3-Next and later: a gated delta net in three of four layers. The tensors of "mtp" predict further tokens.
_DELTA = {
    "head_dim": 256, "max_position_embeddings": 32768, "attention_bias": False, "partial_rotary_factor": 0.25,
    "layer_types": None, "full_attention_interval": 4, "attn_output_gate": True, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
_DELTA_FIELDS = {"qk_norm": True, "norm_offset": 1.0, "attention_gate": True}
_MTP = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype", "mlp_only_layers")
_DELTA_NAMES = {"known_of_rope": ("mrope_section", "mrope_interleaved"), "ignored": ("mtp.",)}
_MAMBA = {
    "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False, "time_step_limit": None,
}  # fmt: skip

_LFM2 = {
    "qk_norm": True, "attention_out": "out_proj", "mlp_module": FEED_FORWARD, "mlp_names": ("w1", "w3", "w2"),
}  # fmt: skip
_LFM2_NAMES = {
    "input_layernorm": "operator_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "self_attn.q_layernorm", "self_attn.k_norm": "self_attn.k_layernorm",
    "model.norm": "model.embedding_norm",
}  # fmt: skip

HYBRID: dict[str, Family] = {
    "qwen3_5_text": Family(
        models="Qwen3.5 and later, dense",
        beyond=(
            "a gated delta net in three of four layers, gated attention in the others, partial rotary embeddings,"
            " norms with an offset"
        ),
        architectures=("Qwen3_5ForCausalLM",), fields=_DELTA_FIELDS, delta_net={}, **_DELTA_NAMES,
        reads=_DELTA | {
            "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
            "num_attention_heads": 16, "num_key_value_heads": 4,
        },
        known=_MTP,
    ),
    "qwen3_next": Family(
        models="Qwen3-Next",
        beyond="as Qwen3.5, with experts and a gated one beside them",
        architectures=("Qwen3NextForCausalLM",), fields=_DELTA_FIELDS, delta_net={"grouped": True}, **_DELTA_NAMES,
        experts={"shared_gate": True},
        reads=_DELTA | {
            "num_key_value_heads": 2,
            "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1,
            "mlp_only_layers": None,
        },
        known=("num_local_experts", "router_aux_loss_coef"),
        modules={"mlp.router": "mlp.gate"},
    ),
    "qwen3_5_moe_text": Family(
        models="Qwen3.5 and later, with experts (35B-A3B)",
        beyond="as Qwen3.5, with experts and a gated one beside them",
        architectures=("Qwen3_5MoeForCausalLM",), fields=_DELTA_FIELDS, delta_net={}, **_DELTA_NAMES,
        experts={"shared_gate": True}, modules={"mlp.router": "mlp.gate"},
        reads=_DELTA | {
            "vocab_size": 248320, "hidden_size": 2048, "intermediate_size": 512, "num_hidden_layers": 40,
            "num_attention_heads": 16, "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        },
        
        known=(
            *_MTP, "num_local_experts", "router_aux_loss_coef", "intermediate_size", "norm_topk_prob",
            "decoder_sparse_step",
        ),
    ),
    "lara_mini": Family(
        models="Lara 4 Mini",
        beyond=(
            "a gated delta net in two of five layers, as Qwen3.5's, windows in two, and full attention without "
            "rotary embeddings in one; experts, and one beside them"
        ),
        architectures=("LaraMiniForCausalLM",), fields={"qk_norm": True}, delta_net={}, experts={}, rotated="windows",
        period=(
            "linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention",
        ),
        joined={
            f"{LINEAR_ATTENTION}.in_proj": tuple(
                f"{LINEAR_ATTENTION}.in_proj_{name}" for name in ("qkv", "z", "b", "a")
            ),
        },
        modules={"mlp.router": "mlp.gate", f"{LINEAR_ATTENTION}.norm": f"{LINEAR_ATTENTION}.out_norm"},
        reads={
            "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 34,
            "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 131072,
            "tie_word_embeddings": True, "attention_bias": False, "sliding_window": 512, "layer_types": None,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_num_key_heads": 8, "linear_num_value_heads": 16, "num_experts": 128, "num_experts_per_tok": 4,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True,
        },
        known=("intermediate_size", "num_local_experts", "router_aux_loss_coef"),
    ),
    "olmo_hybrid": Family(
        models="OLMo hybrid",
        beyond=(
            "a gated delta net with projections of q, k and v in three of four layers, which have norms of "
            "inputs; attention as OLMo 2 in the others"
        ),
        architectures=("OlmoHybridForCausalLM",), delta_net={"separate": True}, rotated="unless null",
        fields={"norms": "post", "qk_norm": "full"},
        modules={
            f"{LINEAR_ATTENTION}.norm": f"{LINEAR_ATTENTION}.o_norm",
            **{f"{LINEAR_ATTENTION}.conv1d.{part}": f"{LINEAR_ATTENTION}.{part}_conv1d" for part in ("q", "k", "v")},
        },
        reads={
            "vocab_size": 100352, "hidden_size": 3840, "intermediate_size": 11008, "num_hidden_layers": 32,
            "num_attention_heads": 30, "max_position_embeddings": 65536, "attention_bias": False, "layer_types": None,
            "linear_num_key_heads": None, "linear_num_value_heads": None, "linear_key_head_dim": None,
            "linear_value_head_dim": None, "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True,
        },
        known=("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
    ),
    "granitemoehybrid": Family(
        models="Granite 4, dense and hybrid",
        beyond="as Granite 3; Mamba-2 in most layers, experts with an MLP beside them, or the MLP alone",
        architectures=("GraniteMoeHybridForCausalLM",), mixer="mamba", **GRANITE_EXPERTS,
        fields={"fused": "mlp", "mlp_module": SHARED_MLP, "mlp_names": ("input_linear", "output_linear")},
        reads=GRANITE_MOE | _MAMBA | {
            "shared_intermediate_size": 1024, "position_embedding_type": None, "layer_types": None,
        },
        known=("router_aux_loss_coef", "mamba_chunk_size", "normalization_function", "init_method"),
    ),
    "bamba": Family(
        models="Bamba",
        beyond="Mamba-2 in most layers, partial rotary embeddings",
        architectures=("BambaForCausalLM",), mixer="mamba", fields={"mlp_module": FEED_FORWARD},
        reads=_MAMBA | {
            "vocab_size": 128000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 262144, "attention_bias": False, "mlp_bias": False,
            "partial_rotary_factor": 0.5, "attn_layer_indices": None,
        },
        known=("mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient", "attn_rotary_emb", "layers_block_type"),
        modules={"post_attention_layernorm": "pre_ff_layernorm", "model.norm": "model.final_layernorm"},
    ),
    "nemotron_h": Family(
        models="Nemotron-H, Nemotron 3 Nano",
        beyond=(
            "a layer is Mamba-2, attention without rotary embeddings, an MLP, or experts without gates and one "
            "beside them"
        ),
        architectures=("NemotronHForCausalLM",), mixer="mamba", one_half=True, rotated="none", frozen=("out_proj",),
        fields={
            "attention_module": MIXER, "mlp_module": MIXER, "mlp_gated": False, "mlp_names": ("up_proj", "down_proj"),
        },
        experts={"router": SIGMOID, "module": MIXER, "gated": False},
        expert_names=(f"{MIXER}.experts.{{}}.up_proj", f"{MIXER}.experts.{{}}.down_proj"),
        modules={
            "model.layers": "backbone.layers", "model.embed_tokens": "backbone.embeddings",
            "model.norm": "backbone.norm_f", "input_layernorm": "norm", "post_attention_layernorm": "norm",
            f"{MIXER}.router": f"{MIXER}.gate",
        },
        keys={
            "layers_block_type": "layer_types", "layer_types": "layer_types", "mlp_hidden_act": "hidden_act",
            "layer_norm_epsilon": "rms_norm_eps", "mamba_num_heads": "mamba_n_heads", "mamba_head_dim": "mamba_d_head",
            "n_groups": "mamba_n_groups", "ssm_state_size": "mamba_d_state", "conv_kernel": "mamba_d_conv",
            "use_conv_bias": "mamba_conv_bias", "use_bias": "mamba_proj_bias", "n_routed_experts": "num_experts",
            "num_local_experts": "num_experts", "attention_head_dim": "head_dim", "head_dim": "head_dim",
        },
        reads={
            "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 21504, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
            "hidden_act": "relu2", "mlp_bias": False, "rms_norm_eps": 1e-5, "mamba_hidden_act": "silu",
            "mamba_d_state": 128, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_n_groups": 8, "mamba_d_conv": 4,
            "mamba_conv_bias": True, "mamba_proj_bias": False, "time_step_min": 0.001, "hybrid_override_pattern": None,
            "layer_types": ["linear_attention", "moe", "full_attention", "mlp"], "num_experts": 8,
            "num_experts_per_tok": 2, "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
            "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        },
        known=(
            *PREDICTORS, "chunk_size", "expand", "mamba_proj_bias", "mamba_ssm_cache_dtype",
            "moe_shared_expert_overlap", "mtp_hybrid_override_pattern", "mtp_layers_block_type", "n_shared_experts",
            "num_logits_to_keep", "rescale_prenorm_residual", "residual_in_fp32", "time_step_floor", "time_step_limit",
            "time_step_max", "time_step_rank", "use_mamba_kernels",
            "rms_norm_eps",  # beside layer_norm_epsilon, which transformers 5.23 reads
            "tie_word_embeddings",  # transformers 5.23 ties no head to the embedding here
        ),
        ignored=("mtp.",),
    ),
    "falcon_h1": Family(
        models="Falcon-H1",
        beyond="Mamba-2 beside attention in every layer, a factor of each projection",
        architectures=("FalconH1ForCausalLM",), mixer="mamba", frozen=("out_proj",),
        fields={"mixer_beside": True, "mlp_module": FEED_FORWARD},
        modules={"post_attention_layernorm": "pre_ff_layernorm", "model.norm": "model.final_layernorm"},
        keys={"lm_head_multiplier": "logit_scale"},
        reads=_MAMBA | {
            "vocab_size": 128000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192, "attention_bias": False, "mlp_bias": False, "projectors_bias": False,
            "mamba_d_ssm": 1024, "mamba_rms_norm": False, "mamba_norm_before_gate": True, "logit_scale": 1.0,
            "embedding_multiplier": 1.0, "key_multiplier": 1.0, "attention_in_multiplier": 1.0,
            "attention_out_multiplier": 1.0, "ssm_in_multiplier": 1.0, "ssm_out_multiplier": 1.0,
            "ssm_multipliers": None, "mlp_multipliers": None,
        },
        known=(
            "mamba_chunk_size", "num_logits_to_keep", "layers_block_type", "layer_types", "mamba_use_mlp",
            "mlp_expansion_factor",
        ),
    ),
    "lfm2": Family(
        models="LFM2",
        beyond="gated short convolutions in most layers, norms of q and k",
        architectures=("Lfm2ForCausalLM",), mixer="convolution", fields=_LFM2, modules=_LFM2_NAMES,
        keys={
            "norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size",
            "tie_word_embeddings": "tie_word_embeddings", "intermediate_size": "intermediate_size",
        },
        reads={
            "vocab_size": 65536, "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 128000,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 1e6, "conv_bias": False,
            "conv_L_cache": 3, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": True, "full_attn_idxs": None, "layer_types": None,
        },
        known=(
            "hidden_act", "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale",
            "block_use_swiglu", "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init",
            "num_heads", "theta", "use_pos_enc",
        ),
    ),
    "lfm2_moe": Family(
        models="LFM2 with experts (8B-A1B)",
        beyond="as LFM2, with experts chosen with an offset, an MLP alone in the first layers",
        architectures=("Lfm2MoeForCausalLM",), mixer="convolution", fields=_LFM2,
        experts={"router": Router(score="sigmoid", correction=True, least=1e-6), "module": FEED_FORWARD},
        expert_names=tuple(f"feed_forward.experts.{{}}.{name}" for name in ("w1", "w3", "w2")),
        modules=_LFM2_NAMES | {
            "feed_forward.router": "feed_forward.gate",
            "feed_forward.router.e_score_correction_bias": "feed_forward.expert_bias",
        },
        keys={
            "norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings", "num_local_experts": "num_experts",
            "num_dense_layers": "first_k_dense_replace", "tie_word_embeddings": "tie_word_embeddings",
            "num_experts": "num_experts",
        },
        reads={
            "vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 7168, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 128000,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 1e6, "conv_bias": False,
            "conv_L_cache": 3, "layer_types": None, "moe_intermediate_size": 1792, "first_k_dense_replace": 2,
            "num_experts": 32, "num_experts_per_tok": 4, "use_expert_bias": True, "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
        },
        known=("hidden_act", "theta", "use_pos_enc"),
    ),
}  # fmt: skip
