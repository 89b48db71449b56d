"""Models with weights by numpy: each initializer of jax is a program for each shape, a quarter of a second."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import linen, nnx


def draw_module(make: Callable[[], nnx.Module]) -> Any:
    """make(), with other numbers."""
    graph, state = nnx.split(nnx.eval_shape(make))
    return nnx.merge(graph, jax.tree_util.tree_map_with_path(_draw, state))


def draw_params(model: linen.Module, *inputs: Any) -> Any:
    """model.init(key, *inputs)["params"], with other numbers."""
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), *inputs)["params"])
    return jax.tree_util.tree_map_with_path(_draw, shapes)


def _draw(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Weights have about the size that initializers give them, biases are 0 and scales 1."""
    name = jax.tree_util.keystr(path)
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key(zlib.crc32(name.encode()))
    if "bias" in name:
        values = np.zeros(leaf.shape)
    elif "scale" in name or len(leaf.shape) < 2:
        values = np.ones(leaf.shape)
    else:
        values = np.random.default_rng(zlib.crc32(name.encode())).normal(size=leaf.shape) * max(leaf.shape) ** -0.5
    spec = getattr(leaf.sharding, "spec", None)  # of the mesh in scope
    return jax.device_put(values.astype(leaf.dtype), spec)
