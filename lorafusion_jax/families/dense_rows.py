"""Rows of families whose layers all have attention and an MLP."""

from __future__ import annotations

from typing import Any

from lorafusion_jax.families.family import Family
from lorafusion_jax.layout.layer import (
    ATTENTION,
    ATTN,
)

SWITCHED = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}
# Text parts of models of images: all three positions of a token are equal, so mrope is a plain rope.
MROPE = ("mrope_section", "mrope_interleaved")
_QWEN_2_VL: dict[str, Any] = {
    "windows": "switched", "fields": {"qkv_bias": True}, "known_of_rope": MROPE,
    "reads": {
        "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        "max_position_embeddings": 32768, **SWITCHED, "max_window_layers": 80,
    },
}  # fmt: skip
QWEN_3_VL = {
    "vocab_size": 151936, "head_dim": 128, "rope_theta": 5e5, "max_position_embeddings": 128000,
    "attention_bias": False,
}  # fmt: skip
_UNGATED = {"mlp_gated": False, "mlp_names": ("up_proj", "down_proj")}
_LAYER_NORMS = {"norm_kind": "layer", "norm_bias": True}
_GLM = {
    "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7,
    "max_position_embeddings": 131072, "attention_bias": True, "partial_rotary_factor": 0.5,
}  # fmt: skip

# Keys of published files that transformers does not read either.
_OF_HUNYUAN = (
    "attention_head_dim", "cla_share_factor", "class_num", "dense_list", "eod_token_id", "im_end_id", "im_newline_id",
    "im_start_id", "mask_init_id", "norm_type", "num_experts", "org_vocab_size", "pad_id", "pool_type", "text_end_id",
    "text_start_id", "use_qk_norm",
)  # fmt: skip
_MINISTRAL_3_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_APERTUS_ROPE = {
    "rope_type": "llama3", "rope_theta": 1.2e7, "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
_APERTUS: dict[str, Any] = {
    "fields": _UNGATED | {"qk_norm": True}, "known": ("post_norm", "qk_norm"),
    "modules": {"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"},
}  # fmt: skip
_APERTUS_KEYS = {
    "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "hidden_act": "xielu", "max_position_embeddings": 65536, "rms_norm_eps": 1e-5,
    "attention_bias": False, "rope_theta": 1.2e7, "rope_parameters": _APERTUS_ROPE,
}  # fmt: skip

DENSE: dict[str, Family] = {
    "llama": Family(
        models="Llama 2, 3, 3.1, 3.2, InternLM3 and models of this form",
        beyond="rope: linear, llama3, yarn, longrope; dynamic, up to the last position",
        architectures=("LlamaForCausalLM", "InternLM3ForCausalLM", "IQuestCoderForCausalLM"),
        model_types=("internlm3", "iquestcoder"),
        reads={"attention_bias": False, "mlp_bias": False},
    ),
    "mistral": Family(
        models="Mistral 7B, Nemo, Small",
        beyond="sliding window",
        architectures=("MistralForCausalLM",), windows="all",
        reads={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "qwen2": Family(
        models="Qwen2, Qwen2.5",
        beyond="biases of q, k, v; windows by layer",
        architectures=("Qwen2ForCausalLM",), windows="switched", fields={"qkv_bias": True},
        reads={"num_key_value_heads": 32, "max_position_embeddings": 32768, **SWITCHED},
    ),
    "qwen3": Family(
        models="Qwen3",
        beyond="norms of q and k; windows by layer",
        architectures=("Qwen3ForCausalLM",), windows="switched", fields={"qk_norm": True},
        reads={
            "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768, "attention_bias": False,
            **SWITCHED,
        },
    ),
    "qwen2_vl_text": Family(
        models="Qwen2-VL, its text",
        beyond="as Qwen2; the three positions of a token of text are equal, so mrope is a plain rope",
        architectures=("Qwen2VLTextModel",), **_QWEN_2_VL,
    ),
    "qwen2_5_vl_text": Family(
        models="Qwen2.5-VL, its text", beyond="as Qwen2-VL", architectures=("Qwen2_5_VLTextModel",), **_QWEN_2_VL
    ),
    "qwen3_vl_text": Family(
        models="Qwen3-VL (8B), its text",
        beyond="as Qwen3, with positions as Qwen2-VL",
        architectures=("Qwen3VLTextModel",), fields={"qk_norm": True}, known_of_rope=MROPE,
        reads=QWEN_3_VL | {
            "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 32,
        },
    ),
    "exaone": Family(
        models="EXAONE 3, EXAONE 3.5",
        beyond="as Llama, under other names",
        architectures=("ExaoneForCausalLM",), saved_as=("LlamaForCausalLM",),
        keys={
            "num_layers": "num_hidden_layers", "num_hidden_layers": "num_hidden_layers",
            "layer_norm_epsilon": "rms_norm_eps", "rms_norm_eps": "rms_norm_eps",
            "activation_function": "hidden_act", "hidden_act": "hidden_act",
        },
        reads={
            "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
            "rope_theta": 5e5, "attention_bias": False, "mlp_bias": False,
        },
        modules={
            "model.layers": "transformer.h", "model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f",
            "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "mlp.gate_proj": "mlp.c_fc_0",
            "mlp.up_proj": "mlp.c_fc_1", "mlp.down_proj": "mlp.c_proj", "self_attn.o_proj": "attn.attention.out_proj",
            **{f"self_attn.{name}": f"attn.attention.{name}" for name in ("q_proj", "k_proj", "v_proj")},
        },
    ),
    "exaone4": Family(
        models="EXAONE 4",
        beyond="norms of outputs only, norms of q and k, windows 3 : 1; layers without a window do not rotate",
        architectures=("Exaone4ForCausalLM",), windows=4, rotated="windows, if any",
        fields={"norms": "post", "qk_norm": True},
        reads={
            "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096,
            "sliding_window_pattern": 4, "layer_types": None,
        },
    ),
    "hunyuan_v1_dense": Family(
        models="Hunyuan dense",
        beyond="norms of q and k after they rotate, a base that alpha stretches",
        architectures=("HunYuanDenseV1ForCausalLM",), fields={"qk_norm": True, "turned_norm": True},
        reads={"attention_bias": False, "rms_norm_eps": 1e-5},
        known=_OF_HUNYUAN,
        known_of_rope=("alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        modules={"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"},
    ),
    "ernie4_5": Family(
        models="ERNIE 4.5 dense",
        beyond="rotating pairs are neighbours",
        architectures=("Ernie4_5ForCausalLM",), rope={"interleaved": True},
        reads={
            "vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18,
            "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072, "tie_word_embeddings": True, "rope_theta": 5e5, "use_bias": False,
        },
    ),
    "glm": Family(
        models="GLM-4 chat",
        beyond="gate and up as one projection, partial rotary embeddings of neighbours",
        architectures=("GlmForCausalLM",), rope={"interleaved": True}, fields={"fused": "mlp", "o_bias": False},
        reads=_GLM,
    ),
    "glm4": Family(
        models="GLM-4 dense (0414)",
        beyond="norms before and after, gate and up as one projection, partial rotary embeddings of neighbours",
        architectures=("Glm4ForCausalLM",), rope={"interleaved": True},
        fields={"norms": "sandwich", "fused": "mlp", "o_bias": False},
        reads=_GLM,
        modules={
            "post_attention_layernorm": "post_self_attn_layernorm",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm",
        },
    ),
    "arcee": Family(
        models="Arcee (AFM)",
        beyond="an MLP without a gate",
        architectures=("ArceeForCausalLM",), fields=_UNGATED,
        reads={
            "vocab_size": 32000, "hidden_size": 2560, "intermediate_size": 18432, "num_hidden_layers": 32,
            "num_attention_heads": 32, "hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
            "attention_bias": False, "mlp_bias": False,
        },
    ),
    "apertus": Family(
        models="Apertus",
        beyond="an MLP without a gate, xIELU, norms of q and k",
        architectures=("ApertusForCausalLM",), **_APERTUS, reads=_APERTUS_KEYS,
    ),
    "apertus1p5_text": Family(
        models="Apertus 1.5, its text",
        beyond="as Apertus, with a head of the tokens of text alone",
        architectures=("Apertus1p5TextForCausalLM",), **_APERTUS,
        reads=_APERTUS_KEYS | {"vocab_size": 266752, "output_vocab_size": None},
    ),
    "starcoder2": Family(
        models="StarCoder2",
        beyond="layer norms, an MLP without a gate, biases, windows",
        architectures=("Starcoder2ForCausalLM",), windows="all",
        fields=_LAYER_NORMS | {"mlp_gated": False, "mlp_names": ("c_fc", "c_proj")},
        keys={"norm_epsilon": "rms_norm_eps"},
        reads={
            "vocab_size": 49152, "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30,
            "num_attention_heads": 24, "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "sliding_window": None, "use_bias": True,
            "tie_word_embeddings": True,
        },
        known=(
            "activation_function", "attention_softmax_in_fp32", "layer_norm_epsilon", "mlp_type", "norm_type",
            "scale_attention_softmax_in_fp32", "scale_attn_weights",
        ),
    ),
    "cohere": Family(
        models="Cohere (Command R)",
        beyond=(
            "attention and MLP beside each other, layer norms without biases; norms of heads (Command R+) are "
            "refused"
        ),
        architectures=("CohereForCausalLM",), rope={"interleaved": True},
        fields={"norms": "parallel", "norm_kind": "layer"}, keys={"layer_norm_eps": "rms_norm_eps"},
        reads={
            "vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
            "num_attention_heads": 64, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "logit_scale": 0.0625,
            "attention_bias": False, "tie_word_embeddings": True, "rope_theta": 5e5,
        },
        known=("model_max_length",),
    ),
    "cohere2": Family(
        models="Cohere 2 (Command R7B, A)",
        beyond=(
            "attention and MLP beside each other, layer norms without biases, windows 3 : 1; layers without a "
            "window do not rotate"
        ),
        architectures=("Cohere2ForCausalLM",), windows=4, rotated="windows", rope={"interleaved": True},
        fields={"norms": "parallel", "norm_kind": "layer"}, keys={"layer_norm_eps": "rms_norm_eps"},
        reads={
            "vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
            "num_attention_heads": 64, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "logit_scale": 0.0625,
            "attention_bias": False, "sliding_window": 4096, "sliding_window_pattern": None, "layer_types": None,
            "tie_word_embeddings": True,
        },
        known=(
            "layer_switch", "order_of_interleaved_layers", "position_embedding_type", "rotary_pct",
            "use_embedding_sharing", "use_gated_activation", "use_parallel_block",
        ),
    ),
    "gpt_neox": Family(
        models="GPT-NeoX, Pythia",
        beyond=(
            "layer norms, attention and MLP beside each other, an MLP without a gate; q, k and v of a head after "
            "those of another in one projection"
        ),
        architectures=("GPTNeoXForCausalLM",), parallel="parallel of two",
        fields=_LAYER_NORMS | {
            "fused": True, "fused_name": "query_key_value", "fused_by_head": True, "attention_out": "dense",
            "attention_module": ATTENTION, "mlp_gated": False, "mlp_names": ("dense_h_to_4h", "dense_4h_to_h"),
            "mlp_bias": True,
        },
        modules={
            "model.layers": "gpt_neox.layers", "model.embed_tokens": "gpt_neox.embed_in",
            "model.norm": "gpt_neox.final_layer_norm", "lm_head": "embed_out",
        },
        keys={
            "layer_norm_eps": "rms_norm_eps", "rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta",
            "partial_rotary_factor": "partial_rotary_factor", "rope_theta": "rope_theta",
        },
        reads={
            "vocab_size": 50432, "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 44,
            "num_attention_heads": 64, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "hidden_act": "gelu",
            "use_parallel_residual": True, "attention_bias": True, "partial_rotary_factor": 0.25,
        },
        known=("classifier_dropout", "num_key_value_heads", "head_dim"),
        ignored=(".attention.bias", ".attention.masked_bias"),
    ),
    "gpt2": Family(
        models="GPT-2, DistilGPT-2",
        beyond=(
            "learned positions, layer norms, an MLP without a gate; q, k and v as one projection, kernels that "
            "are [in, out] in files"
        ),
        architectures=("GPT2LMHeadModel",), rotated="none", turned=True, root="transformer.", inner_factor=4,
        fields=_LAYER_NORMS | {
            "learned_positions": True, "qkv_bias": True, "o_bias": True, "mlp_bias": True, "fused": True,
            "fused_name": "c_attn", "attention_out": "attn_c_proj", "attention_module": ATTN, "mlp_gated": False,
            "mlp_names": ("mlp_c_fc", "mlp_c_proj"),
        },
        modules={
            "model.layers": "transformer.h", "model.embed_tokens": "transformer.wte",
            "model.embed_positions": "transformer.wpe", "model.norm": "transformer.ln_f", "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2", "attn.attn_c_proj": "attn.c_proj", "mlp.mlp_c_fc": "mlp.c_fc",
            "mlp.mlp_c_proj": "mlp.c_proj",
        },
        keys={
            "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
            "n_positions": "max_position_embeddings", "n_inner": "intermediate_size",
            "activation_function": "hidden_act", "layer_norm_epsilon": "rms_norm_eps",
        },
        reads={
            "vocab_size": 50257, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
            "max_position_embeddings": 1024, "hidden_act": "gelu_new", "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True, "scale_attn_weights": True,
        },
        known=(
            "_num_labels", "head_dim", "n_ctx", "n_special", "num_key_value_heads", "output_past",
            "predict_special_tokens", "reorder_and_upcast_attn", "rope_parameters", "rope_scaling",
            "rope_theta", "summary_activation", "summary_first_dropout",
            "summary_proj_to_labels", "summary_type", "summary_use_proj",
        ),
        dropouts={"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1},
        ignored=(".attn.bias", ".attn.masked_bias"),
    ),
    "stablelm": Family(
        models="StableLM 2",
        beyond="layer norms, partial rotary embeddings; attention and MLP beside each other in some",
        architectures=("StableLmForCausalLM",), fields=_LAYER_NORMS,
        keys={"layer_norm_eps": "rms_norm_eps", "use_qkv_bias": "qkv_bias"},
        reads={
            "vocab_size": 50304, "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5, "qkv_bias": False, "use_parallel_residual": False, "partial_rotary_factor": 0.25,
        },
        known=("rotary_scaling_factor",),
    ),
    "ministral": Family(
        models="Ministral",
        beyond="windows by layer",
        architectures=("MinistralForCausalLM",), windows="all",
        reads={
            "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096, "layer_types": None,
        },
    ),
    "ministral3": Family(
        models="Ministral 3",
        beyond="yarn, queries scaled by position",
        architectures=("Ministral3ForCausalLM",), windows="all",
        reads={
            "num_key_value_heads": 8,
            "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144, "sliding_window": None,
            "llama_4_scaling_beta": None, "rope_parameters": _MINISTRAL_3_ROPE,
        },
    ),
    "olmo2": Family(
        models="OLMo 2",
        beyond="norms of outputs only, norms over all heads",
        architectures=("Olmo2ForCausalLM",), reads={"attention_bias": False, "rms_norm_eps": 1e-5},
        fields={"norms": "post", "qk_norm": "full"},
    ),
    "olmo3": Family(
        models="OLMo 3",
        beyond="as OLMo 2, with windows 3 : 1",
        architectures=("Olmo3ForCausalLM",), windows=4, scaled_layers="full_attention",
        reads={
            "attention_bias": False, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096,
            "layer_types": None,
        },
        fields={"norms": "post", "qk_norm": "full"},
    ),
    "smollm3": Family(
        models="SmolLM3",
        beyond="no rotary embeddings in every fourth layer",
        architectures=("SmolLM3ForCausalLM",), windows="unrotated",
        reads={
            "num_key_value_heads": 4,
            "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True, "rope_theta": 2e6,
            "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": None, "layer_types": None,
            "no_rope_layers": None, "no_rope_layer_interval": 4,
        },
        known=("max_window_layers",),
    ),
    "granite": Family(
        models="Granite 3",
        beyond="factors of embeddings, residual sums, scores and logits",
        architectures=("GraniteForCausalLM",),
        reads={
            "attention_bias": False, "mlp_bias": False, "embedding_multiplier": 1.0, "attention_multiplier": 1.0,
            "residual_multiplier": 1.0, "logits_scaling": 1.0,
        },
    ),
    "phi3": Family(
        models="Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini",
        beyond="q, k, v as one projection, gate and up as one; partial rotary embeddings, longrope",
        architectures=("Phi3ForCausalLM",), windows="all", fields={"fused": True},
        reads={
            "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 1.0, "sliding_window": None,
        },
        known=("full_attn_mod", "interpolate_factor"),  # of Phi-4-mini; transformers 5.23 reads neither
    ),
    "seed_oss": Family(
        models="Seed-OSS",
        beyond="biases of q, k, v",
        architectures=("SeedOssForCausalLM",),
        reads={
            "num_key_value_heads": 8,
            "head_dim": 128, "attention_bias": True, "attention_out_bias": False, "mlp_bias": False,
            "max_position_embeddings": 524288,
        },
        dropouts={"attention_dropout": 0.1, "residual_dropout": 0.1},
    ),
}  # fmt: skip
