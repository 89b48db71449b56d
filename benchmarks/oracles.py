"""Baselines of the kernels: the layer without LoRA, and the best forms of LoRA in plain XLA.

T packed tokens · K in features · N out features · R padded rank · A adapters
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def frozen(x, w):
    """The layer without LoRA, a lower bound on the time."""
    return x @ w


def lora_xla(x, w, a, b, *, scale, rate=0.0, key=None):
    """One adapter in its usual form."""
    dropped = _drop(x, rate, key)
    return x @ w + scale * ((dropped @ a) @ b)


def lora_wide(x, w, a, b, *, tile_adapter, scale, rate=0.0, key=None):
    """Several adapters as one wide adapter with masked blocks, XLA's fastest form for few adapters.

    It multiplies by the mask, so NaN of one adapter reaches all of them.
    """
    num_adapters, _, rank = a.shape
    rows = jnp.repeat(tile_adapter, x.shape[0] // tile_adapter.shape[0])
    wide_a = a.transpose(1, 0, 2).reshape(x.shape[1], num_adapters * rank)
    s = (_drop(x, rate, key) @ wide_a).reshape(-1, num_adapters, rank)
    masks = jax.nn.one_hot(rows, num_adapters, dtype=jnp.float32) * scale
    s = (s * masks[:, :, None].astype(s.dtype)).reshape(-1, num_adapters * rank)
    return x @ w + s @ b.reshape(num_adapters * rank, -1)


def lora_ragged(x, w, a, b, *, tile_adapter, scale, rate=0.0, key=None):
    """Several adapters by two ragged products over rows sorted by adapter."""
    tile = x.shape[0] // tile_adapter.shape[0]
    rows = jnp.repeat(tile_adapter, tile)
    order = jnp.argsort(rows, stable=True)
    back = jnp.argsort(order, stable=True)
    sizes = jnp.bincount(rows, length=a.shape[0]).astype(jnp.int32)
    s = jax.lax.ragged_dot(_drop(x, rate, key)[order], a, sizes)
    low = jax.lax.ragged_dot(s, b, sizes)[back]
    return x @ w + scale[rows][:, None].astype(x.dtype) * low


def _drop(x, rate, key):
    if not rate:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), jnp.zeros_like(x)).astype(x.dtype)
