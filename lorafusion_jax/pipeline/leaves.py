"""The trainable part of a model as a flat dictionary, and one adapter's own part of it.

A adapters · K in · N out · R padded rank · r an adapter's rank · L layers
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from lorafusion_jax.modules.spec import AdapterSpec

Leaves = dict[str, Array]  # "layers.self_attn.q_proj.lora_a" -> [L, A, K, R]


def projection(name: str) -> str:
    """Names the projection of a leaf: "layers.self_attn.q_proj.lora_a" → "q_proj"."""
    return name.rsplit(".", 2)[-2]


def take(leaves: Leaves, spec: AdapterSpec, index: int | Array) -> Leaves:
    """Cuts one adapter out of the stacked leaves, at its own rank and targets only."""
    own = at({name: leaf for name, leaf in leaves.items() if projection(name) in spec.targets}, index)
    return {name: _cut(leaf, name, spec.rank) for name, leaf in own.items()}


def at(leaves: Leaves, index: int | Array) -> Leaves:
    """One adapter's part of the stacked leaves, all of them at the padded rank."""
    return {name: lax.dynamic_index_in_dim(leaf, index, leaf.ndim - 3, keepdims=False) for name, leaf in leaves.items()}


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
