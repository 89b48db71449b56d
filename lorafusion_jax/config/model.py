"""Configuration of a decoder: one dataclass for all families, read from a Hugging Face config.json.

It is in this package because planning needs shapes without jax.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..layout.layer import LAYER
from .families import family_named, known_models
from .translate_hf import RopeScaling, translate


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
        fields = translate(raw, malformed, unsupported)
        if fields is not None and not malformed and not unsupported:
            return cls(**fields)
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


def _sentence(problems: list[str]) -> str:
    return "; ".join(problems) + "."
