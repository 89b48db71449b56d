"""Differentiation of the linear ops. Residuals are x, S and the keys, and packed keep bits where a backend made them.

T packed tokens · K in features · N out features · R padded rank · A adapters
"""

from __future__ import annotations

import functools

import jax

from pallas_kernels.backend import Backend
from pallas_kernels.manual_axes import vary_like
from pallas_kernels.problem import Operands, Static


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def apply(backend: Backend, static: Static, ops: Operands) -> tuple[jax.Array, ...]:
    """Evaluates every projection of one call."""
    return _forward(backend, static, ops)[0]


def _forward(backend: Backend, static: Static, ops: Operands):
    ys, ss, bits = _compute(backend, static, ops)
    # Residuals hold the caller's own arrays, so a caller that stores residuals can recognise the frozen weights by
    # identity and drop them.
    return ys, (ops, ss, bits)


def _backward(backend: Backend, static: Static, residuals, dys: tuple[jax.Array, ...]):
    ops, ss, bits = residuals
    dys = tuple(dy.astype(ops.x.dtype) for dy in dys)  # y may be wider
    dx, das, dbs = _differentiate(backend, static, ops, ss, bits, dys)
    return (gradients(ops, dx.astype(ops.x.dtype), das, dbs),)


# Functions of their own: equal layers of a model are traced and lowered once. Lowering a kernel takes 0.3 s.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _compute(backend: Backend, static: Static, ops: Operands):
    return backend.forward(static, vary_like(ops, ops.x))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _differentiate(backend: Backend, static: Static, ops: Operands, ss, bits, dys: tuple[jax.Array, ...]):
    return backend.backward(static, vary_like(ops, ops.x), ss, bits, dys)


apply.defvjp(_forward, _backward)


def gradients(ops: Operands, dx: jax.Array | None, das: dict[int, jax.Array], dbs: dict[int, jax.Array]) -> Operands:
    """The cotangent of a call; what is frozen gets symbolic zeros: nothing is ever computed."""
    none = (None,) * len(ops.ws)
    return Operands(
        x=dx,
        ws=none,
        as_=_gradients_of(das, ops.as_),
        bs=_gradients_of(dbs, ops.bs),
        biases=none,
        tile_adapter=None,
        scale=None,
        dropout=None,
    )


def _gradients_of(by_number: dict[int, jax.Array], banks: tuple[jax.Array | None, ...]):
    return tuple(None if a is None else by_number[i].astype(a.dtype) for i, a in enumerate(banks))
