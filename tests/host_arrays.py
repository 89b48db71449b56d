"""Arrays without programs: whatever jnp makes or changes outside of jit is compiled, once for each shape and type."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def on_device(values: Any, dtype: Any = None) -> jax.Array:
    """What jnp.asarray(values, dtype) is, by numpy."""
    return jax.device_put(np.asarray(values, dtype))


def changed(array: jax.Array, index: Any, value: Any) -> jax.Array:
    """What array.at[index].set(value) is, by numpy."""
    values = np.array(array)
    values[index] = value
    return jax.device_put(values)


def filled(value: float, *shape: int) -> jax.Array:
    """What jnp.full(shape, value) is, in float32, by numpy."""
    return jax.device_put(np.full(shape, value, np.float32))


def normal(seed: int, shape: tuple[int, ...], scale: float = 1.0) -> jax.Array:
    """Normal numbers in float32, by numpy."""
    return jax.device_put((np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32))
