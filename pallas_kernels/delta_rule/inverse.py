"""The inverse of 1 + L for strictly lower triangular L. B rows, a power of two"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.custom_vjp
def inverse_of_unit_lower(l_BB: Float[Array, "*N B B"]) -> Float[Array, "*N B B"]:
    """(1 + L)⁻¹ by blocks that double: [[A, 0], [C, D]]⁻¹ = [[A⁻¹, 0], [-D⁻¹ C A⁻¹, D⁻¹]].

    As stable as forward substitution. A sum of powers of L needs as few products, and cancels badly where keys repeat.

    >>> inverse_of_unit_lower(jnp.array([[0.0, 0.0], [0.5, 0.0]])).tolist()
    [[1.0, 0.0], [-0.5, 1.0]]
    """
    rows, size, lead = l_BB.shape[-1], 1, l_BB.shape[:-2]
    inverse = jnp.ones((*lead, rows, 1, 1), l_BB.dtype)  # of the blocks on the diagonal
    while size < rows:
        pairs = rows // (2 * size)
        blocks = l_BB.reshape(*lead, pairs, 2, size, pairs, 2, size)
        below = jnp.moveaxis(jnp.diagonal(blocks[..., 1, :, :, 0, :], axis1=-4, axis2=-2), -1, len(lead))
        a, d = inverse[..., ::2, :, :], inverse[..., 1::2, :, :]
        corner = -_dot(d, _dot(below, a))
        top, bottom = jnp.concatenate([a, jnp.zeros_like(a)], -1), jnp.concatenate([corner, d], -1)
        inverse, size = jnp.concatenate([top, bottom], -2), 2 * size
    return inverse[..., 0, :, :]


def _forward(l_BB):
    inverse = inverse_of_unit_lower(l_BB)
    return inverse, inverse


def _backward(inverse, dy):
    turned = jnp.swapaxes(inverse, -1, -2)
    return (-jnp.tril(_dot(turned, _dot(dy, turned)), -1),)


inverse_of_unit_lower.defvjp(_forward, _backward)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision="highest")
