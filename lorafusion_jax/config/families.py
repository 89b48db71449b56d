"""Families of Llama-like decoders: the same layer with other names and options in the model files.

To add one, add a row to `FAMILIES`. Other packages can install an entry point of the group `lorafusion_jax.families`
that loads a `Family`; its name is the `model_type` of config.json.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..plugins import find, known_names

GROUP = "lorafusion_jax.families"
_LAYERS = "model.layers"
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Names and options of a family's model files. Defaults are those of Llama.

    Args:
        architectures: names in config.json; the first one is written.
        head_dim: default if config.json has none (None: hidden_size / num_attention_heads).
        positions: default if config.json has no `max_position_embeddings`.
        qkv_bias: q, k and v always have a bias.
        reads_attention_bias: `attention_bias` of config.json gives q, k, v and o a bias.
        reads_mlp_bias: `mlp_bias` of config.json gives the MLP's projections a bias.
        qk_norm: q and k are normalised per head.
        window: `sliding_window` of config.json applies never, whenever it is set, or if another key enables it.
        absent_window: window if config.json does not have the key; a null means none.
        keys: Llama's key of config.json → the family's key, e.g. {"hidden_size": "n_embd"}.
        modules: Llama's module → the family's module, e.g. {"model.embed_tokens": "tokens", "model.layers": "blocks",
            "self_attn.q_proj": "attention.query"}. Adapters are saved under Llama's names.
    """

    architectures: tuple[str, ...]
    head_dim: int | None = None
    positions: int = 2048
    qkv_bias: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    qk_norm: bool = False
    window: Literal["never", "given", "switched"] = "never"
    absent_window: int | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)

    def read_keys(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Converts a config.json of this family to Llama's keys."""
        theirs = set(self.keys.values()) - self.keys.keys()
        renamed = {ours: raw[their] for ours, their in self.keys.items() if their in raw}
        return {key: value for key, value in raw.items() if key not in theirs} | renamed

    def write_keys(self, llama: Mapping[str, Any]) -> dict[str, Any]:
        """Inverse of `read_keys`."""
        return {self.keys.get(key, key): value for key, value in llama.items()}

    def tensor_name(self, llama: str) -> str:
        """Checkpoint name of a tensor given by Llama's name, e.g. "model.layers.3.self_attn.q_proj.weight"."""
        path, _, leaf = llama.rpartition(".")
        inside = _IN_LAYER.fullmatch(path)
        if inside is None:
            return f"{self.modules.get(path, path)}.{leaf}"
        number, module = inside.groups()
        return f"{self.modules.get(_LAYERS, _LAYERS)}.{number}.{self.modules.get(module, module)}.{leaf}"


FAMILIES: dict[str, Family] = {
    "llama": Family(architectures=("LlamaForCausalLM",), reads_attention_bias=True, reads_mlp_bias=True),
    "mistral": Family(architectures=("MistralForCausalLM",), positions=131072, window="given", absent_window=4096),
    "qwen2": Family(architectures=("Qwen2ForCausalLM",), positions=32768, qkv_bias=True, window="switched"),
    "qwen3": Family(
        architectures=("Qwen3ForCausalLM",), head_dim=128, positions=32768, reads_attention_bias=True, qk_norm=True,
        window="switched",
    ),
}  # fmt: skip


def family_named(name: str) -> Family:
    """Finds the family of a `model_type`.

    Raises:
        ConfigError: `plugin.unknown`, `plugin.broken`.
    """
    return find(GROUP, FAMILIES, name, Family)


def find_family(architectures: list[str] | None, model_type: str | None) -> str | None:
    """Finds the name of the family of a config.json; None if it is unknown.

    Raises:
        ConfigError: `plugin.broken`, an installed family does not load.
    """
    for name in architectures or ():
        for family, row in FAMILIES.items():
            if name in row.architectures:
                return family
    if model_type not in known_names(GROUP, FAMILIES):
        return None
    wanted = family_named(model_type).architectures
    return model_type if not architectures or set(architectures) & set(wanted) else None


def known_models() -> str:
    """Names of the supported models, for messages."""
    installed = [name for name in known_names(GROUP, FAMILIES) if name not in FAMILIES]
    return ", ".join([*(name for row in FAMILIES.values() for name in row.architectures), *installed])
