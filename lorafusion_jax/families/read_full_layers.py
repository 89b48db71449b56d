"""Sizes of attention in full layers, where they are not those of layers with a window, and models of such layers that
are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lorafusion_jax.families.hf_config import HFConfig, shortened
from lorafusion_jax.families.table import Family

KEY = "global_head_dim"  # families that read it have such layers
_SIZES = {"head_dim": "head_dim", "num_key_value_heads": "kv_heads"}


def read_full_sizes(hf: HFConfig, family: Family) -> dict[str, Any]:
    """Fields of `LayerType` of the full layers; none where all layers have the same sizes."""
    if KEY not in family.reads:
        return {}
    sizes = {"head_dim": hf.global_head_dim}
    if hf.attention_k_eq_v:
        sizes["kv_heads"] = hf.num_global_key_value_heads
    if hf.per_layer_config is not None:
        first = next(iter(hf.per_layer_config.values()), {})
        sizes = {field: first.get(key) for key, field in _SIZES.items()} if isinstance(first, dict) else {}
    return {"head_dim": hf.head_dim} | _given(sizes) | {"k_is_v": bool(hf.attention_k_eq_v)}


def check_full_layers(hf: HFConfig, family: Family, full: Sequence[int], count: int, unsupported: list[str]) -> None:
    """Refuses what such models may have and layers here have not.

    Args:
        full: numbers of the full layers.
    """
    if KEY not in family.reads:
        return
    layers = hf.per_layer_config
    if layers is not None and (
        {*layers} != {*map(str, full)} or len({repr(sizes) for sizes in layers.values()}) > 1 or not _known(layers)
    ):
        unsupported.append(f"per_layer_config={shortened(layers)}: other sizes than one for all full layers")
    if count and full[-1:] != [count - 1]:
        unsupported.append("layer_types: the last layer of this family is full_attention")
    crossing = {
        key: getattr(hf, key) for key in ("num_kv_shared_layers", "hidden_size_per_layer_input") if getattr(hf, key)
    }
    if crossing:
        values = ", ".join(f"{key}={value}" for key, value in crossing.items())
        unsupported.append(f"{values}: layers that read keys or inputs of other layers")
    if hf.use_bidirectional_attention not in (None, "vision"):  # text is causal in models of images, too
        unsupported.append(f"use_bidirectional_attention={shortened(hf.use_bidirectional_attention)}")


def _known(layers: dict[str, Any]) -> bool:
    return all(
        isinstance(sizes, dict)
        and sizes.keys() <= _SIZES.keys()
        and all(type(size) is int and 0 < size <= 2**20 for size in sizes.values())
        for sizes in layers.values()
    )


def _given(sizes: dict[str, Any]) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if type(size) is int and size > 0}
