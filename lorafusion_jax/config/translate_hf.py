"""Translates a Hugging Face config.json to the fields of a `ModelConfig`, and collects all problems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .families import Family, family_named, find_family, known_models
from .hf_config import HFConfig, RopeValues, parse_part, shortened
from .quantised import UnknownFormat, format_name

_COUNTS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Scaling of the rotary frequencies for long contexts; see `rope.inverse_frequencies`."""

    kind: Literal["llama3", "linear"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


def translate(raw: dict[str, Any], malformed: list[str], unsupported: list[str]) -> dict[str, Any] | None:
    """Returns the fields of a `ModelConfig`, or None if a problem was added to one of the lists."""
    hf = parse_part(HFConfig, raw, malformed)
    name = None if {"architectures", "model_type"} & _bad_keys(malformed) else _family(hf, unsupported)
    family = Family(architectures=()) if name is None else family_named(name)
    if family.keys:
        malformed.clear()
        hf = parse_part(HFConfig, family.read_keys(raw), malformed)
    missing = [key for key in _COUNTS if getattr(hf, key) is None and key not in _bad_keys(malformed)]
    malformed += [f"{family.keys.get(key, key)} is missing" for key in missing]
    heads, hidden = hf.num_attention_heads or 0, hf.hidden_size or 0
    kv_heads = hf.num_key_value_heads or heads
    head_dim = hf.head_dim or family.head_dim or hidden // max(heads, 1)
    theta, scaling = _rope(hf, malformed, unsupported)
    checkpoint_format = _checkpoint_format(hf, unsupported)
    _refuse_other_options(hf, unsupported)
    if kv_heads and heads % kv_heads:
        malformed.append(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    if head_dim % 2:
        unsupported.append(f"head_dim={head_dim} is odd")
    if not head_dim and not malformed:
        malformed.append(f"hidden_size={hidden} is less than num_attention_heads={heads}")
    if name is None or malformed or unsupported:
        return None
    biased = bool(hf.attention_bias) and family.reads_attention_bias
    layers = hf.num_hidden_layers or 0
    return {
        "family": name,
        "vocab_size": hf.vocab_size or 0,
        "hidden_size": hidden,
        "intermediate_size": hf.intermediate_size or 0,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "norm_eps": 1e-6 if hf.rms_norm_eps is None else hf.rms_norm_eps,
        "qkv_bias": family.qkv_bias or biased,
        "o_bias": biased,
        "mlp_bias": bool(hf.mlp_bias) and family.reads_mlp_bias,
        "qk_norm": family.qk_norm,
        "tie_embeddings": bool(hf.tie_word_embeddings),
        "max_positions": hf.max_position_embeddings or family.positions,
        "sliding_window": _sliding_window(hf, family, layers),
        "checkpoint_format": checkpoint_format,
    }


def _bad_keys(problems: list[str]) -> set[str]:
    """The keys at the start of the problems."""
    return {problem.partition("=")[0] for problem in problems}


def _family(hf: HFConfig, unsupported: list[str]) -> str | None:
    names = hf.architectures or []
    if (family := find_family(names, hf.model_type)) is not None:
        return family
    found = shortened(", ".join(names)).strip("'") if names else f"model_type {shortened(hf.model_type)}"
    unsupported.append(f"unknown architecture {found} (known: {known_models()})")
    return None


def _rope(hf: HFConfig, malformed: list[str], unsupported: list[str]) -> tuple[float, RopeScaling | None]:
    """Reads `rope_parameters`, the newer format, or `rope_theta` + `rope_scaling`."""
    raw = hf.rope_parameters or hf.rope_scaling or {}
    if any(isinstance(value, dict) for value in raw.values()):
        unsupported.append("rope parameters differ between layers")
        return 0.0, None
    rope = parse_part(RopeValues, raw, malformed)
    theta = rope.rope_theta or hf.rope_theta or 10000.0
    kind = rope.rope_type or rope.type or "default"
    if not {hf.partial_rotary_factor, rope.partial_rotary_factor} <= {1.0, None}:
        unsupported.append("partial_rotary_factor is not 1")
    if kind == "default":
        return theta, None
    wanted = {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
    if kind not in wanted:
        unsupported.append(f"rope_type {shortened(kind)} (known: default, linear, llama3)")
        return 0.0, None
    values = [getattr(rope, key) for key in wanted[kind]]
    missing = [key for key, value in zip(wanted[kind], values, strict=True) if value is None]
    if missing:
        malformed.append(f"rope_type {kind!r} lacks {', '.join(missing)}")
        return 0.0, None
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=float(values[0]))
    factor, low, high, original = values
    return theta, RopeScaling(
        kind="llama3",
        factor=float(factor),
        low_freq_factor=float(low),
        high_freq_factor=float(high),
        original_max_positions=original,
    )


def _sliding_window(hf: HFConfig, family: Family, num_layers: int) -> int | None:
    window = hf.sliding_window if "sliding_window" in hf.model_fields_set else family.absent_window
    if family.window == "never" or window is None:
        return None
    if hf.layer_types is not None:
        return window if "sliding_attention" in hf.layer_types else None
    if family.window == "given":
        return window
    first = 28 if hf.max_window_layers is None else hf.max_window_layers
    return window if hf.use_sliding_window and first < num_layers else None


def _checkpoint_format(hf: HFConfig, unsupported: list[str]) -> str | None:
    """How the weights come quantised, see `weights.checkpoint_formats`; None: they do not."""
    if hf.quantization_config is None:
        return None
    try:
        return format_name(hf.quantization_config)
    except UnknownFormat as problem:
        unsupported.append(
            f"quantised weights ({problem}): name the model that they were made of, with base.quantize: fp8, int8 or "
            "nf4"
        )
        return None


def _refuse_other_options(hf: HFConfig, unsupported: list[str]) -> None:
    if hf.hidden_act not in ("silu", "swish", None):
        unsupported.append(f"hidden_act {shortened(hf.hidden_act)} (known: silu)")
    if hf.num_experts or hf.num_local_experts:
        unsupported.append("mixture of experts")
    if hf.is_encoder_decoder:
        unsupported.append("encoder-decoder")
