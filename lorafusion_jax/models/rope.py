"""Rotary position embeddings. Dims: `T` packed tokens · `H` heads · `C` head width."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lorafusion_jax.families.rope import Rope, RopeScaling
from lorafusion_jax.models.segments import Segments


def inverse_frequencies(rope: Rope, head_dim: int, *, long: bool = False) -> np.ndarray:
    """Angle per position of each pair of the channels that rotate, float32 [C/2].

    f_i = theta^(-2i/C). "linear" divides all by `factor`. "llama3" divides wavelengths longer than original/low by
    `factor`, keeps those shorter than original/high, and blends between. "yarn" keeps frequencies that turn more than
    `beta_fast` times in the original context, divides those that turn less than `beta_slow` times by `factor`, and
    blends between. "longrope" divides each by a factor of its own. f_i = 0 for pairs beyond `share`.

    Args:
        long: of samples that are longer than longrope's original context.
    """
    C, scaling = rope.channels or head_dim, rope.scaling
    frequency = (1.0 / rope.theta ** (np.arange(0, C, 2, dtype=np.float64) / C)).astype(np.float32)
    frequency[int(rope.share * C // 2) :] = 0.0
    if scaling is None:
        return frequency
    if scaling.kind == "linear":
        return frequency / np.float32(scaling.factor)
    if scaling.kind == "yarn":
        return _yarn(frequency, scaling, rope.theta, C).astype(np.float32)
    if scaling.kind == "longrope":
        factors = scaling.long_factors if long else scaling.short_factors
        return frequency / np.asarray(factors, np.float32)
    return _llama3(frequency, scaling).astype(np.float32)


def _llama3(frequency: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    wavelength = 2 * np.pi / frequency
    turns = scaling.original_max_positions / wavelength
    span = max(scaling.high_freq_factor - scaling.low_freq_factor, np.finfo(np.float32).tiny)  # 0 in Llama 4
    blend = (turns - scaling.low_freq_factor) / span
    blend = np.clip(blend, 0.0, 1.0)
    return (1 - blend) * frequency / scaling.factor + blend * frequency


def _yarn(frequency: np.ndarray, scaling: RopeScaling, theta: float, C: int) -> np.ndarray:
    def channel_of(turns: float) -> float:
        """The channel whose frequency turns so many times in the original context."""
        return C * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel_of(scaling.beta_fast), channel_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, C - 1)
    span = 0.001 if low == high else high - low
    ramp = np.clip((np.arange(C // 2, dtype=np.float32) - low) / span, 0.0, 1.0)
    return frequency / scaling.factor * ramp + frequency * (1 - ramp)


def rope_tables(
    rope: Rope, head_dim: int, positions_T: Int[Array, " T"], segments: Segments
) -> tuple[Float[Array, "T 1 C"], Float[Array, "T 1 C"]]:
    """Cosines and signed sines of every position, computed once per forward pass for all layers.

    The length of its own sample chooses longrope's factors of a row, so a packed sample is computed as alone. Segments
    may end in rows of padding, whose positions are 0, so the largest position says how long the sample is.
    """
    frequencies = inverse_frequencies(rope, head_dim)
    scaling = rope.scaling
    if scaling is not None and scaling.kind == "longrope":
        ids = jnp.asarray(segments.ids)
        last_M = jax.ops.segment_max(positions_T, ids, len(segments.lengths), indices_are_sorted=True)
        lengths_T1 = 1 + last_M[ids][:, None]
        long = inverse_frequencies(rope, head_dim, long=True)
        frequencies = jnp.where(lengths_T1 > scaling.original_max_positions, long, frequencies)
    angle = positions_T.astype(jnp.float32)[:, None] * frequencies
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if scaling is not None and scaling.attention_factor != 1:
        cos, sin = cos * scaling.attention_factor, sin * scaling.attention_factor
    return jnp.concatenate([cos, cos], axis=-1)[:, None], jnp.concatenate([-sin, sin], axis=-1)[:, None]


def query_scale(rope: Rope, positions_T: Int[Array, " T"]) -> Float[Array, "T 1 1"]:
    """1 + beta · log(1 + ⌊(position + offset) / context⌋)"""
    turns_T = jnp.floor((positions_T.astype(jnp.float32) + rope.query_offset) / rope.query_context)
    return (1 + rope.query_beta * jnp.log1p(turns_T))[:, None, None]


def halves_of_pairs(x_THC: Float[Array, "T H C"], channels: int) -> Float[Array, "T H C"]:
    """Puts neighbours of the first channels into halves, as `apply_rope` wants them. No score sees it where q and k
    are both reordered."""
    head, tail = x_THC[..., :channels], x_THC[..., channels:]
    halves = head.reshape(*head.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(head.shape)
    return jnp.concatenate([halves, tail], axis=-1)


@jax.custom_vjp
def apply_rope(x_THC: Float[Array, "T H C"], tables: tuple[jax.Array, jax.Array]) -> Float[Array, "T H C"]:
    """Rotates channel i with channel i + C/2, the layout of Hugging Face checkpoints. C is the width of the tables;
    further channels of a head do not rotate.

    Backward is written out as the inverse rotation, because XLA compiles the gradient that JAX derives to a slower
    kernel.
    """
    cos_T1C, sin_T1C = tables
    channels = cos_T1C.shape[-1]
    if channels < x_THC.shape[-1]:
        rotated = apply_rope(x_THC[..., :channels], tables)
        return jnp.concatenate([rotated, x_THC[..., channels:]], axis=-1)
    x = x_THC.astype(jnp.float32)
    return (x * cos_T1C + jnp.roll(x, x.shape[-1] // 2, axis=-1) * sin_T1C).astype(x_THC.dtype)


def _apply_rope_fwd(x_THC, tables):
    return apply_rope(x_THC, tables), tables


def _apply_rope_bwd(tables, dy_THC):
    cos_T1C, sin_T1C = tables
    return apply_rope(dy_THC, (cos_T1C, -sin_T1C)), None


apply_rope.defvjp(_apply_rope_fwd, _apply_rope_bwd)
