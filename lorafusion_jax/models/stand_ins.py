"""Placeholders for the frozen weights, so that programs compile while the weights are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from lorafusion_jax.models.naming import Tensor
from lorafusion_jax.models.quantised_kernels import ShardingRule, on_host
from lorafusion_jax.weights.table import StoredKind

STAND_IN = 0.01  # not zero: kinds of adapters may divide by the norm of a column


def stand_ins(tensors: Sequence[Tensor], kind: StoredKind | None, dtype: np.dtype, rule: ShardingRule) -> dict:
    """Makes arrays of the shapes, dtypes and shardings of the weights; equal ones are one and the same array.

    Args:
        kind: storage of the layers' kernels; None: they have `dtype`, as all others.
    """
    array_of: dict[tuple, jax.Array] = {}

    def filled(name: str, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        key = shape, jnp.dtype(dtype), rule(name, shape)
        if key not in array_of:
            array_of[key] = _fill(*key)()
        return array_of[key]

    def of(tensor: Tensor) -> Any:
        name, shape = tensor.leaf_name, tensor.leaf_shape
        if kind is None or not tensor.transposed:
            return filled(name, shape, jnp.float32 if tensor.float32 else dtype)
        return {part: filled(name, array.shape, array.dtype) for part, array in kind.arrays(*shape).items()}

    return {tensor.leaf_name: of(tensor) for tensor in tensors}


@lru_cache(maxsize=64)
def _fill(shape: tuple[int, ...], dtype: np.dtype, target: Sharding) -> Callable[[], jax.Array]:
    value = STAND_IN if jnp.issubdtype(dtype, jnp.inexact) else 1
    if on_host(target):
        return lambda: jax.device_put(np.full(shape, value, dtype), target)
    return jax.jit(lambda: jnp.full(shape, value, dtype), out_shardings=target)
