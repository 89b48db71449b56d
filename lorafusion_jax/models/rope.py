"""Rotary position embeddings. Dims: `T` packed tokens · `H` heads · `C` head width."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..config.model import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Angle per position of each pair of channels, float32 [C/2].

    f_i = theta^(-2i/C). "linear" divides all by `factor`. "llama3" divides wavelengths longer than
    original/low by `factor`, keeps those shorter than original/high, and blends between.
    """
    C = config.head_dim
    frequency = (1.0 / config.rope_theta ** (np.arange(0, C, 2, dtype=np.float64) / C)).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    if scaling.kind == "linear":
        return frequency / np.float32(scaling.factor)
    return _llama3(frequency, scaling).astype(np.float32)


def _llama3(frequency: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    wavelength = 2 * np.pi / frequency
    turns = scaling.original_max_positions / wavelength
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return (1 - blend) * frequency / scaling.factor + blend * frequency


def rope_tables(
    config: ModelConfig, positions_T: Int[Array, " T"]
) -> tuple[Float[Array, "T 1 C"], Float[Array, "T 1 C"]]:
    """Cosines and signed sines of every position, computed once per forward pass for all layers."""
    angle = positions_T.astype(jnp.float32)[:, None] * inverse_frequencies(config)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([cos, cos], axis=-1)[:, None], jnp.concatenate([-sin, sin], axis=-1)[:, None]


@jax.custom_vjp
def apply_rope(x_THC: Float[Array, "T H C"], tables: tuple[jax.Array, jax.Array]) -> Float[Array, "T H C"]:
    """Rotates channel i with channel i + C/2, the layout of Hugging Face checkpoints.

    Backward is written out as the inverse rotation, because XLA compiles the gradient that JAX derives to a slower
    kernel.
    """
    cos_T1C, sin_T1C = tables
    x = x_THC.astype(jnp.float32)
    return (x * cos_T1C + jnp.roll(x, x.shape[-1] // 2, axis=-1) * sin_T1C).astype(x_THC.dtype)


def _apply_rope_fwd(x_THC, tables):
    return apply_rope(x_THC, tables), tables


def _apply_rope_bwd(tables, dy_THC):
    cos_T1C, sin_T1C = tables
    return apply_rope(dy_THC, (cos_T1C, -sin_T1C)), None


apply_rope.defvjp(_apply_rope_fwd, _apply_rope_bwd)
