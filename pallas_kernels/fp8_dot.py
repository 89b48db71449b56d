"""A product of two tiles of 8-bit floats in a Triton kernel, on Hopper's matrix units.

Pallas asks Triton for exact partial sums, which those units do not have, and Triton then multiplies in float16 at a
fraction of their rate. Here it may add as they do, with some 14 bits: what cuBLAS does for products of this kind, too.
Needs Pallas's own table of lowerings, which has no public name; tests and `make ptxas` see when it changes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax._src.pallas.triton import lowering
from jax.core import ShapedArray
from jax.extend.core import Primitive

_ALL_STEPS = 2**30  # how many of a sum are added so: all
_dialect = lowering.tt_dialect
_dot = Primitive("fp8_dot")


def fp8_dot(lhs: jax.Array, rhs: jax.Array, acc: jax.Array) -> jax.Array:
    """acc + lhs rhs^T of e4m3 tiles [rows, depth] and [columns, depth]; acc is float32."""
    return _dot.bind(lhs, rhs, acc)


@_dot.def_abstract_eval
def _shape(lhs, rhs, acc):
    assert lhs.shape[1] == rhs.shape[1], (lhs.shape, rhs.shape)
    return ShapedArray(acc.shape, jnp.float32)


def _lowered(context, lhs, rhs, acc):
    del context
    return _dialect.dot(lhs, _dialect.trans(rhs, (1, 0)), acc, max_num_imprecise_acc=_ALL_STEPS)


lowering.triton_lowering_rules[_dot] = _lowered
