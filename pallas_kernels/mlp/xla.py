"""The gate of the MLP, elementwise in float32.

F MLP width
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


@jax.custom_vjp
def silu_gate(gate: Float[Array, "*B F"], up: Float[Array, "*B F"]) -> Float[Array, "*B F"]:
    """silu(gate) · up of two [..., F], cast back to the dtype of gate. Backward keeps both inputs and nothing else."""
    return _forward(gate, up)[0]


def _forward(gate, up):
    wide = gate.astype(jnp.float32)
    return (wide * jax.nn.sigmoid(wide) * up.astype(jnp.float32)).astype(gate.dtype), (gate, up)


def _backward(residuals, dy):
    # The barrier keeps the compiler from reusing forward's sigmoid: a float32 array of [T, F] alive until backward,
    # 470 MB a layer for 8192 rows of an 8B model.
    gate, up = lax.optimization_barrier(residuals)
    wide, dy = gate.astype(jnp.float32), dy.astype(jnp.float32)
    sigmoid = jax.nn.sigmoid(wide)
    dgate = dy * up.astype(jnp.float32) * sigmoid * (1 + wide * (1 - sigmoid))
    return dgate.astype(gate.dtype), (dy * wide * sigmoid).astype(up.dtype)


silu_gate.defvjp(_forward, _backward)

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "relu": jax.nn.relu,
}


@functools.partial(jax.checkpoint, static_argnums=(0,), prevent_cse=False)
def activate(activation: str, x: Float[Array, "*B F"]) -> Float[Array, "*B F"]:
    """activation(x) in float32, cast back. Backward keeps x only.

    >>> activate("relu2", jnp.array([2.0, -1.0])).tolist()
    [4.0, 0.0]
    """
    return ACTIVATIONS[activation](x.astype(jnp.float32)).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gate_with(activation: str, gate: Float[Array, "*B F"], up: Float[Array, "*B F"]) -> Float[Array, "*B F"]:
    """activation(gate) · up of two [..., F], cast back to the dtype of gate. Backward keeps both inputs only.

    >>> gate_with("relu2", jnp.array([2.0, -1.0]), jnp.array([0.5, 0.5])).tolist()
    [2.0, 0.0]
    """
    return _gate_forward(activation, gate, up)[0]


def _gate_forward(activation, gate, up):
    wide = ACTIVATIONS[activation](gate.astype(jnp.float32))
    return (wide * up.astype(jnp.float32)).astype(gate.dtype), (gate, up)


def _gate_backward(activation, residuals, dy):
    gate, up = lax.optimization_barrier(residuals)  # as for silu_gate
    dy = dy.astype(jnp.float32)
    value, pullback = jax.vjp(ACTIVATIONS[activation], gate.astype(jnp.float32))
    (dgate,) = pullback(dy * up.astype(jnp.float32))
    return dgate.astype(gate.dtype), (dy * value).astype(up.dtype)


gate_with.defvjp(_gate_forward, _gate_backward)
