"""fp8 scales from upper bounds, for rows that are still being written.

A pass that writes a tile of h does not know the other tiles of the row. But |h| = |silu(gate) up| is at most the
largest |gate| of the row times the largest |up|, both known from the products before the gate; dgate and dup have such
bounds, too. Scales are powers of two, and an 8-bit float is as precise near its largest value as 14 binades below it:
a scale that is a few binades too large rounds to the same values.

T packed tokens · F MLP width · R padded rank · A adapters
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.linear.hopper.tiling import ROWS
from pallas_kernels.mlp.hopper.gate.config import Rounding
from pallas_kernels.quantised.rows import power_of_two_scales

SLACK = 1.02  # for two factors rounded to bfloat16, 2^-8 each, and a sigmoid of the hardware
LARGEST_NEGATIVE_SILU = 0.28
LARGEST_SLOPE = 1.1  # of silu

type Scales = tuple[jax.Array, jax.Array]  # of rows [T], and their inverse


def with_low_rank(
    largest_T: Float[Array, " T"], s: Float[Array, "T R"], bank: Float[Array, "A R F"], owners: Int[Array, " blocks"]
) -> Float[Array, " T"]:
    """A bound of every row of y + S B, from one of y.

    Args:
        owners: adapter of every block of 64 rows.
    """
    most_AR = jnp.max(jnp.abs(bank), axis=2).astype(jnp.float32)
    terms = jnp.abs(s.astype(jnp.float32)).reshape(len(owners), ROWS, -1) * most_AR[owners][:, None]
    return largest_T + terms.sum(2).reshape(-1)


def of_h(gate_T: Float[Array, " T"], up_T: Float[Array, " T"]) -> Scales:
    return _scales(_silu(gate_T) * up_T)


def of_gradients(
    dh_T: Float[Array, " T"],
    gate_T: Float[Array, " T"],
    up_T: Float[Array, " T"],
    factors: Sequence[Float[Array, " F"]],
) -> tuple[Sequence[Float[Array, " T"]], Rounding]:
    """Scales of dgate and of dup, times the factors of their columns."""
    bounds = (LARGEST_SLOPE * dh_T * up_T, dh_T * _silu(gate_T))
    pairs = [_scales(bound * jnp.max(factor)) for bound, factor in zip(bounds, factors, strict=True)]
    inverse = jnp.stack([inverse for _, inverse in pairs])
    return [scales for scales, _ in pairs], Rounding(factor=jnp.stack(factors), inverse=inverse)


def _silu(gate_T: jax.Array) -> jax.Array:
    return jnp.maximum(gate_T, LARGEST_NEGATIVE_SILU)


def _scales(bound_T: jax.Array) -> Scales:
    """A row without a finite bound becomes NaN: the hardware would round infinity to the largest number."""
    scales, inverse = power_of_two_scales(bound_T * SLACK)
    return jnp.where(jnp.isfinite(bound_T), scales, jnp.nan), inverse
