"""The keys of a model's config.json: types and ranges of those that are read, and names of those that do no harm."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

# The limits are far above all existing models. They prevent endless computation on a corrupt file.
Width = Annotated[int, Field(ge=1, le=2**20)]
Entries = Annotated[int, Field(ge=1, le=2**24)]
Depth = Annotated[int, Field(ge=1, le=4096)]
Positions = Annotated[int, Field(ge=1, le=2**31 - 1)]
Share = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]
Positive = Annotated[float, Field(ge=1e-30, le=1e30, allow_inf_nan=False)]
SHOWN = 60  # characters of an invalid value to show in a message


class HFConfig(BaseModel):
    """Values of config.json in the spelling of transformers; None for missing keys."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    architectures: list[str] | None = None
    model_type: str | None = None
    vocab_size: Entries | None = None
    output_vocab_size: Entries | None = None
    hidden_size: Width | None = None
    intermediate_size: Width | None = None
    num_hidden_layers: Depth | None = None
    num_attention_heads: Width | None = None
    num_key_value_heads: Width | None = None
    head_dim: Width | None = None
    rms_norm_eps: Positive | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    attention_out_bias: bool | None = None
    qkv_bias: bool | None = None
    use_bias: bool | None = None
    mlp_bias: bool | None = None
    max_position_embeddings: Positions | None = None
    original_max_position_embeddings: Positions | None = None
    rope_theta: Positive | None = None
    rope_local_base_freq: Positive | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    rotary_dim: Width | None = None
    sliding_window: Positions | None = None
    use_sliding_window: bool | None = None
    max_window_layers: Annotated[int, Field(ge=0)] | None = None
    sliding_window_pattern: Annotated[int, Field(ge=0)] | str | None = None
    layer_types: list[str] | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Annotated[int, Field(ge=1)] | None = None
    attention_chunk_size: Positions | None = None
    attn_temperature_tuning: bool | None = None
    floor_scale: Positions | None = None
    attn_scale: Share | None = None
    hidden_act: str | None = None
    query_pre_attn_scalar: Positive | None = None
    attention_multiplier: Positive | None = None
    attn_logit_softcapping: Positive | None = None
    final_logit_softcapping: Positive | None = None
    embedding_multiplier: Positive | None = None
    residual_multiplier: Positive | None = None
    logits_scaling: Positive | None = None
    logit_scale: Positive | None = None
    use_parallel_residual: bool | None = None
    scale_attn_weights: bool | None = None
    num_experts: Annotated[int, Field(ge=0, le=2**24)] | None = None
    num_experts_per_tok: Annotated[int, Field(ge=0, le=2**20)] | None = None
    moe_intermediate_size: Width | None = None
    norm_topk_prob: bool | None = None
    decoder_sparse_step: Annotated[int, Field(ge=1)] | None = None
    mlp_only_layers: list[int] | None = None
    moe_layers: list[int] | None = None
    q_lora_rank: Width | None = None
    kv_lora_rank: Width | None = None
    qk_nope_head_dim: Width | None = None
    qk_rope_head_dim: Width | None = None
    v_head_dim: Width | None = None
    rope_interleave: bool | None = None
    linear_num_key_heads: Width | None = None
    linear_num_value_heads: Width | None = None
    linear_key_head_dim: Width | None = None
    linear_value_head_dim: Width | None = None
    linear_conv_kernel_dim: Annotated[int, Field(ge=1, le=64)] | None = None
    linear_allow_neg_eigval: bool | None = None
    attn_output_gate: bool | None = None
    full_attention_interval: Annotated[int, Field(ge=1)] | None = None
    use_expert_bias: bool | None = None
    index_topk: Positions | None = None
    first_k_dense_replace: Annotated[int, Field(ge=0)] | None = None
    mlp_layer_types: list[str] | None = None
    n_shared_experts: Annotated[int, Field(ge=0, le=1024)] | None = None
    moe_shared_expert_intermediate_size: Width | None = None
    shared_expert_intermediate_size: Width | None = None
    routed_scaling_factor: Positive | None = None
    n_group: Width | None = None
    topk_group: Width | None = None
    topk_method: str | None = None
    use_qk_norm: bool | None = None
    mamba_n_heads: Width | None = None
    mamba_d_head: int | str | None = None
    mamba_n_groups: Width | None = None
    mamba_d_state: Width | None = None
    mamba_d_conv: Annotated[int, Field(ge=1, le=64)] | None = None
    mamba_expand: Annotated[int, Field(ge=1, le=64)] | None = None
    mamba_conv_bias: bool | None = None
    mamba_proj_bias: bool | None = None
    time_step_limit: list[Any] | None = None
    mamba_d_ssm: Width | None = None
    mamba_rms_norm: bool | None = None
    mamba_norm_before_gate: bool | None = None
    mamba_hidden_act: str | None = None
    projectors_bias: bool | None = None
    key_multiplier: Positive | None = None
    attention_in_multiplier: Positive | None = None
    attention_out_multiplier: Positive | None = None
    ssm_in_multiplier: Positive | None = None
    ssm_out_multiplier: Positive | None = None
    ssm_multipliers: Annotated[list[Positive], Field(min_length=5, max_length=5)] | None = None
    mlp_multipliers: Annotated[list[Positive], Field(min_length=2, max_length=2)] | None = None
    time_step_min: Share | None = None
    hybrid_override_pattern: str | None = None
    attn_layer_indices: list[int] | None = None
    full_attn_idxs: list[int] | None = None
    conv_L_cache: Annotated[int, Field(ge=1, le=64)] | None = None
    conv_bias: bool | None = None
    block_auto_adjust_ff_dim: bool | None = None
    block_ffn_dim_multiplier: Positive | None = None
    block_multiple_of: Width | None = None
    position_embedding_type: str | None = None
    shared_intermediate_size: Annotated[int, Field(ge=0, le=2**20)] | None = None
    global_head_dim: Width | None = None
    num_global_key_value_heads: Width | None = None
    attention_k_eq_v: bool | None = None
    per_layer_config: dict[str, Any] | None = None
    use_bidirectional_attention: str | None = None
    num_kv_shared_layers: Annotated[int, Field(ge=0)] | None = None
    hidden_size_per_layer_input: Annotated[int, Field(ge=0, le=2**20)] | None = None
    vocab_size_per_layer_input: Entries | None = None
    use_double_wide_mlp: bool | None = None
    enable_moe_block: bool | None = None
    swiglu_limit: Positive | None = None
    swiglu_alpha: Positive | None = None
    quantization_config: dict[str, Any] | None = None


class RopeValues(BaseModel):
    """Parameters of rotary embeddings, in both formats."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    rope_theta: Positive | None = None
    rope_type: str | None = None
    type: str | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Positions | None = None
    max_position_embeddings: Positions | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    attention_factor: Positive | None = None
    mscale: Share | None = None
    mscale_all_dim: Share | None = None
    alpha: Positive | None = None
    truncate: bool | None = None
    short_factor: list[float] | None = None
    long_factor: list[float] | None = None
    llama_4_scaling_beta: Annotated[float, Field(ge=0, le=1e30)] | None = None


MEANT = frozenset({*HFConfig.model_fields, *RopeValues.model_fields})  # keys that mean something in some family
# Keys that every family reads.
COMMON = (
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings",
    "max_position_embeddings", "rope_theta", "rope_parameters", "rope_scaling", "hidden_act", "quantization_config",
)  # fmt: skip
# Keys that do not change what a decoder computes from tokens: names, tokens, generation, outputs, initial weights.
HARMLESS = frozenset((
    "_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype", "auto_map", "use_cache",
    "cache_implementation", "initializer_range", "_attn_implementation", "attn_implementation",
    "_attn_implementation_autoset", "_flash_attn_2_enabled", "unsloth_fixed", "unsloth_version",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id",
    "forced_bos_token_id", "forced_eos_token_id", "tokenizer_class", "prefix", "task_specific_params", "id2label",
    "label2id", "num_labels", "problem_type", "finetuning_task", "output_attentions", "output_hidden_states",
    "output_scores", "return_dict", "return_dict_in_generate", "torchscript", "use_bfloat16", "max_length",
    "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature",
    "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "ckpt_size", "model_max_length",
    "pretraining_tp", "is_llama_config",
))  # fmt: skip
# Keys that change nothing at these values, and are refused at others.
OFF = (None, False, 0, 0.0, "none", [], {})
DROPOUTS = (
    "attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "residual_dropout", "hidden_dropout",
    "embedding_dropout", "embed_dropout", "output_dropout",
)  # fmt: skip
SWITCHES = frozenset((
    *DROPOUTS,
    "chunk_size_feed_forward", "add_cross_attention", "is_decoder", "is_encoder_decoder", "cross_attention_hidden_size",
    "tie_encoder_decoder", "pruned_heads", "sparsity_config", "use_bidirectional_attention", "num_experts",
    "num_local_experts", "per_layer_config", "output_router_logits", "router_jitter_noise",
    "attention_bias", "mlp_bias", "rope_interleaved", "qkv_bias", "bias", "norm_topk_prob", "use_cla",
    "add_classification_head", "use_qk_norm", "qk_layernorm", "use_parallel_embedding", 
    "shared_intermediate_size", "scale_attn_by_inverse_layer_idx", "norm_head", "norm_softmax",
    "using_split_qkv_in_self_attention", "use_sliding_window", "lm_head_bias", "use_bias",
))  # fmt: skip


def unread_keys(raw: Mapping[str, Any], read: Collection[str], known: Collection[str]) -> list[str]:
    """Lists keys, with their values, that nobody reads and that may change what the model computes.

    Args:
        read: keys that the family reads, in its own spelling.
        known: keys that the family lists as harmless.

    >>> unread_keys({"vocab_size": 8, "use_cache": True, "attention_dropout": 0.0, "rope_twist": 2}, {"vocab_size"}, ())
    ['rope_twist=2']
    """
    unread = {key: value for key, value in raw.items() if key not in read and key not in known and key not in HARMLESS}
    return [
        f"{shortened(key)[1:-1]}={shortened(value)}"
        for key, value in unread.items()
        if not (value is None or (key in SWITCHES and value in OFF))
    ]


def parse_part[M: BaseModel](model: type[M], values: Mapping[str, Any], problems: list[str]) -> M:
    """Validates values. Errors are added to `problems`, and their keys count as missing."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        wrong = {str(detail["loc"][0]) for detail in error.errors()}
        problems += list(dict.fromkeys(_problem(detail, values) for detail in error.errors()))
    return model.model_validate({key: value for key, value in values.items() if key not in wrong})


def _problem(detail, values: Mapping[str, Any]) -> str:
    key = str(detail["loc"][0])
    value = values[key]
    condition = {
        "int_type": "a positive integer",
        "float_type": "a number",
        "finite_number": "a finite number",
        "bool_type": "true or false",
        "string_type": "a text" if len(detail["loc"]) == 1 else "a list of texts",
        "list_type": "a list of texts",
        "dict_type": "an object",
    }.get(detail["type"])
    if detail["type"] == "greater_than_equal" and isinstance(value, int):
        condition = "a positive integer"
    limits = detail.get("ctx", {})
    words = {"ge": "{} or more", "gt": "more than {}", "le": "{} or less"}
    condition = condition or next(text.format(limits[name]) for name, text in words.items() if name in limits)
    return f"{key}={shortened(value)} is not {condition}"


def one_of_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object of JSON. A key that is there twice with different values is refused: readers take either."""
    values = dict(pairs)
    for key, value in pairs if len(values) < len(pairs) else ():
        if value != values[key]:
            raise ValueError(f"the key {shortened(key)} is there twice, with different values")
    return values


def shortened(value: object) -> str:
    """An invalid value for a message; values that cannot be shown are replaced by their type."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # integers of thousands of digits, endlessly nested lists
        return f"<{type(value).__name__}>"
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"
