"""Merges an adapter into a frozen weight, computed in float64 and rounded once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from lorafusion_jax.adapters.kind import Sizes
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.table import adapter_kind


def merged_weight(
    weight: Any, spec: AdapterSpec, leaves: Mapping[str, Any], inside: Sequence[int], stack: int = 0
) -> Array:
    """Returns the weight with one adapter merged.

    Args:
        weight: [stacked layers, axes of one layer's weight].
        spec: the adapter.
        leaves: its tensors, [stacked layers, ...].
        inside: axes of one layer's weight that the product sums over.
        stack: number of leading layer axes.
    """
    kind, shape = adapter_kind(spec.kind), weight.shape[stack:]
    order = [*inside, *(axis for axis in range(len(shape)) if axis not in inside)]
    back = np.argsort(order)
    num_in = math.prod(shape[axis] for axis in inside)
    sizes = Sizes(K=num_in, N=math.prod(shape) // num_in, R=spec.rank, scale=spec.scale)
    leaf_of = {leaf.name: leaf for leaf in kind.leaves}
    merged = np.empty(weight.shape, weight.dtype)
    for number in np.ndindex(weight.shape[:stack]):
        tensors = {
            name: leaf_of[name].cut(np.asarray(leaf[number], np.float64), {"K": sizes.K, "N": sizes.N, "R": spec.rank})
            for name, leaf in leaves.items()
        }
        kernel = np.asarray(weight[number], np.float64).transpose(order)
        changed = kind.merge(kernel.reshape(sizes.K, sizes.N), tensors, sizes)
        merged[number] = changed.reshape(kernel.shape).transpose(back).astype(weight.dtype)
    return jnp.asarray(merged)
