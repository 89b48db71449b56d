"""The trainable part of a model as a flat dictionary, and one adapter's own part of it.

A adapters · K in · N out · R padded rank · r an adapter's rank · L layers
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from lorafusion_jax.modules.spec import AdapterSpec

Leaves = dict[str, Array]  # "layers.self_attn.q_proj.lora_a" -> [L, A, K, R]
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A model taken apart once: plain pytrees for every jitted function.

    Attributes:
        lora: trainable leaves of all adapters, layers stacked whether the model scans or unrolls: a program that steps
            an adapter then has 14 leaves instead of 448 at 32 layers, and a checkpoint fits both kinds of model.
        frozen: everything else.
        join: (lora, frozen) → model, to be called inside a traced function.
    """

    lora: Leaves
    frozen: Any
    join: Callable[[Leaves, Any], Any]


def take_apart(model: nnx.Module) -> Parts:
    """Splits a model into trainable leaves and the frozen rest."""
    graph, lora, frozen = nnx.split(model, nnx.LoRAParam, ...)
    paths = {".".join(map(str, path)): path for path, _ in nnx.to_flat_state(lora)}
    own = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(lora)}

    def join(leaves: Leaves, rest: Any) -> nnx.Module:
        single = _unstacked(leaves, paths)
        state = nnx.from_flat_state([(path, nnx.LoRAParam(single[name])) for name, path in paths.items()])
        return nnx.merge(graph, state, rest)

    return Parts(lora=_stacked(own), frozen=frozen, join=join)


def _stacked(own: Leaves) -> Leaves:
    layers: dict[str, dict[int, Array]] = {}
    for name, leaf in own.items():
        if found := _LAYER.fullmatch(name):
            layers.setdefault(f"layers.{found[2]}", {})[int(found[1])] = leaf
    whole = {name: leaf for name, leaf in own.items() if not _LAYER.fullmatch(name)}
    return whole | {name: jnp.stack([rows[number] for number in sorted(rows)]) for name, rows in layers.items()}


def _unstacked(leaves: Leaves, names: Iterable[str]) -> Leaves:
    """The leaves under the model's own names. Split, not indexed: its transpose is one concatenation."""
    single: Leaves = {}
    for name, leaf in leaves.items():
        if name in names:
            single[name] = leaf
            continue
        for number, part in enumerate(lax.split(leaf, [1] * leaf.shape[0])):
            single[name.replace("layers.", f"layers.{number}.", 1)] = part[0]
    return single


def projection(name: str) -> str:
    """Names the projection of a leaf: "layers.self_attn.q_proj.lora_a" → "q_proj"."""
    return name.rsplit(".", 2)[-2]


def take(leaves: Leaves, spec: AdapterSpec, index: int | Array) -> Leaves:
    """Cuts one adapter out of the stacked leaves, at its own rank and targets only."""
    return {
        name: _cut(lax.dynamic_index_in_dim(leaf, index, leaf.ndim - 3, keepdims=False), name, spec.rank)
        for name, leaf in leaves.items()
        if projection(name) in spec.targets
    }


def put(leaves: Leaves, index: int | Array, own: Leaves) -> Leaves:
    """Writes one adapter's leaves back; all other bytes stay what they were."""
    return {name: _write(leaf, index, own[name]) if name in own else leaf for name, leaf in leaves.items()}


def clear(leaves: Leaves, index: int | Array) -> Leaves:
    """Sets one adapter's part to zero (its gradient sums, after a step)."""

    def zeroed(leaf: Array) -> Array:
        shape = (*leaf.shape[:-3], 1, *leaf.shape[-2:])
        return lax.dynamic_update_slice_in_dim(leaf, jnp.zeros(shape, leaf.dtype), index, leaf.ndim - 3)

    return {name: zeroed(leaf) for name, leaf in leaves.items()}


def _cut(leaf: Array, name: str, rank: int) -> Array:
    return leaf[..., :rank] if name.endswith("lora_a") else leaf[..., :rank, :]


def _write(leaf: Array, index: int | Array, own: Array) -> Array:
    start: list[int | Array] = [0] * leaf.ndim
    start[leaf.ndim - 3] = index
    return lax.dynamic_update_slice(leaf, jnp.expand_dims(own, leaf.ndim - 3), start)
