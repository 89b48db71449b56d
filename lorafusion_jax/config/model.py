"""What a decoder looks like: one dataclass for all families, read from a Hugging Face config.json.

Here and not beside the decoder, because planning needs shapes and no jax.
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

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# The keys that change the arithmetic and that this decoder knows; where a file leaves one out, the value here is meant.
_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "max_position_embeddings": 2048,
}
_COUNTS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Long-context change of the rotary frequencies; see `rope.inverse_frequencies`."""

    kind: Literal["llama3", "linear"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and arithmetic of a decoder-only transformer.

    Example:
        >>> config = ModelConfig.from_hf({
        ...     "architectures": ["Qwen2ForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
        ...     "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2})
        >>> config.family, config.head_dim, config.qkv_bias
        ('qwen2', 8, True)
    """

    family: Family
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

    @classmethod
    def from_hf(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> ModelConfig:
        """Reads a model directory, a config.json or its dictionary.

        Raises:
            CheckpointError: no readable config.json, an unknown architecture, or options that this decoder lacks, all
                in one message.
        """
        raw, where = (dict(source), "config") if isinstance(source, Mapping) else _read(Path(source))
        problems: list[str] = []
        config = _translate(raw, problems)
        if config is None or problems:
            raise CheckpointError(
                "model.unsupported",
                "this model cannot be run: " + _sentence(problems),
                where=where,
                why="only plain Llama, Mistral, Qwen2 and Qwen3 decoders are implemented",
                fix="choose a base model of these families, or a copy of it that is not quantised",
            )
        return config

    def to_hf(self) -> dict[str, Any]:
        """The config.json that `from_hf` and other libraries read back."""
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
            "architectures": [next(name for name, family in ARCHITECTURES.items() if family == self.family)],
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
            # Both spellings, so that old and new readers agree.
            "rope_theta": self.rope_theta,
            "rope_scaling": None if scaling is None else {k: v for k, v in rope.items() if k != "rope_theta"},
            "rope_parameters": rope,
            "sliding_window": self.sliding_window,
        }
        if self.family in ("qwen2", "qwen3"):
            out |= {
                "use_sliding_window": self.sliding_window is not None,
                "max_window_layers": 0 if self.sliding_window else self.num_layers,
            }
        if self.family == "qwen2":
            return out
        return out | {"attention_bias": self.o_bias, "mlp_bias": self.mlp_bias}

    @property
    def num_parameters(self) -> int:
        """Weights of the base model, a tied head counted once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return embeddings + self.num_layers * LAYER.num_parameters(self) + self.hidden_size

    def check_length(self, longest: int, *, where: str = "") -> None:
        """Refuses samples that this decoder would compute differently from the model's authors.

        Raises:
            CheckpointError: the model limits attention to a window that is shorter than the longest sample.
        """
        if self.sliding_window is not None and longest > self.sliding_window:
            raise CheckpointError(
                "model.sliding-window",
                f"the longest sample has {longest} tokens, but this model attends to the last "
                f"{self.sliding_window} only.",
                where=where,
                why="sliding-window attention is not implemented; within the window it is the same as full attention",
                fix=f"data.max_length: {self.sliding_window}",
            )


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
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(
            "model.bad-config", "config.json cannot be read.", where=str(file), why=str(error)
        ) from None
    if not isinstance(raw, dict):
        raise CheckpointError("model.bad-config", "config.json is not a JSON object.", where=str(file))
    return raw, str(file)


def _translate(raw: dict[str, Any], problems: list[str]) -> ModelConfig | None:
    family = _family(raw, problems)
    counts = {key: _count(raw, key, problems) for key in _COUNTS}
    heads, hidden = counts["num_attention_heads"], counts["hidden_size"]
    kv_heads = _count(raw, "num_key_value_heads", problems, default=heads)
    head_dim = _count(raw, "head_dim", problems, default=128 if family == "qwen3" else hidden // max(heads, 1))
    theta, scaling = _rope(raw, problems)
    window = _sliding_window(raw, family, counts["num_hidden_layers"])
    _refuse_other_options(raw, problems)
    if kv_heads and heads % kv_heads:
        problems.append(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    if head_dim % 2:
        problems.append(f"head_dim={head_dim} is odd")
    if family is None or problems:
        return None
    option = {key: raw[key] if raw.get(key) is not None else default for key, default in _DEFAULTS.items()}
    biased = bool(option["attention_bias"]) and family in ("llama", "qwen3")
    return ModelConfig(
        family=family,
        vocab_size=counts["vocab_size"],
        hidden_size=hidden,
        intermediate_size=counts["intermediate_size"],
        num_layers=counts["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=float(option["rms_norm_eps"]),
        qkv_bias=family == "qwen2" or biased,
        o_bias=biased,
        mlp_bias=bool(option["mlp_bias"]) and family == "llama",
        qk_norm=family == "qwen3",
        tie_embeddings=bool(option["tie_word_embeddings"]),
        max_positions=int(option["max_position_embeddings"]),
        sliding_window=window,
    )


def _family(raw: dict[str, Any], problems: list[str]) -> Family | None:
    names = raw.get("architectures") or []
    known: list[Family] = [ARCHITECTURES[name] for name in names if name in ARCHITECTURES]
    if known:
        return known[0]
    by_type: dict[str, Family] = {family: family for family in ARCHITECTURES.values()}
    if not names and raw.get("model_type") in by_type:
        return by_type[raw["model_type"]]
    said = ", ".join(map(str, names)) or f"model_type {raw.get('model_type')!r}"
    problems.append(f"unknown architecture {said} (known: {', '.join(ARCHITECTURES)})")
    return None


def _count(raw: dict[str, Any], key: str, problems: list[str], *, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        problems.append(f"{key} is missing" if value is None else f"{key}={value!r} is not a positive integer")
        return 0
    return value


def _rope(raw: dict[str, Any], problems: list[str]) -> tuple[float, RopeScaling | None]:
    """Reads `rope_parameters`, the newer spelling, or `rope_theta` + `rope_scaling`."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        problems.append("rope parameters differ between layers")
        return 0.0, None
    theta = rope.get("rope_theta", raw.get("rope_theta")) or 10000.0
    kind = rope.get("rope_type", rope.get("type", "default"))
    if raw.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)) not in (1, 1.0, None):
        problems.append("partial_rotary_factor is not 1")
    if kind == "default":
        return float(theta), None
    wanted = {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
    if kind not in wanted:
        problems.append(f"rope_type {kind!r} (known: default, linear, llama3)")
        return 0.0, None
    missing = [key for key in wanted[kind] if not isinstance(rope.get(key), int | float)]
    if missing:
        problems.append(f"rope_type {kind!r} lacks {', '.join(missing)}")
        return 0.0, None
    if kind == "linear":
        return float(theta), RopeScaling(kind="linear", factor=float(rope["factor"]))
    factor, low, high, original = (rope[key] for key in wanted["llama3"])
    return float(theta), RopeScaling(
        kind="llama3",
        factor=float(factor),
        low_freq_factor=float(low),
        high_freq_factor=float(high),
        original_max_positions=int(original),
    )


def _sliding_window(raw: dict[str, Any], family: Family | None, num_layers: int) -> int | None:
    window = raw.get("sliding_window")
    if family == "llama" or window is None:
        return None
    types = raw.get("layer_types")
    if types is not None:
        return int(window) if "sliding_attention" in types else None
    if family == "mistral":
        return int(window)
    switched_on = bool(raw.get("use_sliding_window", False))
    return int(window) if switched_on and raw.get("max_window_layers", 28) < num_layers else None


def _refuse_other_options(raw: dict[str, Any], problems: list[str]) -> None:
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        problems.append(f"hidden_act {raw['hidden_act']!r} (known: silu)")
    if raw.get("quantization_config") is not None:
        problems.append(f"quantised weights ({raw['quantization_config'].get('quant_method', 'unknown')})")
    if raw.get("num_experts") or raw.get("num_local_experts"):
        problems.append("mixture of experts")
    if raw.get("is_encoder_decoder"):
        problems.append("encoder-decoder")


def _sentence(problems: list[str]) -> str:
    return "; ".join(problems) + "."
