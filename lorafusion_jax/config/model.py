"""Configuration of a decoder: one dataclass for all families, read from a Hugging Face config.json.

It is in this package because planning needs shapes without jax.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import CheckpointError
from ..layout.layer import LAYER
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and hyperparameters of a decoder-only transformer.

    Example:
        >>> config = ModelConfig.from_hf({
        ...     "architectures": ["Qwen2ForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
        ...     "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2})
        >>> config.family, config.head_dim, config.qkv_bias
        ('qwen2', 8, True)
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    max_positions: int = 2048
    sliding_window: int | None = None
    checkpoint_format: str | None = None

    @classmethod
    def from_hf(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> ModelConfig:
        """Reads a model directory, a config.json or its content.

        Raises:
            CheckpointError: `model.not-found`; `model.bad-config`, values have wrong types or ranges;
                `model.unsupported`, the architecture or options are not supported (all in one message).
            ConfigError: `plugin.broken`, the installed family of this model does not load.
        """
        raw, where = (dict(source), "config") if isinstance(source, Mapping) else _read(Path(source))
        malformed: list[str] = []
        unsupported: list[str] = []
        config = _translate(raw, malformed, unsupported)
        if config is not None and not malformed and not unsupported:
            return config
        if malformed and not unsupported:
            raise CheckpointError(
                "model.bad-config",
                "config.json cannot be used: " + _sentence(malformed),
                where=where,
                fix="download the file again",
            )
        raise CheckpointError(
            "model.unsupported",
            "this model is not supported: " + _sentence([*unsupported, *malformed]),
            where=where,
            why=f"supported families: {known_models()}",
            fix="choose a base model of these families, or a copy of it that is not quantised",
        )

    def to_hf(self) -> dict[str, Any]:
        """Returns a config.json for `from_hf` and other libraries."""
        family = family_named(self.family)
        rope = {"rope_type": "default", "rope_theta": self.rope_theta}
        if (scaling := self.rope_scaling) is not None:
            rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling is not None and scaling.kind == "llama3":
            rope |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_positions,
            }
        out = {
            "architectures": [family.architectures[0]],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "max_position_embeddings": self.max_positions,
            # Both formats, for old and new readers.
            "rope_theta": self.rope_theta,
            "rope_scaling": None if scaling is None else {k: v for k, v in rope.items() if k != "rope_theta"},
            "rope_parameters": rope,
            "sliding_window": self.sliding_window,
        }
        if family.window == "switched":
            out |= {
                "use_sliding_window": self.sliding_window is not None,
                "max_window_layers": 0 if self.sliding_window else self.num_layers,
            }
        if not family.qkv_bias:
            out |= {"attention_bias": self.o_bias, "mlp_bias": self.mlp_bias}
        return family.write_keys(out)

    @property
    def num_parameters(self) -> int:
        """Parameters of the base model; a tied head counts once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return embeddings + self.num_layers * LAYER.num_parameters(self) + self.hidden_size

    def check_length(self, longest: int, *, where: str = "", sample: str = "the longest sample") -> None:
        """Checks that samples are within the model's sliding window and positions.

        Args:
            longest: tokens of the longest sample.
            where: folder of the model, for the message.
            sample: name of the sample in the message.

        Raises:
            CheckpointError: `model.sliding-window`, `model.positions`.
        """
        if self.sliding_window is not None and longest > self.sliding_window:
            raise CheckpointError(
                "model.sliding-window",
                f"{sample} has {longest} tokens, but this model attends to the last {self.sliding_window} only.",
                where=where,
                why="sliding-window attention is not implemented; within the window it is the same as full attention",
                fix=f"data.max_length: {self.sliding_window}",
            )
        if longest > self.positions:
            raise CheckpointError(
                "model.positions",
                f"{sample} has {longest} tokens, but this model knows {self.positions} positions.",
                where=where,
                why=f"max_position_embeddings is {self.max_positions} in its config.json",
                fix=f"data.max_length: {self.positions}",
            )

    @property
    def positions(self) -> int:
        """Number of supported positions. Linear scaling of the rotary frequencies extends them."""
        scaling = self.rope_scaling
        if scaling is None or scaling.kind != "linear":
            return self.max_positions
        return int(self.max_positions * scaling.factor)


def _read(path: Path) -> tuple[dict[str, Any], str]:
    file = path / "config.json" if path.is_dir() or path.suffix != ".json" else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            "model.not-found",
            "there is no model here.",
            where=str(file),
            fix="base.model: a folder that holds config.json",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            "model.bad-config", "config.json cannot be read.", where=str(file), why=str(error)
        ) from None
    if not isinstance(raw, dict):
        raise CheckpointError("model.bad-config", "config.json is not a JSON object.", where=str(file))
    return raw, str(file)


def _translate(raw: dict[str, Any], malformed: list[str], unsupported: list[str]) -> ModelConfig | None:
    said = parse_part(HFConfig, raw, malformed)
    name = None if {"architectures", "model_type"} & _bad_keys(malformed) else _family(said, unsupported)
    family = Family(architectures=()) if name is None else family_named(name)
    if family.keys:
        malformed.clear()
        said = parse_part(HFConfig, family.read_keys(raw), malformed)
    missing = [key for key in _COUNTS if getattr(said, key) is None and key not in _bad_keys(malformed)]
    malformed += [f"{family.keys.get(key, key)} is missing" for key in missing]
    heads, hidden = said.num_attention_heads or 0, said.hidden_size or 0
    kv_heads = said.num_key_value_heads or heads
    head_dim = said.head_dim or family.head_dim or hidden // max(heads, 1)
    theta, scaling = _rope(said, malformed, unsupported)
    checkpoint_format = _checkpoint_format(said, unsupported)
    _refuse_other_options(said, unsupported)
    if kv_heads and heads % kv_heads:
        malformed.append(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    if head_dim % 2:
        unsupported.append(f"head_dim={head_dim} is odd")
    if not head_dim and not malformed:
        malformed.append(f"hidden_size={hidden} is less than num_attention_heads={heads}")
    if name is None or malformed or unsupported:
        return None
    biased = bool(said.attention_bias) and family.reads_attention_bias
    layers = said.num_hidden_layers or 0
    return ModelConfig(
        family=name,
        vocab_size=said.vocab_size or 0,
        hidden_size=hidden,
        intermediate_size=said.intermediate_size or 0,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=1e-6 if said.rms_norm_eps is None else said.rms_norm_eps,
        qkv_bias=family.qkv_bias or biased,
        o_bias=biased,
        mlp_bias=bool(said.mlp_bias) and family.reads_mlp_bias,
        qk_norm=family.qk_norm,
        tie_embeddings=bool(said.tie_word_embeddings),
        max_positions=said.max_position_embeddings or family.positions,
        sliding_window=_sliding_window(said, family, layers),
        checkpoint_format=checkpoint_format,
    )


def _bad_keys(problems: list[str]) -> set[str]:
    """The keys at the start of the problems."""
    return {problem.partition("=")[0] for problem in problems}


def _family(said: HFConfig, unsupported: list[str]) -> str | None:
    names = said.architectures or []
    if (family := find_family(names, said.model_type)) is not None:
        return family
    found = shortened(", ".join(names)).strip("'") if names else f"model_type {shortened(said.model_type)}"
    unsupported.append(f"unknown architecture {found} (known: {known_models()})")
    return None


def _rope(said: HFConfig, malformed: list[str], unsupported: list[str]) -> tuple[float, RopeScaling | None]:
    """Reads `rope_parameters`, the newer format, or `rope_theta` + `rope_scaling`."""
    raw = said.rope_parameters or said.rope_scaling or {}
    if any(isinstance(value, dict) for value in raw.values()):
        unsupported.append("rope parameters differ between layers")
        return 0.0, None
    rope = parse_part(RopeValues, raw, malformed)
    theta = rope.rope_theta or said.rope_theta or 10000.0
    kind = rope.rope_type or rope.type or "default"
    if not {said.partial_rotary_factor, rope.partial_rotary_factor} <= {1.0, None}:
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


def _sliding_window(said: HFConfig, family: Family, num_layers: int) -> int | None:
    window = said.sliding_window if "sliding_window" in said.model_fields_set else family.absent_window
    if family.window == "never" or window is None:
        return None
    if said.layer_types is not None:
        return window if "sliding_attention" in said.layer_types else None
    if family.window == "given":
        return window
    first = 28 if said.max_window_layers is None else said.max_window_layers
    return window if said.use_sliding_window and first < num_layers else None


def _checkpoint_format(said: HFConfig, unsupported: list[str]) -> str | None:
    """How the weights come quantised, see `weights.checkpoint_formats`; None: they do not."""
    if said.quantization_config is None:
        return None
    try:
        return format_name(said.quantization_config)
    except UnknownFormat as problem:
        unsupported.append(
            f"quantised weights ({problem}): name the model that they were made of, with base.quantize: fp8, int8 or "
            "nf4"
        )
        return None


def _refuse_other_options(said: HFConfig, unsupported: list[str]) -> None:
    if said.hidden_act not in ("silu", "swish", None):
        unsupported.append(f"hidden_act {shortened(said.hidden_act)} (known: silu)")
    if said.num_experts or said.num_local_experts:
        unsupported.append("mixture of experts")
    if said.is_encoder_decoder:
        unsupported.append("encoder-decoder")


def _sentence(problems: list[str]) -> str:
    return "; ".join(problems) + "."
