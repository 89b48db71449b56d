"""Differentiation of the MLP as one op.

T packed tokens · D model width · F MLP width · R padded rank · A adapters
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING

import jax

from pallas_kernels.batching import refuse_vmap
from pallas_kernels.linear.vjp import gradients
from pallas_kernels.manual_axes import vary_like
from pallas_kernels.problem import Operands, Static

if TYPE_CHECKING:
    from types import ModuleType


def passes() -> ModuleType:
    """Hopper's passes at the gate; imported only where they serve."""
    return importlib.import_module("pallas_kernels.mlp.hopper.backend")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def apply(static: Static, ops: Operands, down: Operands) -> jax.Array:
    """Evaluates the MLP; x of `down` is not read."""
    return _forward(static, ops, down)[0]


def _forward(static: Static, ops: Operands, down: Operands):
    inside, inside_down = vary_like(refuse_vmap((ops, down)), ops.x)
    y, saved = passes().forward(static, inside, inside_down)
    return y, (ops, down, saved)


def _backward(static: Static, residuals, dy: jax.Array):
    ops, down, saved = residuals
    inside, inside_down = vary_like((ops, down), ops.x)
    (dx, das, dbs), (down_das, down_dbs) = passes().backward(static, inside, inside_down, saved, dy)
    return gradients(ops, dx.astype(ops.x.dtype), das, dbs), gradients(down, None, down_das, down_dbs)


apply.defvjp(_forward, _backward)
