"""A gated MLP on Hopper: plain products before the gate, and the LoRA branches around the gate inside its own passes.

    forward    S, bits of x                 one pass over x for gate and up
               gate, up = x W               cuBLAS
               h, S, bits of h              one pass over gate and up (`gate.py`)
               y = h W + S B                inside the GEMM
    backward   dS, dB of down               one pass over dY
               dh = dY W^T                  cuBLAS
               dgate, dup, dA of down       one pass over gate, up and dh
               the rest of gate and up      as siblings (`backend.py`)

Against three separate ops: no pass over h nor dh for the low-rank branch, and three products that are cuBLAS's.

T packed tokens · D model width · F MLP width · R padded rank · A adapters
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import split_graph
from pallas_kernels.dropout import BLOCK
from pallas_kernels.mosaic_gpu import backend
from pallas_kernels.mosaic_gpu.gate import Banks, gate_backward, gate_forward, smem_bytes
from pallas_kernels.mosaic_gpu.gemm import SMEM_BYTES
from pallas_kernels.mosaic_gpu.tiling import ROWS
from pallas_kernels.problem import Operands, Static
from pallas_kernels.split_graph import Prepared, prepare
from pallas_kernels.tuning import config as tuning

MAX_RANK = 64  # of one projection: more, and the small matrices fill the shared memory
GATE, UP = range(2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What backward wants besides the operands: neither h nor its gradient is among it."""

    gate: jax.Array  # [T, F], frozen part
    up: jax.Array
    s: tuple[jax.Array, ...]  # of gate and up
    bits: jax.Array | None
    down_s: tuple[jax.Array, ...]
    down_bits: jax.Array | None


def refusal(static: Static, ops: Operands, down: Operands) -> str | None:
    """Says why the fused passes cannot serve a call whose projections the Hopper backend serves; None: they can.

    Args:
        down: its x need only have the right shape and dtype.
    """
    if len(ops.with_lora) < 2 or not down.with_lora:
        return "a projection has no LoRA"
    width = down.x.shape[1]
    if width % BLOCK:
        return f"{width} features behind the gate: it needs a multiple of {BLOCK}"
    ranks = _ranks(prepare(static, ops), prepare(static, down))
    if max(ranks) > MAX_RANK:
        return f"ranks {ranks}: it takes at most {MAX_RANK}"
    if smem_bytes(ranks) > SMEM_BYTES:
        return f"the passes over the gate with ranks {ranks} do not fit into shared memory"
    return backend.refusal(static, ops) or backend.refusal(static, down)


def forward(static: Static, ops: Operands, down: Operands) -> tuple[jax.Array, Kept]:
    """Returns y [T, D] and what backward wants.

    Args:
        ops: gate and up.
        down: x is not read.
    """
    prepared = prepare(static, ops)
    s, bits = _named(*backend.input_pass(prepared))
    gate, up = (
        checkpoint_name(_plus(jnp.matmul(ops.x, w.astype(ops.x.dtype)), bias), name)
        for w, bias, name in zip(ops.ws, ops.biases, ("gate", "up"), strict=True)
    )
    behind = prepare(static, dataclasses.replace(down, x=gate))
    table = prepared.block_adapter(ROWS)
    h, down_s, down_bits = gate_forward(
        gate, up, s, _banks(prepared, behind), table, down.dropout, offsets=_offsets(prepared)
    )
    down_s, down_bits = _named(down_s, down_bits)
    y = backend.project(prepare(static, dataclasses.replace(down, x=h)), 0, down_s)
    return y, Kept(gate=gate, up=up, s=(s,), bits=bits, down_s=(down_s,), down_bits=down_bits)


def backward(static: Static, ops: Operands, down: Operands, kept: Kept, dy: jax.Array):
    """Returns (dx, dA, dB of gate and up by number) and (dA, dB of down by number)."""
    prepared = prepare(static, ops)
    behind = prepare(static, dataclasses.replace(down, x=kept.gate))
    (down_s,) = kept.down_s
    transposed = jnp.pad(down_s.T, ((0, 0), (0, ROWS)))
    ds, db = backend.output_pass(behind, 0, down_s, transposed, dy)
    ds = split_graph.join_ds(behind, {0: ds})
    dh = jnp.matmul(dy, down.ws[0].astype(dy.dtype).T)
    chunks = behind.chunks(ROWS, tuning.gate_blocks(behind.rows))
    dgate, dup, partials = gate_backward(
        kept.gate, kept.up, dh, kept.s[0], ds, _banks(prepared, behind), kept.down_bits, chunks,
        offsets=_offsets(prepared),
    )  # fmt: skip
    da = split_graph.input_gradients(behind, partials, chunks)
    return backend.backward(static, ops, kept.s, kept.bits, (dgate, dup)), (da, {0: db})


def _named(s: jax.Array, bits: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    return checkpoint_name(s, "lora_s"), None if bits is None else checkpoint_name(bits, "lora_bits")


def _banks(prepared: Prepared, behind: Prepared) -> Banks:
    return Banks(gate=prepared.bank_b(GATE), up=prepared.bank_b(UP), down=behind.transposed_bank_a())


def _offsets(prepared: Prepared) -> tuple[int, int]:
    return prepared.layout.offsets[GATE], prepared.layout.offsets[UP]


def _ranks(prepared: Prepared, behind: Prepared) -> tuple[int, int, int]:
    return prepared.layout.ranks[GATE], prepared.layout.ranks[UP], behind.layout.total


def _plus(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    return y if bias is None else y + bias.astype(y.dtype)
