"""Whole decoders in model directories, for tests and benchmarks. The product reads weights onto stages, and no more."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from lorafusion_jax.adapters.init import init_leaves
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.families.family import Family
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.families.pattern import DENSE, SPARSE
from lorafusion_jax.families.read_rope import CHUNKED, FULL, LINEAR, SLIDING
from lorafusion_jax.families.rope import Rope
from lorafusion_jax.families.short_convolution import ShortConvolution
from lorafusion_jax.families.table import family_named
from lorafusion_jax.layout.layer import PARALLEL
from lorafusion_jax.models.decoder import Decoder
from lorafusion_jax.models.expert_files import Part
from lorafusion_jax.models.loading import open_frozen
from lorafusion_jax.models.naming import frozen_tensors
from lorafusion_jax.tensor_file import write_tensors
from lorafusion_jax.weights.checkpoint_formats import SINGLE

_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu2": "relu2", "xielu": "xielu"}


def save_decoder(model: Decoder, folder: Path) -> Path:
    """Writes the frozen leaves in one file, with the dtype that they have, and a config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    leaves, tensors = dict(nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.LoRAParam)))), {}
    for tensor in frozen_tensors(model):
        x = np.asarray(leaves[tensor.path][...])
        x = x.T if tensor.transposed else x
        tensors |= {part.name: _part(part, x) for part in tensor.parts} or {tensor.name: x}
    write_tensors(folder / SINGLE, tensors)
    kind = jnp.dtype(model.embed_tokens.weight.dtype).name
    text = json.dumps(config_json(model.config) | {"torch_dtype": kind}, indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    return folder


def load_decoder(folder: Path, adapters: Sequence[AdapterSpec] = (), *, dtype: Any = jnp.bfloat16) -> Decoder:
    """Reads a model directory into a decoder with newly drawn adapters."""
    config = ModelConfig.from_hf(folder)
    model = nnx.eval_shape(lambda: Decoder(config, adapters, dtype=dtype, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    leaves = {".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(state)}
    arrays: dict[str, Any] = dict(load_frozen(folder, dtype=dtype))
    arrays |= init_leaves(adapters, {name: leaf.shape for name, (_, leaf) in leaves.items() if name not in arrays})
    filled = [(path, leaf.replace(jnp.asarray(arrays[name]))) for name, (path, leaf) in leaves.items()]
    return nnx.merge(graph, nnx.from_flat_state(filled))


def load_frozen(folder: Path, **options: Any) -> dict[str, Any]:
    """Reads the weights of a model directory by name; options as in `open_frozen`."""
    return open_frozen(folder, **options).read()


def _part(part: Part, kernel_NEK: np.ndarray) -> np.ndarray:
    """The tensor of a part, from [N, E · K]."""
    rows, columns = part.rectangle
    values = kernel_NEK[part.row : part.row + rows, part.column : part.column + columns]
    if part.turned:
        return values.T
    if len(part.shape) <= 2:
        return values.reshape(part.shape)
    order = (1, 0, 2) if part.transposed else (1, 2, 0)
    return values.reshape(rows, part.shape[0], -1).transpose(order)


def config_json(model: ModelConfig) -> dict[str, Any]:
    """Returns a config.json for `ModelConfig.from_hf` and other libraries: the inverse of `families.read`."""
    family = family_named(model.family)
    out = _common(model, family) | _ropes(model, family)
    optional = (
        {
            "attention_bias": model.o_bias if family.fields.get("qkv_bias") else model.qkv_bias,
            "attention_out_bias": model.o_bias,
            "qkv_bias": model.qkv_bias,
            "use_bias": model.qkv_bias,
            "mlp_bias": model.mlp_bias,
            "query_pre_attn_scalar": None if model.attention_scale is None else model.attention_scale**-2,
            "attention_multiplier": model.attention_scale,
            "attn_logit_softcapping": model.attention_soft_cap,
            "final_logit_softcapping": model.final_soft_cap,
            "embedding_multiplier": model.embedding_scale,
            "residual_multiplier": model.residual_scale,
            "logits_scaling": 1 / model.logit_scale,
            "logit_scale": model.logit_scale,
            "scale_attn_weights": model.attention_scale is None,
            "use_parallel_residual": model.norms.startswith("parallel"),
            "use_qk_norm": bool(model.qk_norm),
            "index_topk": model.chosen,
            "output_vocab_size": model.output_vocab or None,
        }
        | _windows(model, family)
        | _full_layers(model)
        | _experts(model)
        | _delta_net(model)
        | _mixer(model)
        | _latent(model)
    )
    out |= {key: value for key, value in optional.items() if key in family.meanings}
    return {family.key_of(key): value for key, value in out.items()} | dict(model.dropouts)


def _common(model: ModelConfig, family: Family) -> dict[str, Any]:
    return {
        "architectures": [family.architectures[0]],
        "model_type": model.family,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.latent.score_dim if family.whole_heads else model.head_dim,
        "hidden_act": _ACTIVATIONS[model.activation],
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "max_position_embeddings": model.max_positions,
    }


def _experts(model: ModelConfig) -> dict[str, Any]:
    experts = model.experts
    if experts is None:
        return {"num_experts": 0, "shared_intermediate_size": model.intermediate_size}
    dense = [number for number, kind in enumerate(model.pattern) if kind.dense]
    return {
        "enable_moe_block": experts.module == PARALLEL,
        "num_experts": experts.count,
        "num_experts_per_tok": experts.active,
        "moe_intermediate_size": experts.inner,
        "norm_topk_prob": experts.router.normalise,
        "swiglu_limit": experts.limit,
        "routed_scaling_factor": experts.router.scale,
        "n_group": experts.router.groups,
        "topk_group": experts.router.top_groups,
        "topk_method": "greedy" if experts.router.groups == 1 else "group_limited_greedy",
        "n_shared_experts": 0 if experts.shared is None else experts.shared.inner // experts.inner,
        "moe_shared_expert_intermediate_size": None if experts.shared is None else experts.shared.inner,
        "shared_expert_intermediate_size": None if experts.shared is None else experts.shared.inner,
        "shared_intermediate_size": 0 if experts.shared is None else experts.shared.inner,
        "use_expert_bias": experts.router.correction,
        "first_k_dense_replace": len(dense),
        "mlp_only_layers": dense,
        "moe_layers": [number for number in range(model.num_layers) if number not in dense],
        "decoder_sparse_step": 1,
        "mlp_layer_types": [DENSE if kind.dense else SPARSE for kind in model.pattern] or [SPARSE] * model.num_layers,
    }


def _delta_net(model: ModelConfig) -> dict[str, Any]:
    net = model.delta_net
    if net is None:
        return {}
    return {
        "linear_num_key_heads": net.key_heads,
        "linear_num_value_heads": net.value_heads,
        "linear_key_head_dim": net.key_dim,
        "linear_value_head_dim": net.value_dim,
        "linear_conv_kernel_dim": net.kernel,
        "linear_allow_neg_eigval": net.doubled,
        "layer_types": [LINEAR if kind.linear else FULL if kind.window is None else SLIDING for kind in model.pattern],
    }


def _mixer(model: ModelConfig) -> dict[str, Any]:
    mixer = model.mixer
    if mixer is None:
        return {}
    linear = [isinstance(layer.attention, type(mixer)) for layer in model.layers]
    turns = any(layer.attention.rope is not None for layer in model.layers)
    types = {
        "layer_types": [LINEAR if kind else FULL for kind in linear],
        "attn_layer_indices": [number for number, kind in enumerate(linear) if not kind],
        "position_embedding_type": "rope" if turns or all(linear) else None,
    }
    if isinstance(mixer, ShortConvolution):
        types["layer_types"] = ["conv" if kind else FULL for kind in linear]
        return types | {"conv_L_cache": mixer.kernel, "conv_bias": mixer.bias, "block_auto_adjust_ff_dim": False}
    if any(kind.only for kind in model.pattern):
        types["layer_types"] = [
            (LINEAR if kind.linear else FULL) if kind.only == "attention" else "mlp" if kind.dense else "moe"
            for kind in model.pattern
        ]
    limits = [mixer.least, {"__float__": "Infinity"} if math.isinf(mixer.most) else mixer.most]
    return types | {
        "mamba_n_heads": mixer.heads,
        "mamba_d_head": mixer.head_dim,
        "mamba_n_groups": mixer.groups,
        "mamba_d_state": mixer.state,
        "mamba_d_conv": mixer.kernel,
        "mamba_expand": max(mixer.queries // mixer.width, 1),
        "mamba_conv_bias": mixer.conv_bias,
        "mamba_proj_bias": mixer.bias,
        "time_step_limit": limits,
        "time_step_min": mixer.least,
        "mamba_hidden_act": mixer.activation,
        "mamba_d_ssm": mixer.queries,
        "mamba_rms_norm": mixer.norm != "none",
        "mamba_norm_before_gate": mixer.norm == "before gate",
        "projectors_bias": mixer.out_bias,
        "ssm_in_multiplier": mixer.in_factor,
        "ssm_out_multiplier": mixer.out_factor,
        "ssm_multipliers": list(mixer.factors) or None,
        "key_multiplier": (model.attention_scale or model.head_dim**-0.5) / model.head_dim**-0.5,
        "attention_in_multiplier": model.attention_factors[0],
        "attention_out_multiplier": model.attention_factors[1],
        "mlp_multipliers": list(model.mlp_factors),
    }


def _latent(model: ModelConfig) -> dict[str, Any]:
    latent = model.latent
    if latent is None:
        return {}
    return {
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.plain_dim,
        "qk_rope_head_dim": latent.rotary_dim,
        "v_head_dim": latent.value_dim,
        "rope_interleave": latent.interleaved,
    }


def _windows(model: ModelConfig, family: Family) -> dict[str, Any]:
    types = [layer.attention.window for layer in model.layers]
    window = next((window for window in types if window is not None), None)
    turns = [layer.attention.rope is not None and layer.attention.rope.share > 0 for layer in model.layers]
    if "attention_chunk_size" in family.meanings:
        unturned = next((rope for rope in model.ropes if not rope.share), None)
        return {
            "attention_chunk_size": model.chunk,
            "layer_types": [FULL if kind.chunk is None else CHUNKED for kind in model.pattern],
            "no_rope_layers": [int(turn) for turn in turns],
            "attn_temperature_tuning": unturned is not None,
            **({} if unturned is None else {"attn_scale": unturned.query_beta, "floor_scale": unturned.query_context}),
        }
    return {
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "max_window_layers": 0 if window else model.num_layers,
        "layer_types": [FULL if window is None else SLIDING for window in types],
        "no_rope_layers": [int(turn) for turn in turns],
    }


def _full_layers(model: ModelConfig) -> dict[str, Any]:
    full = next((kind for kind in model.pattern if kind.head_dim is not None), None)
    if full is None:
        return {}
    return {
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": full.kv_heads,
        "attention_k_eq_v": full.k_is_v,
        "num_kv_shared_layers": sum(kind.sharing == "reads" for kind in model.pattern),
        "use_double_wide_mlp": any(kind.wide for kind in model.pattern),
        "hidden_size_per_layer_input": model.input_width,
        "vocab_size_per_layer_input": model.input_vocab or model.vocab_size,
    }


def _ropes(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Both formats, for old and new readers, where one rope serves all layers; else the newer one."""
    ropes = [rope for rope in model.ropes if rope.share]
    if len(ropes) > 1 or family.scaled_layers == FULL:
        by_type = {FULL if layer.attention.window is None else SLIDING: layer.attention.rope for layer in model.layers}
        return {"rope_parameters": {name: _rope(rope or Rope(), model, family) for name, rope in by_type.items()}}
    if family.rotated == "unless null" and not ropes:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
    rope = _rope(ropes[0] if ropes else Rope(), model, family)
    scaled = rope["rope_type"] != "default" or len(rope) > 2
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"} if scaled else None
    return {"rope_theta": rope["rope_theta"], "rope_scaling": scaling, "rope_parameters": rope}


def _rope(rope: Rope, model: ModelConfig, family: Family) -> dict[str, Any]:
    out: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.theta}
    if rope.share != 1:
        return out | {"rope_type": "proportional", "partial_rotary_factor": rope.share} | _factor(rope)
    if "global_head_dim" in family.meanings:
        pass  # all channels of a head, whose number depends on the layer
    elif rope.channels is not None or family.reads.get("partial_rotary_factor", 1) != 1:
        out["partial_rotary_factor"] = (rope.channels or model.head_dim) / model.head_dim
    if rope.query_beta:
        out["llama_4_scaling_beta"] = rope.query_beta
        out["original_max_position_embeddings"] = rope.query_context
    if rope.scaling is None:
        return out
    values = dataclasses.asdict(rope.scaling)
    names = {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_positions"),
        "yarn": ("factor", "beta_fast", "beta_slow", "truncate", "attention_factor", "original_max_positions"),
        "longrope": ("factor", "short_factors", "long_factors", "attention_factor", "original_max_positions"),
    }
    key_of: dict[str, str] = {
        "original_max_positions": "original_max_position_embeddings",
        "short_factors": "short_factor",
        "long_factors": "long_factor",
    }
    if model.latent is not None and model.latent.mscale:
        out["mscale_all_dim"] = model.latent.mscale
    kind = str(rope.scaling.kind)
    numbers: dict[str, Any] = {str(key_of.get(name, name)): values[name] for name in names[kind]}
    numbers = {name: list(value) if isinstance(value, tuple) else value for name, value in numbers.items()}
    return out | {"rope_type": kind} | numbers


def _factor(rope: Rope) -> dict[str, float]:
    return {} if rope.scaling is None else {"factor": rope.scaling.factor}
