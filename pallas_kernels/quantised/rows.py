"""Rounding to 8-bit floats (e4m3: three bits of mantissa) with one scale per row.

A row's scale depends on that row only. So a row is rounded to the same values whatever rows lie beside it: adapters
that share a microbatch get what each would get without the others, and a NaN stays in its row.

Scales are powers of two. An 8-bit float loses nothing by that, as its precision is relative, and multiplying by such a
scale rounds nothing: a value is rounded once, to e4m3, and a result once, to its own type.

K columns of a row
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

E4M3 = jnp.float8_e4m3fn
_MANTISSA_BITS = 23  # of a float32
_EXPONENT_OF_LARGEST = 8  # e4m3 ends at 448 = 1.75 · 2^8
# Added to the bits of a float32, it carries into the exponent where the mantissa is above 1.75.
_ABOVE_LARGEST_MANTISSA = (1 << _MANTISSA_BITS) - int(0.75 * (1 << _MANTISSA_BITS)) - 1
_TWICE_BIAS = 254


def round_rows(x: Float[Array, "*B K"]) -> tuple[Float[Array, "*B K"], Float[Array, "*B 1"]]:
    """Rounds every row to e4m3: x ≈ values · scales.

    Args:
        x: of any floating type.
    Returns:
        values, and scales in float32.

    Example:
        >>> values, scales = round_rows(jnp.array([[448.0, 1.0], [7.0, -0.3], [0.0, 0.0]]))
        >>> scales[:2].tolist(), (values.astype(jnp.float32) * scales).tolist()
        ([[1.0], [0.015625]], [[448.0, 1.0], [7.0, -0.3125], [0.0, 0.0]])
    """
    wide = x.astype(jnp.float32)
    scales, inverse = power_of_two_scales(jnp.max(jnp.abs(wide), axis=-1, keepdims=True))
    return (wide * inverse).astype(E4M3), scales


def power_of_two_scales(largest: Float[Array, "*B"]) -> tuple[Float[Array, "*B"], Float[Array, "*B"]]:
    """The smallest power of two s with largest / s <= 448, and 1 / s, exact.

    By integer arithmetic on the bits: logarithms differ between devices. Zero and what no normal float32 can scale get
    the smallest normal scale, infinity and NaN a finite one: the element itself then becomes a NaN.

    Args:
        largest: float32, not negative.

    Example:
        >>> [scale.tolist() for scale in power_of_two_scales(jnp.array([448.0, 449.0, 1.75]))]
        [[1.0, 2.0, 0.00390625], [1.0, 0.5, 256.0]]
    """
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    exponent = ((bits + _ABOVE_LARGEST_MANTISSA) >> _MANTISSA_BITS) - _EXPONENT_OF_LARGEST
    exponent = jnp.maximum(exponent, 1)
    return _from_exponent(exponent), _from_exponent(_TWICE_BIAS - exponent)


def _from_exponent(biased: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(biased << _MANTISSA_BITS, jnp.float32)
