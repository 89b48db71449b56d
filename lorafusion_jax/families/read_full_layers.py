"""Sizes of attention in full layers, where they are not those of layers with a window, and models of such layers that
are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lorafusion_jax.families.attention import Sharing
from lorafusion_jax.families.family import Family
from lorafusion_jax.families.hf_config import HFConfig, shortened

SHARED = "num_kv_shared_layers"
KEY = "global_head_dim"  # families that read it have such layers
_SIZES = {"head_dim": "head_dim", "num_key_value_heads": "kv_heads"}


def read_full_sizes(hf: HFConfig, family: Family) -> dict[str, Any]:
    """Fields of `LayerType` of the full layers; none where all layers have the same sizes."""
    if KEY not in family.meanings:
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
    if KEY not in family.meanings:
        return
    layers = hf.per_layer_config  # none where no layer differs; transformers fills its numbers with zeros
    if layers and (
        {key.lstrip("0") or "0" for key in layers} != {*map(str, full)}
        or len({repr(sizes) for sizes in layers.values()}) > 1
        or not _known(layers)
    ):
        unsupported.append(f"per_layer_config={shortened(layers)}: other sizes than one for all full layers")
    if count and full[-1:] != [count - 1]:
        unsupported.append("layer_types: the last layer of this family is full_attention")
    if (hf.vocab_size_per_layer_input or 0) < (hf.vocab_size or 0) and hf.hidden_size_per_layer_input:
        unsupported.append(
            f"vocab_size_per_layer_input={hf.vocab_size_per_layer_input}: fewer than vocab_size={hf.vocab_size}"
        )
    if hf.use_bidirectional_attention not in (None, "vision"):  # text is causal in models of images, too
        unsupported.append(f"use_bidirectional_attention={shortened(hf.use_bidirectional_attention)}")


def read_sharing(hf: HFConfig, family: Family, names: Sequence[str], unsupported: list[str]) -> list[Sharing]:
    """Which layers give their keys and values to later ones, and which read them.

    Args:
        names: types of the layers.
    """
    count = hf.num_kv_shared_layers if SHARED in family.meanings else 0
    first = len(names) - (count or 0)
    if not count:
        return ["none"] * len(names)
    if not {*names[first:]} <= {*names[: max(first, 0)]}:
        unsupported.append(f"{SHARED}={count}: no earlier layer of the same type has keys")
        return ["none"] * len(names)
    if not hf.hidden_size_per_layer_input:  # transformers 5.23 does not compute such a model
        unsupported.append(f"{SHARED}={count}: layers that read keys of others without inputs of their own")
    latest = {name: number for number, name in enumerate(names[:first])}
    giving = {number for name, number in latest.items() if name in names[first:]}
    return ["reads" if number >= first else "gives" if number in giving else "none" for number in range(len(names))]


def _known(layers: dict[str, Any]) -> bool:
    return all(
        isinstance(sizes, dict)
        and sizes.keys() <= _SIZES.keys()
        and all(type(size) is int and 0 < size <= 2**20 for size in sizes.values())
        for sizes in layers.values()
    )


def _given(sizes: dict[str, Any]) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if type(size) is int and size > 0}
