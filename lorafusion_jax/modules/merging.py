"""Merges an adapter into a frozen weight: W + scale · A B, computed in float64 and rounded once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from lorafusion_jax.adapters.kind import adapter_kind
from lorafusion_jax.adapters.spec import AdapterSpec


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
    own = {name: np.asarray(leaf, np.float64) for name, leaf in leaves.items()}
    flat = {name: leaf.reshape(-1, *leaf.shape[stack:]) for name, leaf in own.items()}
    a, b = (np.asarray(each) for each in adapter_kind(spec.kind).low_rank(flat))
    shape = weight.shape[stack:]
    order = [*inside, *(axis for axis in range(len(shape)) if axis not in inside)]
    delta = (spec.scale * a @ b).reshape(*weight.shape[:stack], *(shape[axis] for axis in order))
    delta = delta.transpose(*range(stack), *(stack + int(axis) for axis in np.argsort(order)))
    return jnp.asarray((np.asarray(weight, np.float64) + delta).astype(weight.dtype))
