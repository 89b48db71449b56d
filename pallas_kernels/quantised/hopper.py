"""Hopper's backend for weights of 8-bit floats: cuBLAS's products between our passes.

    forward    S = drop(x) A                     the pass over x of `linear.hopper`
               x8 = q(x)                         once for all projections
               y_i = x8 W8_i, scales, + S_i B_i  a product, and one pass that finishes it
    backward   dS_i, dB_i, dA, mask (dS A^T)     the passes of `linear.hopper`
               dx = sum_i q(dY_i sw_i) W8_i^T · scale + low-rank part

T packed tokens · K in features · N out features · R padded rank · A adapters
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.batching import refuse_vmap
from pallas_kernels.dropout import BLOCK
from pallas_kernels.linear.hopper import backend as hopper
from pallas_kernels.linear.split_graph import Prepared, prepare
from pallas_kernels.problem import Operands, Static
from pallas_kernels.quantised.fp8 import Fp8Weight
from pallas_kernels.quantised.triton.finish import ROWS, finish
from pallas_kernels.quantised.triton.rows import round_rows
from pallas_kernels.sizes import row_block


def unsupported_reason(static: Static, ops: Operands) -> str | None:
    """Says why a call cannot be served; None: it can."""
    if not all(isinstance(w, Fp8Weight) for w in ops.ws):
        return "it multiplies weights of 8-bit floats only"
    if ops.dropout is not None and (ops.first_column is not None or ops.x.shape[1] % BLOCK):
        return f"dropout on {ops.x.shape[1]} features of a row: it needs whole blocks of {BLOCK}"
    odd = [size for w in ops.ws for size in w.shape if size % 16]
    if odd:
        return f"{odd[0]} features: products of 8-bit floats need a multiple of 16"
    plain = tuple(jax.ShapeDtypeStruct(w.shape, ops.x.dtype) for w in ops.ws)
    return hopper.unsupported_reason(static, dataclasses.replace(ops, ws=plain))


def forward(static: Static, ops: Operands):
    """Returns every y, S (one array for all projections) and the packed keep bits."""
    prepared = prepare(static, refuse_vmap(ops))
    s, bits = hopper.input_pass(prepared) if ops.with_lora else (None, None)
    x8, scales_T1 = round_rows(ops.x, interpret=static.interpret)
    ys = tuple(_project(prepared, i, s, x8, scales_T1) for i in range(len(ops.ws)))
    return ys, () if s is None else (s,), bits


def backward(static: Static, ops: Operands, ss: tuple[jax.Array, ...], bits: jax.Array | None, dys):
    """Returns dx, and dA and dB (float32) by projection number."""
    prepared = prepare(static, ops)
    das, dbs = {}, {}
    low, ds = None, None
    if ops.with_lora:
        partials, dbs = hopper.output_passes(prepared, ss[0], dys)
        das, low, ds = hopper.input_gradient_pass(prepared, partials, bits)
    dx: Any = 0.0 if low is None else low.astype(jnp.float32)
    for i, (dy, w) in enumerate(zip(dys, ops.ws, strict=True)):
        dy8, scales_T1 = round_rows(dy, w.scales, interpret=static.interpret)
        sums = w.transposed_sums(dy8, dy.dtype)
        if i == 0 and ds is not None:
            dx = _finish(prepared, sums, scales_T1, None, ds, prepared.transposed_bank_a()).astype(jnp.float32)
        else:
            dx = sums.astype(jnp.float32) * scales_T1 + dx
    return dx.astype(ops.x.dtype), das, dbs


def _project(prepared: Prepared, i: int, s: jax.Array | None, x8: jax.Array, scales_T1: jax.Array) -> jax.Array:
    """y = x W (+ bias) + scale S B."""
    ops, layout = prepared.ops, prepared.layout
    w = ops.ws[i]
    assert isinstance(w, Fp8Weight), i
    sums = w.sums(x8, ops.x.dtype)
    if s is None or i not in layout.ranks:
        y = (sums.astype(jnp.float32) * scales_T1 * w.scales).astype(ops.x.dtype)
    else:
        y = _finish(prepared, sums, scales_T1, w.scales, s, prepared.bank_b(i), layout.offsets[i])
    bias = ops.biases[i]
    return y if bias is None else y + bias.astype(y.dtype)


def _finish(prepared: Prepared, sums, row_scales, column_scales, s, bank, rank_offset: int = 0) -> jax.Array:
    blocks = prepared.block_adapter(row_block(prepared.static.tile, ROWS))
    return finish(
        sums, row_scales, column_scales, s, bank, blocks, rank_offset=rank_offset, interpret=prepared.static.interpret
    )
