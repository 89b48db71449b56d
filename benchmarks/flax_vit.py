"""A vision transformer as Flax's own tutorial writes it: `nnx.Conv` for patches, `nnx.MultiHeadAttention`, layer norms
and projections with biases.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.flax_decoder import Probe
from benchmarks.flax_sizes import Size

PROJECTIONS = ("attn.query", "attn.key", "attn.value", "attn.out", "up", "down")
PATCH = 14  # pixels of a side; Size.positions is a square number of patches


class Block(nnx.Module):
    def __init__(self, size: Size, rngs: nnx.Rngs):
        kind = {"dtype": size.dtype, "param_dtype": size.dtype, "rngs": rngs}
        self.norm1, self.norm2 = (nnx.LayerNorm(size.width, **kind) for _ in range(2))
        self.attn = nnx.MultiHeadAttention(num_heads=size.heads, in_features=size.width, decode=False, **kind)
        self.up = nnx.Linear(size.width, size.hidden, **kind)
        self.down = nnx.Linear(size.hidden, size.width, **kind)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class ViT(nnx.Module):
    """Logits [B, vocabulary] of images [B, side, side, 3], from the token of the class."""

    def __init__(self, size: Size, rngs: nnx.Rngs):
        kind = {"dtype": size.dtype, "param_dtype": size.dtype, "rngs": rngs}
        patch = (PATCH, PATCH)
        self.patches = nnx.Conv(3, size.width, kernel_size=patch, strides=patch, padding="VALID", **kind)
        self.place = nnx.Embed(size.positions + 1, size.width, **kind)
        self.layers = nnx.List([Block(size, rngs) for _ in range(size.layers)])
        self.norm = nnx.LayerNorm(size.width, **kind)
        self.head = nnx.Linear(size.width, size.vocabulary, **kind)
        self.probe = Probe(jnp.zeros(size.width, jnp.float32))  # the token of the class

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patches(images)
        x = x.reshape(len(images), -1, x.shape[-1])
        of_class = jnp.broadcast_to(self.probe[...].astype(x.dtype), (len(x), 1, x.shape[-1]))
        x = jnp.concatenate([of_class, x], axis=1) + self.place(jnp.arange(x.shape[1] + 1))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


def classification_loss(model: nnx.Module, images: jax.Array) -> jax.Array:
    """Classes are a number of the image, so that a batch is one array."""
    labels = jnp.arange(len(images)) % 10
    return optax.softmax_cross_entropy_with_integer_labels(model(images).astype(jnp.float32), labels).mean()
