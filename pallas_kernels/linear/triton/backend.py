"""Backend "pallas_triton": every pass as a Triton kernel; sm_80 and newer, interpreted on a CPU.

T packed tokens · K in features · N out features · R padded rank · A adapters
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.checkpoint_names import named_bits, named_s
from pallas_kernels.device import target_platform, wide_integers
from pallas_kernels.exact import precision_of
from pallas_kernels.linear import split_graph
from pallas_kernels.linear.split_graph import Prepared, prepare
from pallas_kernels.linear.triton.gemm import gemm, gemm_config
from pallas_kernels.problem import Operands, Static
from pallas_kernels.sizes import round_up

MAX_RANK = 256
_MULTIPLE = 64  # features are padded to it where they are not one


def unsupported_reason(static: Static, ops: Operands) -> str | None:
    """Says why a call cannot be served; None: it can."""
    if target_platform() not in ("gpu", "cuda", "cpu"):
        return f"it needs an NVIDIA GPU, not {target_platform()!r}"
    if wide_integers():
        return "its kernels count in 32 bits: turn jax_enable_x64 off"
    if ops.quantised:
        return "its products read plain weights"
    if ops.x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"x is {ops.x.dtype}; it takes bfloat16, float16 and float32"
    if not static.single and static.tile % 16:
        return f"tiles of {static.tile} rows: it needs a multiple of 16"
    layout = split_graph.rank_layout(ops)
    if layout.total > MAX_RANK:
        return f"ranks of all projections together are {layout.total}: it takes up to {MAX_RANK}"
    return None


def forward(static: Static, ops: Operands):
    """Returns every y, S (one array for all projections) and the packed keep bits."""
    padded_static, padded = _pad(static, ops)
    prepared = prepare(padded_static, padded)
    bits = named_bits(split_graph.keep_bits(prepared))
    s = named_s(split_graph.shared_input(prepared, bits)) if ops.with_lora else None
    ys = tuple(_project(prepared, i, s) for i in range(len(ops.ws)))
    ys = tuple(y[: ops.x.shape[0], : w.shape[1]] for y, w in zip(ys, ops.ws, strict=True))
    return ys, () if s is None else (s,), bits


def backward(static: Static, ops: Operands, ss: tuple[jax.Array, ...], bits: jax.Array | None, dys):
    """Returns dx, and dA and dB (float32) by projection number."""
    padded_static, padded = _pad(static, ops)
    prepared = prepare(padded_static, padded)
    rows = padded.x.shape[0]
    dys = tuple(_pad_to(dy.astype(ops.x.dtype), (rows, w.shape[1])) for dy, w in zip(dys, padded.ws, strict=True))
    das, dbs, fused = {}, {}, None
    dx: Any = 0.0
    if ops.with_lora:
        partials = {}
        for i in ops.with_lora:
            partials[i], db = split_graph.output_side(prepared, i, ss[0], dys[i])
            dbs[i] = db[:, :, : ops.ws[i].shape[1]]
        (ds,) = split_graph.join_ds(
            prepared, [partials[i] for i in prepared.layout.offsets], columns=prepared.layout.total
        )
        das = {i: da[:, : ops.x.shape[1]] for i, da in split_graph.input_side(prepared, ds, bits).items()}
        # dS of all projections stands side by side, so one product adds the low-rank part of all of them. It is the
        # smallest share of the widest.
        fused = split_graph.widest(ops)
        dx = _dx(prepared, fused, dys[fused], ds, bits)
    for i, (dy, w) in enumerate(zip(dys, padded.arrays, strict=True)):
        if i != fused:
            dx = jnp.matmul(dy, w.T, precision=precision_of(dy.dtype)) + dx  # in this order one pass, as on Hopper
    return dx[: ops.x.shape[0], : ops.x.shape[1]], das, dbs


def _project(prepared: Prepared, i: int, s: jax.Array | None) -> jax.Array:
    ops, layout, static = prepared.ops, prepared.layout, prepared.static
    if i not in layout.ranks:
        y = jnp.matmul(ops.x, ops.arrays[i], precision=precision_of(ops.x.dtype))
        bias = ops.biases[i]
        return y if bias is None else y + bias
    num_in, num_out = ops.ws[i].shape
    explicit = static.config.forward
    item = ops.x.dtype.itemsize
    heuristic = gemm_config(num_in, num_out, layout.ranks[i], static.tile, item)
    config = explicit or prepared.tuned("triton_fwd", num_in, num_out, layout.ranks[i], heuristic)
    return gemm(
        ops.x,
        ops.arrays[i],
        s,
        prepared.bank_b(i),
        prepared.block_adapter(config.block_m),
        transposed=False,
        low_offset=layout.offsets[i],
        bias=ops.biases[i],
        config=config,
        interpret=static.interpret,
    )


def _dx(prepared: Prepared, i: int, dy: jax.Array, ds: jax.Array, bits: jax.Array | None) -> jax.Array:
    static, ops = prepared.static, prepared.ops
    num_in, num_out = ops.ws[i].shape
    explicit, total = static.config.dx, prepared.layout.total
    heuristic = gemm_config(num_out, num_in, total, static.tile, ops.x.dtype.itemsize)
    config = explicit or prepared.tuned("triton_dx", num_in, num_out, total, heuristic)
    return gemm(
        dy,
        ops.arrays[i],
        ds,
        prepared.bank_a(),
        prepared.block_adapter(config.block_m),
        transposed=True,
        bits=bits,
        config=config,
        interpret=static.interpret,
    )


def _pad(static: Static, ops: Operands) -> tuple[Static, Operands]:
    """Pads rows and features to what the kernels divide by; a copy only where a shape is odd."""
    rows, num_in = ops.x.shape
    if static.single:  # one adapter: its tile is all rows
        padded_rows = round_up(rows, 128 if rows > 64 else 16)
        static = dataclasses.replace(static, tile=padded_rows)
    else:
        padded_rows = rows
    padded_in = round_up(num_in, _MULTIPLE)
    widths = [round_up(w.shape[1], _MULTIPLE) for w in ops.ws]
    dtype = ops.x.dtype
    dropout = ops.dropout
    if dropout is not None:
        dropout = dataclasses.replace(dropout, row_key=_pad_to(dropout.row_key, (padded_rows,)))

    def padded(arrays, shape):
        return tuple(None if a is None else _pad_to(a, shape(a, n)) for a, n in zip(arrays, widths, strict=True))

    return static, Operands(
        x=_pad_to(ops.x, (padded_rows, padded_in)),
        ws=tuple(_pad_to(w, (padded_in, n)).astype(dtype) for w, n in zip(ops.arrays, widths, strict=True)),
        as_=padded(ops.as_, lambda a, n: (a.shape[0], padded_in, a.shape[2])),
        bs=padded(ops.bs, lambda b, n: (b.shape[0], b.shape[1], n)),
        biases=padded(ops.biases, lambda b, n: (n,)),
        tile_adapter=ops.tile_adapter,
        scale=ops.scale,
        dropout=dropout,
    )


def _pad_to(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    pads = [(0, padded - size) for size, padded in zip(array.shape, shape, strict=True)]
    return jnp.pad(array, pads) if any(after for _, after in pads) else array
