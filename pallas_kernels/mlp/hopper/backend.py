"""A gated MLP on Hopper: plain products before the gate, and the LoRA branches around the gate inside its own passes.

    forward    S, bits of x                 one pass over x for gate and up
               gate, up = x W               cuBLAS
               h, S, bits of h              one pass over gate and up (`gate/`)
               y = h W + S B                inside the GEMM
    backward   dS, dB of down               one pass over dY
               dh = dY W^T                  cuBLAS
               dgate, dup, dA of down,      one pass over gate, up and dh; where padded ranks are above 16,
               dS, dB of gate and up        dS and dB are passes of their own
               dA, dx of gate and up        as siblings (`backend.py`)

Against three separate ops: no pass over h nor dh for the low-rank branch, and three products that are cuBLAS's.

T packed tokens · D model width · F MLP width · R padded rank · A adapters
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import ModuleType

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import policy
from pallas_kernels.checkpoint_names import named_bits, named_s
from pallas_kernels.linear import split_graph
from pallas_kernels.linear.extra_ranks import ExtraRanks
from pallas_kernels.linear.hopper import backend
from pallas_kernels.linear.hopper.tiling import ROWS
from pallas_kernels.linear.split_graph import Prepared, prepare
from pallas_kernels.mlp.hopper import rounding
from pallas_kernels.mlp.hopper.gate import gate_backward, gate_forward, wide_gate_backward
from pallas_kernels.mlp.hopper.gate.config import (
    BackwardInputs,
    GateConfig,
    Places,
    WideGateConfig,
    gate_blocks,
    gate_config,
    wide_gate_config,
)
from pallas_kernels.problem import Operands, Static, linear_shape
from pallas_kernels.quantised import hopper as quantised

GATE, UP = range(2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Residuals:
    """What backward wants besides the operands: neither h nor its gradient is among it."""

    gate: jax.Array  # [T, F], without the low-rank part of the first ranks
    up: jax.Array
    s: tuple[jax.Array, ...]  # of gate and up: first ranks, extra ones
    bits: jax.Array | None
    down_s: tuple[jax.Array, ...]
    down_bits: jax.Array | None
    bounds: tuple[jax.Array, jax.Array] | None = None  # of |gate| and |up| of every row, where passes round


def unsupported_reason(static: Static, ops: Operands, down: Operands) -> str | None:
    """Says why the fused passes cannot serve a call whose projections the Hopper backend serves; None: they can.

    Args:
        ops: gate and up.
        down: its x need only have the right shape and dtype.
    """
    if reason := policy.mlp_unsupported_reason(linear_shape(static, ops), linear_shape(static, down)):
        return reason
    prepared, prepared_down = (prepare(static, backend.first_and_extra(static, call)[0]) for call in (ops, down))
    if _config(prepared, prepared_down) is None:
        ranks = f"{prepared.layout.total} and {prepared_down.layout.total}"
        return f"the passes over the gate with ranks of {ranks} do not fit into shared memory"
    return next(filter(None, (_linears(call).unsupported_reason(static, call) for call in (ops, down))), None)


def forward(static: Static, ops: Operands, down: Operands) -> tuple[jax.Array, Residuals]:
    """Returns y [T, D] and what backward wants.

    Args:
        ops: gate and up.
        down: x is not read.
    """
    ops, extra = backend.first_and_extra(static, ops)
    prepared = prepare(static, ops)
    s, bits = backend.input_pass(prepared)
    measured = _measured_parts(prepared, down, extra)
    bounds = None
    if measured is not None:
        ss, wide = (s,), [y for y, _ in measured]
        bounds = _bounds(prepared, s, [largest for _, largest in measured])
    elif extra is None:
        ss, wide = (s,), _linears(ops).frozen_parts(prepared)
    else:
        ss = (s, named_s(extra.down(ops.x, bits)))
        wide = _with_extra_ranks(prepared, extra, ss[1])
    gate, up = (
        checkpoint_name(backend.add_bias(y, bias), name)
        for y, bias, name in zip(wide, ops.biases, ("gate", "up"), strict=True)
    )
    down, extra_down = backend.first_and_extra(static, dataclasses.replace(down, x=gate))
    prepared_down = prepare(static, down)
    table = prepared.block_adapter(ROWS)
    scales, inverse = (None, None) if bounds is None else rounding.of_h(*bounds)
    h, down_s, down_bits = gate_forward(
        gate,
        up,
        s,
        _bank_b(prepared),
        prepared_down.transposed_bank_a(),
        table,
        down.dropout,
        inverse,
        places=_places(prepared),
        config=_config(prepared, prepared_down),
    )
    down_s, down_bits = named_s(down_s), named_bits(down_bits)
    if scales is None:
        y = _linears(down).project(prepare(static, dataclasses.replace(down, x=h)), 0, down_s)
    else:
        y = quantised.project_rounded(prepared_down, 0, down_s, (h, scales[:, None]))
    down_ss = (down_s,)
    if extra_down is not None:
        down_ss = (down_s, named_s(extra_down.down(h, down_bits)))
        y = extra_down.up(0, y, down_ss[1])
    saved = Residuals(gate=gate, up=up, s=ss, bits=bits, down_s=down_ss, down_bits=down_bits, bounds=bounds)
    return y, saved


def backward(static: Static, ops: Operands, down: Operands, saved: Residuals, dy: jax.Array):
    """Returns (dx, dA, dB of gate and up by number) and (dA, dB of down by number)."""
    ops, extra = backend.first_and_extra(static, ops)
    down, extra_down = backend.first_and_extra(static, dataclasses.replace(down, x=saved.gate))
    prepared, prepared_down = prepare(static, ops), prepare(static, down)
    down_s = saved.down_s[0]
    transposed = jnp.pad(down_s.T, ((0, 0), (0, ROWS)))
    down_ds, db = backend.output_pass(prepared_down, 0, down_s, transposed, dy)
    (ds_transposed,) = split_graph.join_ds(prepared_down, [down_ds], rows=prepared_down.layout.total)
    ds = ds_transposed.T  # the pass over the gate transposes it back: neither becomes a launch
    ds_extra, db_extra = None, None
    rounded, scales = None, ()
    if saved.bounds is not None:
        dh, largest = quantised.measured_gradient(prepared_down, 0, dy)
        largest = rounding.with_low_rank(
            largest, ds, prepared_down.transposed_bank_a(), prepared_down.block_adapter(ROWS)
        )
        scales, rounded = rounding.of_gradients(largest, *saved.bounds, quantised.column_scales(prepared))
    elif extra_down is None:
        dh = _linears(down).frozen_gradient(prepared_down, 0, dy)
    else:
        ds_extra, db_extra = extra_down.output_side(0, saved.down_s[1], dy)
        dh = _gradient_of_all_ranks(prepared_down, extra_down, dy, ds_extra, saved.down_bits)
    wide = _wide_config(prepared, prepared_down)
    chunks = prepared_down.chunks(ROWS, gate_blocks(prepared_down.rows) if wide is None else wide.blocks_per_chunk)
    inputs = BackwardInputs(
        gate=saved.gate, up=saved.up, dh=dh, s=saved.s[0], ds=ds, b=_bank_b(prepared),
        a=prepared_down.transposed_bank_a(), bits=saved.down_bits, chunks=chunks,
    )  # fmt: skip
    places, wants_h = _places(prepared), extra_down is not None
    if wide is None:
        config = _config(prepared, prepared_down)
        dgate, dup, partials, *h = gate_backward(inputs, places=places, config=config, wants_h=wants_h)
        dx, das, dbs = _linears(ops).backward(static, ops, saved.s[:1], saved.bits, (dgate, dup))
    else:
        dgate, dup, ds_partials, partials, *db_partials = wide_gate_backward(
            inputs, places=places, config=wide, wants_h=wants_h, rounding=rounded
        )
        h = db_partials[2:]
        dbs = {
            i: split_graph.output_gradient(prepared, i, sums, chunks.adapter)
            for i, sums in zip((GATE, UP), db_partials[:2], strict=True)
        }
        if rounded is None:
            das, dx = _linears(ops).gradients_from_ds(prepared, [ds_partials], saved.bits, (dgate, dup))
        else:
            values = [(array, scale[:, None]) for array, scale in zip((dgate, dup), scales, strict=True)]
            das, dx = quantised.gradients_of_rounded(prepared, [ds_partials], saved.bits, values)
    if extra is not None:
        dx, das, dbs = backend.add_extra(extra, saved.s[1], saved.bits, (dgate, dup), dx, das, dbs)
    down_das, down_dbs = split_graph.input_gradients(prepared_down, partials, chunks), {0: db}
    if extra_down is not None:
        da_extra = extra_down.input_side(h[0], ds_extra, None)  # what was dropped is zero already
        down_das, down_dbs = extra_down.with_first(down_das, down_dbs, da_extra, {0: db_extra})
    return (dx, das, dbs), (down_das, down_dbs)


def _measured_parts(prepared: Prepared, down: Operands, extra: ExtraRanks | None) -> list[quantised.Measured] | None:
    """x W of gate and up with the largest of each row, where the passes at the gate are to round what they write."""
    if not prepared.ops.quantised or extra is not None:
        return None
    down = dataclasses.replace(down, x=jax.ShapeDtypeStruct((prepared.rows, down.ws[0].shape[0]), prepared.ops.x.dtype))
    if backend.first_and_extra(prepared.static, down)[1] is not None:
        return None
    if _wide_config(prepared, prepare(prepared.static, down)) is None:
        return None
    return quantised.measured_parts(prepared)


def _bounds(prepared: Prepared, s: jax.Array, largest: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Of |gate| and |up| of every row, with bias and low-rank part."""
    bounds = []
    for i, bound in enumerate(largest):
        bias, offset, rank = prepared.ops.biases[i], prepared.layout.offsets[i], prepared.layout.ranks[i]
        bound = bound if bias is None else bound + jnp.max(jnp.abs(bias)).astype(bound.dtype)
        s_i, owners = s[:, offset : offset + rank], prepared.block_adapter(ROWS)
        bounds.append(named_s(rounding.with_low_rank(bound, s_i, prepared.bank_b(i), owners)))
    return bounds[GATE], bounds[UP]


def _with_extra_ranks(prepared: Prepared, extra: ExtraRanks, s: jax.Array) -> list[jax.Array]:
    """x W of gate and up, with S B of their extra ranks added."""
    ops = prepared.ops
    if ops.quantised:
        return [extra.up(i, y, s) for i, y in enumerate(quantised.frozen_parts(prepared))]
    return [extra.matmul(i, ops.x, w.astype(ops.x.dtype), s) for i, w in enumerate(ops.arrays)]


def _gradient_of_all_ranks(
    prepared: Prepared, extra: ExtraRanks, dy: jax.Array, ds: jax.Array, bits: jax.Array | None
) -> jax.Array:
    """dY W^T of the down projection, with mask * (dS A^T) of its extra ranks added."""
    if prepared.ops.quantised:
        return extra.add_dx(quantised.frozen_gradient(prepared, 0, dy), ds, bits)
    return extra.matmul_dx(dy, prepared.ops.arrays[0].astype(dy.dtype), ds, bits)


def _linears(ops: Operands) -> ModuleType:
    """Whose products these are: cuBLAS's and ours of plain weights, or those of 8-bit floats."""
    return quantised if ops.quantised else backend


def _bank_b(prepared: Prepared) -> jax.Array:
    """B of gate and up, [A + 1, R of both, F]: one below the other as their columns of S lie side by side."""
    bank = jnp.concatenate([prepared.bank_b(i) for i in prepared.layout.offsets], axis=1)
    return jnp.pad(bank, ((0, 0), (0, prepared.layout.total - bank.shape[1]), (0, 0)))


def _config(prepared: Prepared, prepared_down: Prepared) -> GateConfig | None:
    explicit = prepared.static.config.gate
    drops = prepared_down.ops.dropout is not None
    return explicit or gate_config(prepared.layout.total, prepared_down.layout.total, drops=drops)


def _wide_config(prepared: Prepared, prepared_down: Prepared) -> WideGateConfig | None:
    heuristic = wide_gate_config(prepared.rows, prepared.layout.total, prepared_down.layout.total)
    explicit = prepared.static.config.wide_gate
    return heuristic and (explicit or heuristic)


def _places(prepared: Prepared) -> Places:
    layout = prepared.layout
    return (layout.offsets[GATE], layout.ranks[GATE]), (layout.offsets[UP], layout.ranks[UP])
