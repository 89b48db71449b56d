"""The two ends of a part of a layer that devices compute together: tensor parallelism.

Every device has the whole x and its own heads, or its own columns of the MLP. Its o_proj or down_proj makes one term of
y, and its gradient of x is one term, too.

    y = Σ_d f_d(x)        dx = Σ_d (∂f_d / ∂x)ᵀ dy

Each sum is one all-reduce, inside `jax.shard_map`.
Source: Megatron-LM, Shoeybi et al. 2019 (arXiv:1909.08053), figure 3.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

TENSOR = "tensor"  # the mesh axis


@jax.custom_vjp
def copied(x: Array) -> Array:
    """Returns x, which every device has; backward adds up the devices' gradients of it."""
    return x


copied.defvjp(lambda x: (x, None), lambda _, dx: (lax.psum(dx, TENSOR),))


@jax.custom_vjp
def added_up(y: Array) -> Array:
    """Adds up the devices' terms of y; the gradient of every term is that of y."""
    return lax.psum(y, TENSOR)


added_up.defvjp(lambda y: (lax.psum(y, TENSOR), None), lambda _, dy: (dy,))


def part_start(size: int) -> Array:
    """Returns where the part of this device begins, if each has `size` elements; int32."""
    return lax.axis_index(TENSOR) * size


def on_first(value: Array) -> Array:
    """Returns the value on the first device, and zeros on the others: what a later sum must count once."""
    return jnp.where(lax.axis_index(TENSOR) == 0, value, jnp.zeros_like(value))
