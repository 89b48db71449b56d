"""The trainable part of a model as a flat dictionary, and one adapter's own part of it.

A adapters · K in · N out · R padded rank · r an adapter's rank · L stacked layers (absent when unrolled)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax import Array, lax

from lorafusion_jax.modules.spec import AdapterSpec

Leaves = dict[str, Array]  # "layers.0.self_attn.q_proj.lora_a" -> [(L,) A, K, R]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A model taken apart once: plain pytrees for every jitted function.

    Attributes:
        lora: trainable leaves of all adapters.
        frozen: everything else.
        join: (lora, frozen) → model, to be called inside a traced function.
    """

    lora: Leaves
    frozen: Any
    join: Callable[[Leaves, Any], Any]


def take_apart(model: nnx.Module) -> Parts:
    """Splits a model into trainable leaves and the frozen rest."""
    graph, lora, frozen = nnx.split(model, nnx.LoRAParam, ...)
    flat = nnx.to_flat_state(lora)
    paths = {".".join(map(str, path)): path for path, _ in flat}

    def join(leaves: Leaves, rest: Any) -> nnx.Module:
        state = nnx.from_flat_state([(path, nnx.LoRAParam(leaves[name])) for name, path in paths.items()])
        return nnx.merge(graph, state, rest)

    return Parts(lora={".".join(map(str, path)): leaf[...] for path, leaf in flat}, frozen=frozen, join=join)


def projection(name: str) -> str:
    """Names the projection of a leaf: "layers.0.self_attn.q_proj.lora_a" → "q_proj"."""
    return name.rsplit(".", 2)[-2]


def take(leaves: Leaves, spec: AdapterSpec, index: int | Array) -> Leaves:
    """Cuts one adapter out of the stacked leaves, at its own rank and targets only."""
    return {name: _cut(lax.dynamic_index_in_dim(leaf, index, leaf.ndim - 3, keepdims=False), name, spec.rank)
            for name, leaf in leaves.items() if projection(name) in spec.targets}


def put(leaves: Leaves, index: int | Array, own: Leaves) -> Leaves:
    """Writes one adapter's leaves back; all other bytes stay what they were."""
    return {name: _write(leaf, index, own[name]) if name in own else leaf for name, leaf in leaves.items()}


def clear(leaves: Leaves, index: int | Array) -> Leaves:
    """Sets one adapter's part to zero (its gradient sums, after a step)."""
    def zeroed(leaf: Array) -> Array:
        shape = (*leaf.shape[:-3], 1, *leaf.shape[-2:])
        return lax.dynamic_update_slice_in_dim(leaf, jax.numpy.zeros(shape, leaf.dtype), index, leaf.ndim - 3)

    return {name: zeroed(leaf) for name, leaf in leaves.items()}


def _cut(leaf: Array, name: str, rank: int) -> Array:
    return leaf[..., :rank] if name.endswith("lora_a") else leaf[..., :rank, :]


def _write(leaf: Array, index: int | Array, own: Array) -> Array:
    start = [0] * leaf.ndim
    start[leaf.ndim - 3] = index
    return lax.dynamic_update_slice(leaf, jax.numpy.expand_dims(own, leaf.ndim - 3), start)
