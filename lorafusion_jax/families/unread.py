"""Tensors of a checkpoint that the decoder does not read: tables that it computes, predictors of later tokens."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from lorafusion_jax.families.attention import Attention
from lorafusion_jax.families.experts_rows import PREDICTORS
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.families.table import family_named

_NUMBERED = re.compile(r"(.*?)([^.]+\.\d{1,6}\..+)")  # root, and what follows it, of a tensor in a layer
SAVE_PLAIN = "save the model itself, not what wraps it (torch.compile, PEFT, a multimodal model), or rename its tensors"
_LAYER = re.compile(r"model\.layers\.(\d{1,6})\..+")
_KEYS = re.compile(r"(?:.+\.)?layers\.(\d{1,6})\.self_attn\.(?:k_proj|v_proj|k_norm|v_norm)\..+")


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Whether the decoder ignores this tensor of a checkpoint, such as a table that can be computed."""
    family = family_named(config.family)
    layer = _LAYER.fullmatch(name)
    return (
        _is_unread_key(name, config)
        or bool(re.search(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$", name))
        or (config.tie_embeddings and name == family.tensor_name("lm_head.weight"))
        or (layer is not None and int(layer[1]) >= config.num_layers and PREDICTORS[0] in family.known)
        or any(part in name if part.startswith(".") else name.startswith(part) for part in family.ignored)
    )


def other_root(missing: Iterable[str], stored: Collection[str]) -> str:
    """Says that the names of a checkpoint's tensors begin otherwise, as those that a wrapper of a model saves; "" if
    not all missing ones of layers are there so.

    >>> other_root(["model.layers.0.mlp.up_proj.weight"], ["_orig_mod.model.layers.0.mlp.up_proj.weight"])
    "its names begin with '_orig_mod.model.', and those of this model with 'model.'"
    """
    lacking = [match for name in missing if (match := _NUMBERED.fullmatch(name))]
    if not lacking:
        return ""
    expected, end = lacking[0].groups()
    roots = (name.removesuffix(end) for name in stored if name.endswith(end))
    begin = next((root for root in roots if all(f"{root}{match[2]}" in stored for match in lacking)), None)
    return "" if begin is None else f"its names begin with {begin!r}, and those of this model with {expected!r}"


def _is_unread_key(name: str, config: ModelConfig) -> bool:
    """Whether a tensor makes keys or values in a layer that reads those of another; published files have some."""
    inside = _KEYS.fullmatch(name)
    if inside is None or int(inside[1]) >= config.num_layers:
        return False
    attention = config.layer(int(inside[1])).attention
    return isinstance(attention, Attention) and attention.reads
