"""The models of `flax_model.py`: a decoder, with layers of its own or as Bonsai's Qwen3 has them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.flax_qwen3 import Qwen3Layer, rotate
from benchmarks.flax_sizes import Size

PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")


class Probe(nnx.Variable):
    """Trained where nothing else is, so that gradients flow through every layer."""


class Layer(nnx.Module):
    def __init__(self, size: Size, rngs: nnx.Rngs):
        head = size.width // size.heads
        sizes = {
            "q": (size.width, size.width),
            "k": (size.width, size.kv_heads * head),
            "v": (size.width, size.kv_heads * head),
            "o": (size.width, size.width),
            "gate": (size.width, size.hidden),
            "up": (size.width, size.hidden),
            "down": (size.hidden, size.width),
        }
        kind = {"use_bias": False, "dtype": size.dtype, "param_dtype": size.dtype, "rngs": rngs}
        for name, (inner, outer) in sizes.items():
            setattr(self, name, nnx.Linear(inner, outer, **kind))
        self.norm1, self.norm2 = (
            nnx.RMSNorm(size.width, dtype=size.dtype, param_dtype=size.dtype, rngs=rngs) for _ in range(2)
        )
        self.head = head

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm1(x)
        q, k, v = (heads(layer(y), self.head) for layer in (self.q, self.k, self.v))
        kind = "cudnn" if jax.default_backend() == "gpu" else "xla"
        mixed = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True, implementation=kind)
        x = x + self.o(mixed.reshape(x.shape))
        y = self.norm2(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


class Decoder(nnx.Module):
    def __init__(self, size: Size, rngs: nnx.Rngs):
        self.embed = nnx.Embed(size.vocabulary, size.width, dtype=size.dtype, param_dtype=size.dtype, rngs=rngs)
        layer = Qwen3Layer if size.model == "qwen3" else Layer
        self.layers = nnx.List([layer(size, rngs) for _ in range(size.layers)])
        self.norm = nnx.RMSNorm(size.width, dtype=size.dtype, param_dtype=size.dtype, rngs=rngs)
        kind = {"use_bias": False, "dtype": size.dtype, "param_dtype": size.dtype, "rngs": rngs}
        self.lm_head = nnx.Linear(size.width, size.vocabulary, **kind)
        self.probe = Probe(jnp.zeros(size.width, jnp.float32))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.probe[...].astype(self.embed.dtype)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def next_token_loss(model: nnx.Module, tokens: jax.Array) -> jax.Array:
    logits = model(tokens)[:, :-1].astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def heads(x: jax.Array, size: int) -> jax.Array:
    return x.reshape(*x.shape[:2], -1, size)
