"""A decoder layer as Bonsai's Qwen3 has it: projections by `nnx.Einsum` over heads, norms of q and k, a gated MLP."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.flax_sizes import Size


class Qwen3Layer(nnx.Module):
    def __init__(self, size: Size, rngs: nnx.Rngs):
        head = size.width // size.heads
        kind = {"dtype": size.dtype, "param_dtype": size.dtype, "rngs": rngs}
        into = {"q": size.heads, "k": size.kv_heads, "v": size.kv_heads}
        for name, count in into.items():
            setattr(self, name, nnx.Einsum("btd,dnh->btnh", (size.width, count, head), **kind))
        self.o = nnx.Einsum("btnh,nhd->btd", (size.heads, head, size.width), **kind)
        for name in ("gate", "up"):
            setattr(self, name, nnx.Linear(size.width, size.hidden, use_bias=False, **kind))
        self.down = nnx.Linear(size.hidden, size.width, use_bias=False, **kind)
        self.norm1, self.norm2 = (nnx.RMSNorm(size.width, **kind) for _ in range(2))
        self.q_norm, self.k_norm = (nnx.RMSNorm(head, **kind) for _ in range(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm1(x)
        q, k, v = self.q_norm(self.q(y)), self.k_norm(self.k(y)), self.v(y)
        kind = "cudnn" if jax.default_backend() == "gpu" else "xla"
        x = x + self.o(jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True, implementation=kind))
        y = self.norm2(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


class GeneralLoRA(nnx.LoRA):
    """Flax's `nnx.LoRA` around an `nnx.Einsum` or an `nnx.LinearGeneral`, whose features have several axes."""

    def __init__(self, base: nnx.Einsum | nnx.LinearGeneral, rank: int, dtype: Any, rngs: nnx.Rngs):
        if isinstance(base, nnx.LinearGeneral):
            count = len(base.in_features)  # axes of in features
        else:
            count = 2 if base.einsum_str.startswith("btnh") else 1
        shape = base.kernel.shape
        sizes = (int(jnp.prod(jnp.array(part))) for part in (shape[:count], shape[count:]))
        super().__init__(next(sizes), rank, next(sizes), dtype=dtype, rngs=rngs)
        self.base = base

    def __call__(self, x: jax.Array, **options: Any) -> jax.Array:
        y = self.base(x, **options)  # nnx.MultiHeadAttention passes its shardings
        return y + super().__call__(x.reshape(*x.shape[:2], -1)).reshape(y.shape)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
    cos, sin = (table[:, None].astype(x.dtype) for table in (jnp.cos(angle), jnp.sin(angle)))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
