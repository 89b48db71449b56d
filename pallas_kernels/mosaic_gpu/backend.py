"""Backend "pallas_mosaic_gpu": Hopper GEMMs with the low-rank product inside, Triton kernels for the other passes.

T packed tokens · K in features · N out features · R padded rank · A adapters
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import split_graph
from pallas_kernels.device import is_hopper, num_sms
from pallas_kernels.mosaic_gpu.gemm import GemmConfig, gemm
from pallas_kernels.problem import Operands, Static
from pallas_kernels.split_graph import Prepared, prepare
from pallas_kernels.tuning import config as tuning


def refusal(static: Static, ops: Operands) -> str | None:
    """Says why a call cannot be served; None: it can."""
    if not is_hopper():
        return "it needs a Hopper GPU (sm_90)"
    if ops.x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"x is {ops.x.dtype}; Hopper's matrix units take bfloat16 and float16"
    rows, num_in = ops.x.shape
    if static.tile % 64:
        return f"tiles of {static.tile} rows: it needs a multiple of 64"
    if num_in % 128:
        return f"{num_in} in features: it needs a multiple of 128"
    prepared = prepare(static, ops)
    for i in ops.with_lora:
        num_out = ops.ws[i].shape[1]
        if num_out % 128:
            return f"{num_out} out features: it needs a multiple of 128"
        if _forward_config(prepared, i) is None:
            return f"no tiles fit {rows} x {num_in} -> {num_out} with rank {prepared.layout.ranks[i]}"
    if ops.with_lora and _dx_config(prepared, split_graph.widest(ops)) is None:
        return f"no tiles fit the gradient of x with rank {prepared.layout.total}"
    return None


def forward(static: Static, ops: Operands):
    """Returns every y, S (one array for all projections) and the packed keep bits."""
    prepared = prepare(static, ops)
    bits = split_graph.keep_bits(prepared)
    s = split_graph.shared_input(prepared, bits) if ops.with_lora else None
    ys = tuple(_project(prepared, i, s) for i in range(len(ops.ws)))
    return ys, () if s is None else (s,), bits


def backward(static: Static, ops: Operands, ss: tuple[jax.Array, ...], bits: jax.Array | None, dys):
    """Returns dx, and dA and dB (float32) by projection number."""
    prepared = prepare(static, ops)
    das, dbs, fused = {}, {}, None
    dx = 0.0
    if ops.with_lora:
        ds = {}
        for i in ops.with_lora:
            ds[i], dbs[i] = split_graph.output_side(prepared, i, ss[0], dys[i])
        joined = split_graph.join_ds(prepared, ds)
        das = split_graph.input_side(prepared, joined, bits)
        fused = split_graph.widest(ops)
        dx = _gemm(
            prepared, dys[fused], ops.ws[fused], joined, prepared.bank_a(), _dx_config(prepared, fused),
            transposed=True, bits=bits,
        )  # fmt: skip
    for i, (dy, w) in enumerate(zip(dys, ops.ws, strict=True)):
        if i != fused:
            dx = dx + jnp.matmul(dy, w.astype(dy.dtype).T)
    return dx, das, dbs


def _project(prepared: Prepared, i: int, s: jax.Array | None) -> jax.Array:
    ops, layout = prepared.ops, prepared.layout
    if i not in layout.ranks:
        y = jnp.matmul(ops.x, ops.ws[i].astype(ops.x.dtype))
    else:
        y = _gemm(
            prepared, ops.x, ops.ws[i], s, prepared.bank_b(i), _forward_config(prepared, i),
            transposed=False, low_offset=layout.offsets[i],
        )  # fmt: skip
    return y if ops.biases[i] is None else y + ops.biases[i].astype(y.dtype)


def _gemm(prepared: Prepared, lhs, rhs, low, bank, config: GemmConfig, *, transposed, low_offset=0, bits=None):
    return gemm(
        lhs,
        rhs.astype(lhs.dtype),
        low,
        bank,
        prepared.block_adapter(config.tile_m),
        transposed=transposed,
        low_offset=low_offset,
        bits=bits,
        config=config,
        num_sms=num_sms(),
    )


def _forward_config(prepared: Prepared, i: int) -> GemmConfig | None:
    static, ops = prepared.static, prepared.ops
    given = static.config.forward if static.config else None
    num_in, num_out = ops.ws[i].shape
    rank = prepared.layout.ranks[i]
    config = given or tuning.mosaic_gemm_config(prepared.rows, num_in, num_out, rank, static.tile, transposed=False)
    return config and (given or prepared.tuned("mosaic_fwd", num_in, num_out, rank, config))


def _dx_config(prepared: Prepared, i: int) -> GemmConfig | None:
    static, ops = prepared.static, prepared.ops
    given = static.config.dx if static.config else None
    num_in, num_out = ops.ws[i].shape
    rank = prepared.layout.total
    config = given or tuning.mosaic_gemm_config(prepared.rows, num_out, num_in, rank, static.tile, transposed=True)
    return config and (given or prepared.tuned("mosaic_dx", num_in, num_out, rank, config))
