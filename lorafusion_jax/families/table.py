"""Families of decoders: names in model files, keys of config.json, and fields over the mechanisms of a layer.

To add one, add a row to `FAMILIES`. Other packages can install an entry point of the group `lorafusion_jax.families`
that loads a `Family`; its name is the `model_type` of config.json.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lorafusion_jax.errors import did_you_mean
from lorafusion_jax.families.experts import Router
from lorafusion_jax.families.hf_config import COMMON, MEANT
from lorafusion_jax.families.norm import Place
from lorafusion_jax.layout.layer import (
    BLOCK,
    GLOBAL_ATTENTION,
    PARALLEL,
    PER_LAYER,
    PER_LAYER_NAMES,
    SHARED_MLP,
    WIDE_MLP,
)
from lorafusion_jax.plugins import find, known_names

GROUP = "lorafusion_jax.families"
_LAYERS = "model.layers"
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Names and arithmetic of a family's models. Defaults are those of Llama.

    A key of config.json that is neither read nor known is an error, so a model is never computed as another one.

    Args:
        architectures: names in config.json; the first one is written.
        model_types: further names in `model_type` of config.json.
        reads: keys of config.json that this family reads beyond those of every model (`hf_config.COMMON`), in the
            spelling of transformers, each with its value where config.json does not have it (None: none).
        keys: a key of this family's config.json → transformers' spelling, e.g. {"n_embd": "hidden_size"}. These keys
            are read.
        known: keys of config.json that do not change the computation.
        dropouts: keys of dropout inside the base whose value is not 0 where config.json does not have them. It is
            not applied, as what other keys of `hf_config.DROPOUTS` say, and a note says so.
        meant: values that stand for others in this family, by key.
        fields: fields of `ModelConfig` that all models of the family have in common, e.g. {"norms": "sandwich"}. An
            embedding_scale of "sqrt" is the root of the model's width.
        windows: layers with `sliding_window` if config.json has no `layer_types`: none, all, those from
            `max_window_layers` on, every second one before it, or those without rotary embeddings if
            `use_sliding_window`, or all but each n-th.
        scaled_layers: layers whose rotary embeddings `rope_scaling` scales.
        experts: fields of `Experts` that all models of the family have in common; None: it has no experts. The keys
            `num_experts`, `num_experts_per_tok`, `moe_intermediate_size`, `norm_topk_prob` and those of `read_experts`
            say the others; `first_k_dense_replace`, `mlp_only_layers` and `decoder_sparse_step`, which layers have an
            MLP instead.
        expert_names: tensors of the experts in a checkpoint, "{}" for the number of the layer's expert: of gate and of
            up [F, D] and of down [D, F]; or two tensors of all experts, [E, in, out].
        experts_transposed: these two are [E, out, in]. Where only the other order fits a file, it has that.
        delta_net: fields of `DeltaNet` that all models of the family have in common; None: it has no such layers. The
            keys `linear_…` say the others, and `layer_types` or `full_attention_interval` which layers have it.
        mixer: what layers of linear attention have in place of attention, if it is no delta net; the keys `mamba_…` and
            `conv_…` say its sizes.
        latent: attention has latents; the keys `q_lora_rank`, `kv_lora_rank`, `qk_…` and `v_head_dim` say their widths.
        whole_heads: with latents, `head_dim` counts all channels of q and k, not only the rotating ones.
        rotated: layers with rotary embeddings: all, or those with a window ("if any": all of a model without windows).
        parallel: position of the norms where `use_parallel_residual` is true.
        rope: further fields of `Rope` that all layers of the family have in common, e.g. {"interleaved": True}.
        known_of_rope: keys of `rope_parameters` that do not change what is computed of text.
        ignored: beginnings of the names of a checkpoint's tensors that are left out.
        modules: Llama's module, or a tensor of it → the family's, e.g. {"model.embed_tokens": "tokens",
            "model.layers": "blocks", "self_attn.q_proj": "attention.query"}. Adapters are saved under Llama's names.
    """

    architectures: tuple[str, ...]
    model_types: tuple[str, ...] = ()
    reads: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    known: tuple[str, ...] = ()
    dropouts: Mapping[str, float] = field(default_factory=dict)
    meant: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    windows: Literal["never", "all", "switched", "first", "unrotated"] | int = "never"
    scaled_layers: Literal["all", "full_attention"] = "all"
    experts: Mapping[str, Any] | None = None
    expert_names: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj")
    experts_transposed: bool = False
    delta_net: Mapping[str, Any] | None = None
    mixer: Literal["mamba", "convolution"] | None = None
    latent: bool = False
    whole_heads: bool = False
    rope: Mapping[str, Any] = field(default_factory=dict)
    rotated: Literal["all", "windows", "windows, if any"] = "all"
    parallel: Place = "parallel"
    known_of_rope: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if unknown := sorted({*self.reads, *self.keys.values()} - self.keys.keys() - MEANT):
            near = did_you_mean(unknown[0], MEANT)
            raise ValueError(f"reads and keys have {unknown[0]!r}, which means nothing here. {near or 'See `known`.'}")

    @property
    def renamed_experts(self) -> bool:
        """Whether a checkpoint has the experts in another module than transformers, whose names PEFT writes."""
        module = (self.experts or {}).get("module", "mlp")
        return self.expert_names[0].startswith(f"{BLOCK}.") and module != BLOCK

    @property
    def read_keys(self) -> set[str]:
        """The keys of config.json that are read, in this family's spelling."""
        return {*COMMON, *self.reads, *self.keys} - ({*self.keys.values(), *self.known} - self.keys.keys())

    @property
    def meanings(self) -> set[str]:
        """The keys of config.json that are read, in transformers' spelling."""
        return {self.keys.get(key, key) for key in self.read_keys}

    def canonical(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what a config.json of this family says, and the values of missing keys, in transformers' spelling."""
        present = [key for key in raw if key in self.read_keys]
        present.sort(key=lambda key: raw[key] is not None)  # of two spellings, a null says nothing
        values = {self.keys.get(key, key): raw[key] for key in present}
        if not values.get("rope_parameters"):  # as missing; the older spelling counts before the family's default
            values |= {"rope_parameters": None if values.get("rope_scaling") else self.reads.get("rope_parameters")}
        values = dict(self.reads) | values
        if values.get("use_sliding_window") is False and values.get("sliding_window") == 0:
            values["sliding_window"] = None  # transformers writes 0 where windows are off
        for key, others in self.meant.items():
            if isinstance(value := values.get(key), str):
                values[key] = others.get(value, value)
        return values

    def key_of(self, key: str) -> str:
        """The family's spelling of a key of transformers."""
        return next((family_key for family_key, common_key in self.keys.items() if common_key == key), key)

    def tensor_name(self, llama: str) -> str:
        """Checkpoint name of a tensor given by Llama's name, e.g. "model.layers.3.self_attn.q_proj.weight"."""
        path, _, leaf = llama.rpartition(".")
        inside = _IN_LAYER.fullmatch(path)
        if inside is None:
            return f"{self.modules.get(path, path)}.{leaf}"
        number, module = inside.groups()
        inside = self.modules.get(f"{module}.{leaf}", f"{self.modules.get(module, module)}.{leaf}")
        return f"{self.modules.get(_LAYERS, _LAYERS)}.{number}.{inside}"


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
# Qwen3-Next and later: a gated delta net in three of four layers. The tensors of "mtp" predict further tokens.
_DELTA = {
    "head_dim": 256, "max_position_embeddings": 32768, "attention_bias": False, "partial_rotary_factor": 0.25,
    "layer_types": None, "full_attention_interval": 4, "attn_output_gate": True, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
_DELTA_FIELDS = {"qk_norm": True, "norm_offset": 1.0, "attention_gate": True}
_MTP = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype", "mlp_only_layers")
_DELTA_NAMES = {"known_of_rope": ("mrope_section", "mrope_interleaved"), "ignored": ("mtp.",)}
_SWITCHED = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}

# Experts as in DeepSeek-V3: groups, an offset that helps to choose, an MLP beside.
_SIGMOID = Router(score="sigmoid", correction=True)
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

# Text parts of models of images: all three positions of a token are equal, so mrope is a plain rope.
_MROPE = ("mrope_section", "mrope_interleaved")
_QWEN_2_VL: dict[str, Any] = {
    "windows": "switched", "fields": {"qkv_bias": True}, "known_of_rope": _MROPE,
    "reads": {
        "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        "max_position_embeddings": 32768, **_SWITCHED, "max_window_layers": 80,
    },
}  # fmt: skip
_QWEN_3_VL = {
    "vocab_size": 151936, "head_dim": 128, "rope_theta": 5e5, "max_position_embeddings": 128000,
    "attention_bias": False,
}  # fmt: skip
_QWEN_3_VL_MOE = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
    "decoder_sparse_step": 1, "mlp_only_layers": None, "tie_word_embeddings": True,
}  # fmt: skip
_GRANITE_MOE = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "attention_bias": False, "embedding_multiplier": 1.0, "attention_multiplier": 1.0,
    "residual_multiplier": 1.0, "logits_scaling": 1.0, "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
_GRANITE_EXPERTS: dict[str, Any] = {
    "experts": {"router": Router(score="softmax_of_chosen"), "module": BLOCK},
    "keys": {"num_local_experts": "num_experts"}, "experts_transposed": True,
    "expert_names": (f"{BLOCK}.input_linear.weight", f"{BLOCK}.output_linear.weight"),
    "modules": {
        f"{BLOCK}.router": f"{BLOCK}.router.layer",
        f"{BLOCK}.{SHARED_MLP}.input_linear": f"{SHARED_MLP}.input_linear",
        f"{BLOCK}.{SHARED_MLP}.output_linear": f"{SHARED_MLP}.output_linear",
    },
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False, "time_step_limit": None,
}  # fmt: skip
_UNGATED = {"mlp_gated": False, "mlp_names": ("up_proj", "down_proj")}
_LAYER_NORMS = {"norm_kind": "layer", "norm_bias": True}

# Keys of published files that transformers does not read either.
_OF_HUNYUAN = (
    "attention_head_dim", "cla_share_factor", "class_num", "dense_list", "eod_token_id", "im_end_id", "im_newline_id",
    "im_start_id", "mask_init_id", "norm_type", "num_experts", "org_vocab_size", "pad_id", "pool_type", "text_end_id",
    "text_start_id", "use_qk_norm",
)  # fmt: skip
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
_MINISTRAL_3_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_APERTUS_ROPE = {
    "rope_type": "llama3", "rope_theta": 1.2e7, "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
_MISTRAL_4_ROPE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "llama": Family(
        architectures=("LlamaForCausalLM", "InternLM3ForCausalLM", "IQuestCoderForCausalLM"),
        model_types=("internlm3", "iquestcoder"),
        reads={"attention_bias": False, "mlp_bias": False},
    ),
    "mistral": Family(
        architectures=("MistralForCausalLM",), windows="all",
        reads={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "qwen2": Family(
        architectures=("Qwen2ForCausalLM",), windows="switched", fields={"qkv_bias": True},
        reads={"num_key_value_heads": 32, "max_position_embeddings": 32768, **_SWITCHED},
    ),
    "qwen3": Family(
        architectures=("Qwen3ForCausalLM",), windows="switched", fields={"qk_norm": True},
        reads={
            "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768, "attention_bias": False,
            **_SWITCHED,
        },
    ),
    "qwen3_5_text": Family(
        architectures=("Qwen3_5ForCausalLM",), fields=_DELTA_FIELDS, delta_net={}, **_DELTA_NAMES,
        reads=_DELTA | {
            "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
            "num_attention_heads": 16, "num_key_value_heads": 4,
        },
        known=_MTP,
    ),
    "qwen3_next": Family(
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
    "qwen3_moe": Family(
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
        architectures=("Qwen2MoeForCausalLM",), windows="first",
        experts={"shared_gate": True},
        reads={
            "num_key_value_heads": 16,
            "max_position_embeddings": 32768, **_SWITCHED, "num_experts": 60, "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "norm_topk_prob": False,
            "decoder_sparse_step": 1, "mlp_only_layers": None, "qkv_bias": True,
        },
        
        known=("num_local_experts", "router_aux_loss_coef"), modules={"mlp.router": "mlp.gate"},
    ),
    "glm4_moe": Family(
        architectures=("Glm4MoeForCausalLM",), fields={"o_bias": False}, experts={"router": _SIGMOID},
        reads=_GROUPS | {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "attention_bias": False, "use_qk_norm": False,
            "partial_rotary_factor": 0.5, "num_experts": 128, "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
        },
        keys=_GROUP_KEYS, known=PREDICTORS, modules={"mlp.router": "mlp.gate"},
    ),
    "deepseek_v3": Family(
        architectures=("DeepseekV3ForCausalLM",), model_types=("kimi_k2",), latent=True, experts={"router": _SIGMOID},
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
    "glm4_moe_lite": Family(
        architectures=("Glm4MoeLiteForCausalLM",), latent=True, experts={"router": _SIGMOID},
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
    "qwen2_vl_text": Family(architectures=("Qwen2VLTextModel",), **_QWEN_2_VL),
    "qwen2_5_vl_text": Family(architectures=("Qwen2_5_VLTextModel",), **_QWEN_2_VL),
    "qwen3_vl_text": Family(
        architectures=("Qwen3VLTextModel",), fields={"qk_norm": True}, known_of_rope=_MROPE,
        reads=_QWEN_3_VL | {
            "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 32,
        },
    ),
    "qwen3_vl_moe_text": Family(
        architectures=("Qwen3VLMoeTextModel",), fields={"qk_norm": True}, known_of_rope=_MROPE, experts={},
        reads=_QWEN_3_VL | _QWEN_3_VL_MOE,
        keys={"num_local_experts": "num_experts", "num_experts": "num_experts"}, modules={"mlp.router": "mlp.gate"},
        known=("router_aux_loss_coef", "norm_topk_prob"), experts_transposed=True,
        expert_names=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ),
    "exaone4": Family(
        architectures=("Exaone4ForCausalLM",), windows=4, rotated="windows, if any",
        fields={"norms": "post", "qk_norm": True},
        reads={
            "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096,
            "sliding_window_pattern": 4, "layer_types": None,
        },
    ),
    "hunyuan_v1_dense": Family(
        architectures=("HunYuanDenseV1ForCausalLM",), fields={"qk_norm": True, "turned_norm": True},
        reads={"attention_bias": False, "rms_norm_eps": 1e-5},
        known=_OF_HUNYUAN,
        known_of_rope=("alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        modules={"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"},
    ),
    "ernie4_5": Family(
        architectures=("Ernie4_5ForCausalLM",), rope={"interleaved": True},
        reads={
            "vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18,
            "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072, "tie_word_embeddings": True, "rope_theta": 5e5, "use_bias": False,
        },
    ),
    "glm4": Family(
        architectures=("Glm4ForCausalLM",), rope={"interleaved": True},
        fields={"norms": "sandwich", "fused": "mlp", "o_bias": False},
        reads={
            "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40,
            "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7,
            "max_position_embeddings": 131072, "attention_bias": True, "partial_rotary_factor": 0.5,
        },
        modules={
            "post_attention_layernorm": "post_self_attn_layernorm",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm",
        },
    ),
    "olmoe": Family(
        architectures=("OlmoeForCausalLM",), fields={"qk_norm": "full"}, experts={}, modules={"mlp.router": "mlp.gate"},
        reads={
            "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16,
            "num_attention_heads": 16, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "attention_bias": False,
            "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False,
        },
        keys={"num_local_experts": "num_experts", "num_experts": "num_experts"}, known=("router_aux_loss_coef",),
    ),
    "dots1": Family(
        architectures=("Dots1ForCausalLM",), windows="switched", fields={"qk_norm": True},
        experts={"router": _SIGMOID}, modules={"mlp.router": "mlp.gate"}, keys=_GROUP_KEYS, known=_OF_DOTS,
        reads=_GROUPS | {
            "vocab_size": 152064, "hidden_size": 4608, "intermediate_size": 10944, "num_hidden_layers": 62,
            "num_attention_heads": 32, "num_key_value_heads": 32, "attention_bias": False, "sliding_window": 4096,
            "max_window_layers": 62, "layer_types": None, "num_experts": None, "num_experts_per_tok": None,
            "n_shared_experts": None, "moe_intermediate_size": 1408, "first_k_dense_replace": 0,
            "norm_topk_prob": False,
        },
    ),
    "deepseek_v2": Family(
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
    "mistral4": Family(
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
        architectures=("MiniMaxM2ForCausalLM",), fields={"qk_norm": "full"},
        experts={"router": _SIGMOID},
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
    "arcee": Family(
        architectures=("ArceeForCausalLM",), fields=_UNGATED,
        reads={
            "vocab_size": 32000, "hidden_size": 2560, "intermediate_size": 18432, "num_hidden_layers": 32,
            "num_attention_heads": 32, "hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
            "attention_bias": False, "mlp_bias": False,
        },
    ),
    "apertus": Family(
        architectures=("ApertusForCausalLM",), fields=_UNGATED | {"qk_norm": True},
        reads={
            "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "hidden_act": "xielu", "max_position_embeddings": 65536, "rms_norm_eps": 1e-5,
            "attention_bias": False, "rope_theta": 1.2e7, "rope_parameters": _APERTUS_ROPE,
        },
        known=("post_norm", "qk_norm"),
        modules={
            "input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm",
        },
    ),
    "starcoder2": Family(
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
    "cohere2": Family(
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
    "stablelm": Family(
        architectures=("StableLmForCausalLM",), fields=_LAYER_NORMS,
        keys={"layer_norm_eps": "rms_norm_eps", "use_qkv_bias": "qkv_bias"},
        reads={
            "vocab_size": 50304, "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5, "qkv_bias": False, "use_parallel_residual": False, "partial_rotary_factor": 0.25,
        },
        known=("rotary_scaling_factor",),
    ),
    "granitemoe": Family(
        architectures=("GraniteMoeForCausalLM",), reads=_GRANITE_MOE, **_GRANITE_EXPERTS,
        known=("router_aux_loss_coef",),
    ),
    "granitemoeshared": Family(
        architectures=("GraniteMoeSharedForCausalLM",), reads=_GRANITE_MOE | {"shared_intermediate_size": 0},
        **_GRANITE_EXPERTS, known=("router_aux_loss_coef",),
    ),
    "granitemoehybrid": Family(
        architectures=("GraniteMoeHybridForCausalLM",), mixer="mamba", **_GRANITE_EXPERTS,
        fields={"fused": "mlp", "mlp_module": SHARED_MLP, "mlp_names": ("input_linear", "output_linear")},
        reads=_GRANITE_MOE | _MAMBA | {
            "shared_intermediate_size": 1024, "position_embedding_type": None, "layer_types": None,
        },
        known=("router_aux_loss_coef", "mamba_chunk_size", "normalization_function", "init_method"),
    ),
    "bamba": Family(
        architectures=("BambaForCausalLM",), mixer="mamba", fields={"mlp_module": "feed_forward"},
        reads=_MAMBA | {
            "vocab_size": 128000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 262144, "attention_bias": False, "mlp_bias": False,
            "partial_rotary_factor": 0.5, "attn_layer_indices": None,
        },
        known=("mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient", "attn_rotary_emb", "layers_block_type"),
        modules={"post_attention_layernorm": "pre_ff_layernorm", "model.norm": "model.final_layernorm"},
    ),
    "lfm2": Family(
        architectures=("Lfm2ForCausalLM",), mixer="convolution",
        fields={
            "qk_norm": True, "attention_out": "out_proj", "mlp_module": "feed_forward", "mlp_names": ("w1", "w3", "w2"),
        },
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
        modules={
            "input_layernorm": "operator_norm", "post_attention_layernorm": "ffn_norm",
            "self_attn.q_norm": "self_attn.q_layernorm", "self_attn.k_norm": "self_attn.k_layernorm",
            "model.norm": "model.embedding_norm",
        },
    ),
    "ministral": Family(
        architectures=("MinistralForCausalLM",), windows="all",
        reads={
            "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096, "layer_types": None,
        },
    ),
    "ministral3": Family(
        architectures=("Ministral3ForCausalLM",), windows="all",
        reads={
            "num_key_value_heads": 8,
            "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144, "sliding_window": None,
            "llama_4_scaling_beta": None, "rope_parameters": _MINISTRAL_3_ROPE,
        },
    ),
    "gemma": Family(
        architectures=("GemmaForCausalLM",), reads=_GEMMA | {"num_key_value_heads": 16}, known=("hidden_activation",),
        meant={"hidden_act": {"gelu": "gelu_pytorch_tanh"}},  # as transformers reads the first published files
        fields={"norm_offset": 1.0, "embedding_scale": "sqrt"},
    ),
    "gemma2": Family(
        architectures=("Gemma2ForCausalLM",), windows=2, fields=_SANDWICH, **_GEMMA_ACTIVATION,
        reads=_GEMMA_2 | {"num_key_value_heads": 4, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    ),
    "gemma3_text": Family(
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
        architectures=("Gemma4UnifiedForCausalLM",), **_GEMMA_4, known=(*_GEMMA_4_KNOWN, "use_double_wide_mlp"),
        reads=_GEMMA_4_KEYS | {"sliding_window": 1024, "max_position_embeddings": 262144},
    ),
    "olmo2": Family(
        architectures=("Olmo2ForCausalLM",), reads={"attention_bias": False, "rms_norm_eps": 1e-5},
        fields={"norms": "post", "qk_norm": "full"},
    ),
    "olmo3": Family(
        architectures=("Olmo3ForCausalLM",), windows=4, scaled_layers="full_attention",
        reads={
            "attention_bias": False, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096,
            "layer_types": None,
        },
        fields={"norms": "post", "qk_norm": "full"},
    ),
    "smollm3": Family(
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
        architectures=("GraniteForCausalLM",),
        reads={
            "attention_bias": False, "mlp_bias": False, "embedding_multiplier": 1.0, "attention_multiplier": 1.0,
            "residual_multiplier": 1.0, "logits_scaling": 1.0,
        },
    ),
    "phi3": Family(
        architectures=("Phi3ForCausalLM",), windows="all", fields={"fused": True},
        reads={
            "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 1.0, "sliding_window": None,
        },
    ),
    "seed_oss": Family(
        architectures=("SeedOssForCausalLM",),
        reads={
            "num_key_value_heads": 8,
            "head_dim": 128, "attention_bias": True, "attention_out_bias": False, "mlp_bias": False,
            "max_position_embeddings": 524288,
        },
        dropouts={"attention_dropout": 0.1, "residual_dropout": 0.1},
    ),
}  # fmt: skip


def family_named(name: str) -> Family:
    """Finds the family of a `model_type`.

    Raises:
        ConfigError: `plugin.unknown`, `plugin.broken`.
    """
    return find(GROUP, FAMILIES, name, Family)


def find_families(architectures: Sequence[str], model_type: str | None) -> set[str | None]:
    """Finds the families of a config.json: none if it is unknown, several if its keys contradict each other.

    transformers loads by `model_type`. One that no family has (None in the result) contradicts known architectures.

    Raises:
        ConfigError: `plugin.broken`, an installed family does not load.
    """
    by_name = {
        name: {family for family, row in FAMILIES.items() if name in row.architectures} for name in architectures
    }
    matches = {name: families for name, families in by_name.items() if families}
    typed = next((name for name, row in FAMILIES.items() if model_type in row.model_types), model_type)
    if typed is None or typed not in known_names(GROUP, FAMILIES):
        others: set[str | None] = {None} if typed is not None and matches else set()
        return others.union(*matches.values())
    of_type = family_named(typed).architectures
    if architectures and not matches and not {*architectures} & {*of_type}:
        return set()
    families: set[str | None] = {typed}
    return families.union(*(others for name, others in matches.items() if name not in of_type))


def known_models() -> str:
    """Names of the supported models, for messages."""
    installed = [name for name in known_names(GROUP, FAMILIES) if name not in FAMILIES]
    return ", ".join([*(name for row in FAMILIES.values() for name in row.architectures), *installed])
