"""The trainable part of a model as a flat dictionary, and one adapter's own part of it.

A adapters · L layers · R replicas; the other axes are those of a leaf's kind, see `adapters.kind`
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from lorafusion_jax.adapters.kind import Leaf, adapter_kind
from lorafusion_jax.modules.spec import AdapterSpec

Leaves = dict[str, Array]  # "layers.self_attn.q_proj.lora_a" -> [L, A, ...]
WEIGHTS, SUMS = 1, 2  # axis of the adapters, in weights [L, A, ...] and in sums [R, L, A, ...]


def own_names(leaves: Leaves, spec: AdapterSpec) -> list[str]:
    """Names the leaves of an adapter's targets and kind, sorted."""
    kind = adapter_kind(spec.kind).names
    return sorted(name for name in leaves if _projection(name) in spec.targets and _leaf(name) in kind)


def take(leaves: Leaves, spec: AdapterSpec, index: int | Array, *, axis: int = WEIGHTS) -> Leaves:
    """Cuts one adapter out of the stacked leaves, at its own rank, targets and kind only."""
    own = at({name: leaves[name] for name in own_names(leaves, spec)}, index, axis=axis)
    return {name: _table(name, spec).at_rank(leaf, spec.rank) for name, leaf in own.items()}


def at(leaves: Leaves, index: int | Array, *, axis: int = WEIGHTS) -> Leaves:
    """One adapter's part of the stacked leaves, all of them at the padded rank."""
    return {name: lax.dynamic_index_in_dim(leaf, index, axis, keepdims=False) for name, leaf in leaves.items()}


def put(leaves: Leaves, index: int | Array, own: Leaves) -> Leaves:
    """Writes one adapter's weights back; all other bytes stay what they were."""
    return {name: _write(leaf, index, own[name]) if name in own else leaf for name, leaf in leaves.items()}


def clear(sums: Leaves, index: int | Array) -> Leaves:
    """Sets one adapter's gradient sums to zero, after a step."""

    def zeroed(leaf: Array) -> Array:
        shape = (*leaf.shape[:SUMS], 1, *leaf.shape[SUMS + 1 :])
        return lax.dynamic_update_slice_in_dim(leaf, jnp.zeros(shape, leaf.dtype), index, SUMS)

    return {name: zeroed(leaf) for name, leaf in sums.items()}


def _projection(name: str) -> str:
    return name.rsplit(".", 2)[-2]


def _leaf(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _table(name: str, spec: AdapterSpec) -> Leaf:
    return adapter_kind(spec.kind).leaf(_leaf(name))


def _write(leaf: Array, index: int | Array, own: Array) -> Array:
    start: list[int | Array] = [0] * leaf.ndim
    start[WEIGHTS] = index
    return lax.dynamic_update_slice(leaf, jnp.expand_dims(own, WEIGHTS), start)
