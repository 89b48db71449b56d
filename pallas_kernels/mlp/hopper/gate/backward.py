"""dgate, dup and partial sums of dA of the projection after the gate, from the frozen part of the gradient of h.

A warpgroup has 64 columns of a chunk's row blocks.  It loads its adapter's columns of both banks once and streams gate,
up and dh through a ring of `stages` slots.  The gradients replace what they are made of, in shared memory, and are
stored from there; drop(h) replaces dh and meets dS there.

T packed tokens · F MLP width · R padded rank · A adapters · C chunks of row blocks
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dropout import BLOCK, WORDS
from pallas_kernels.linear.hopper.mask import first_bit, keep_words_of, load_words
from pallas_kernels.linear.hopper.tiling import ROWS, block_of_chunk, store_fragment
from pallas_kernels.manual_axes import vary_like
from pallas_kernels.mlp.hopper.gate.config import PART, WIDTH, BackwardInputs, GateConfig, Places
from pallas_kernels.mlp.hopper.gate.tile import launch, low, low_factors, products, registers, sigmoid, tile


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Static:
    """What the kernel is built from, besides its operands."""

    columns: int  # tiles of a row
    both: int  # ranks of gate and up together
    rank: int  # of the projection after the gate
    size: int  # row blocks of a chunk
    stages: int
    places: Places
    has_bits: bool
    wants_h: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Refs:
    """Operands and results (gmem: device memory), and a warpgroup's tiles (smem: shared memory) and barriers."""

    gate_gmem: Any  # [T, F]
    up_gmem: Any  # [T, F]
    dh_gmem: Any  # [T, F]
    low_gmem: Any  # [T, R of both + R]: S of gate and up, then dS of the projection after the gate
    ds_t_gmem: Any  # [R, T]
    b_gmem: Any  # [A + 1, R of both, F]
    a_gmem: Any  # [A + 1, R, F]
    blocks_gmem: Any  # int32, row blocks of all chunks
    count_gmem: Any  # int32 [C], row blocks of a chunk
    adapter_gmem: Any  # int32 [C]
    bits_gmem: Any = None  # uint32 [T, F / 256, 8]
    dgate_gmem: Any  # [T, F]
    dup_gmem: Any  # [T, F]
    da_gmem: Any  # float32 [C, F, R]
    h_gmem: Any = None  # [T, F], drop(h)
    gate_smem: Any  # [stages, 64, WIDTH], as are up and dh
    up_smem: Any
    dh_smem: Any
    ds_t_smem: Any  # [stages, R, 64]
    low_smem: Any  # [stages, 64, R of both + R]
    words_smem: Any = None  # uint32 [stages, 64, 8]
    b_smem: Any  # [R of both, WIDTH]
    a_smem: Any  # [R, WIDTH]
    barrier: Callable[..., Any]  # slot -> barrier, passed by the copies into it
    bank_barrier: Callable[..., Any]  # passed by the copies of both banks


class _Unit(NamedTuple):
    """What a warpgroup works on: a tile's columns of a chunk's rows."""

    chunk: Any
    col0: Any
    columns: Any
    count: Any  # of row blocks
    block_of: Callable[[Any], Any]  # step -> row block


def gate_backward(
    inputs: BackwardInputs, *, places: Places, config: GateConfig, wants_h: bool = False
) -> tuple[jax.Array, ...]:
    """Returns dgate and dup [T, F], partial sums of dA, float32 [C, F, R] (without the dropout scale), and drop(h)
    [T, F] where it is wanted.

    Args:
        places: (first column of S, rank) of gate and of up.
    """
    gate, up, dh, s, ds, b, a, bits, chunks = inputs
    (num_rows, num_columns), (total, size) = gate.shape, chunks.blocks.shape
    static = _Static(
        columns=num_columns // WIDTH, both=b.shape[1], rank=a.shape[1], size=size,
        stages=min(config.backward_stages, size), places=places, has_bits=bits is not None, wants_h=wants_h,
    )  # fmt: skip
    operands = {
        "gate_gmem": gate, "up_gmem": up, "dh_gmem": dh, "low_gmem": jnp.concatenate([s, ds], axis=1),
        "ds_t_gmem": ds.T, "b_gmem": b, "a_gmem": a, "blocks_gmem": chunks.blocks.reshape(-1),
        "count_gmem": chunks.count, "adapter_gmem": chunks.adapter,
    }  # fmt: skip
    if bits is not None:
        operands["bits_gmem"] = bits
    wide = jax.ShapeDtypeStruct((num_rows, num_columns), gate.dtype)
    results = {
        "dgate_gmem": wide, "dup_gmem": wide,
        "da_gmem": jax.ShapeDtypeStruct((total, num_columns, static.rank), jnp.float32),
    }  # fmt: skip
    if wants_h:
        results["h_gmem"] = wide

    def work(unit, gmem, **scratch):
        in_memory = dict(zip((*operands, *results), gmem, strict=True))
        _work_on(static, _Refs(**in_memory, **scratch), unit)

    out = launch(
        work, tuple(operands.values()), tuple(results.values()), units=static.columns * total,
        warpgroups=config.warpgroups, tiles=_tiles(static, gate.dtype),
        barriers={"barrier": (6 if static.has_bits else 5, static.stages), "bank_barrier": (2, 1)},
        name="lora_gate_backward",
    )  # fmt: skip
    return vary_like(out, gate)


def _tiles(static: _Static, dtype: Any) -> dict[str, Any]:
    stages = static.stages
    tiles = {
        "gate_smem": tile(stages, ROWS, dtype=dtype), "up_smem": tile(stages, ROWS, dtype=dtype),
        "dh_smem": tile(stages, ROWS, dtype=dtype), "ds_t_smem": tile(stages, static.rank, dtype=dtype),
        "low_smem": low(stages, ROWS, static.both + static.rank, dtype=dtype),
        "b_smem": low(static.both, WIDTH, dtype=dtype), "a_smem": low(static.rank, WIDTH, dtype=dtype),
    }  # fmt: skip
    if static.has_bits:
        tiles["words_smem"] = plgpu.SMEM((stages, ROWS, WORDS), jnp.uint32)
    return tiles


def _work_on(static: _Static, refs: _Refs, number: jax.Array) -> None:
    """The gradients of a unit's columns, and their partial sum of dA."""
    chunk = lax.div(number, static.columns)
    col0 = lax.rem(number, static.columns) * WIDTH  # neighbours read neighbouring columns: whole pages of memory
    unit = _Unit(
        chunk=chunk, col0=col0, columns=pl.ds(col0, WIDTH), count=refs.count_gmem[chunk],
        block_of=functools.partial(block_of_chunk, refs.blocks_gmem, chunk, static.size),
    )  # fmt: skip
    adapter = lax.max(refs.adapter_gmem[chunk], jnp.int32(0))
    for bank_gmem, bank_smem in ((refs.b_gmem, refs.b_smem), (refs.a_gmem, refs.a_smem)):
        plgpu.copy_gmem_to_smem(bank_gmem.at[adapter].at[:, unit.columns], bank_smem, refs.bank_barrier())
    for step in range(static.stages):
        _fetch(static, refs, unit, jnp.int32(step), step, unit.block_of(jnp.int32(step)))
    plgpu.barrier_wait(refs.bank_barrier())  # both banks stay for all rows
    first = first_bit(col0)

    @functools.partial(pl.run_scoped, acc=plgpu.ACC((WIDTH, static.rank), jnp.float32))
    def _(acc):
        lax.fori_loop(0, unit.count, functools.partial(_work_on_rows, static, refs, unit, first, acc), None)
        plgpu.wgmma_wait(0)  # the last product into acc
        store_fragment(refs.da_gmem.at[chunk, unit.columns, :], acc[...])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last stores are read before the memory goes


def _fetch(static: _Static, refs: _Refs, unit: _Unit, step, slot, block) -> None:
    """Starts the copies of a row block into a slot; nothing after the chunk's last block."""

    @pl.when(step < unit.count)
    def _():
        # All copies of a row block arrive at one barrier, for which `_work_on_rows` waits before it reads any of them.
        rows, barrier = pl.ds(block * ROWS, ROWS), refs.barrier(slot)
        for source, target in (
            (refs.gate_gmem, refs.gate_smem),
            (refs.up_gmem, refs.up_smem),
            (refs.dh_gmem, refs.dh_smem),
        ):
            plgpu.copy_gmem_to_smem(source.at[rows, unit.columns], target.at[slot], barrier)
        plgpu.copy_gmem_to_smem(refs.ds_t_gmem.at[:, rows], refs.ds_t_smem.at[slot], barrier)
        plgpu.copy_gmem_to_smem(refs.low_gmem.at[rows, :], refs.low_smem.at[slot], barrier)
        if static.has_bits:
            words_gmem = refs.bits_gmem.at[rows, lax.div(unit.col0, BLOCK), :]
            plgpu.copy_gmem_to_smem(words_gmem, refs.words_smem.at[slot], barrier)


def _work_on_rows(static: _Static, refs: _Refs, unit: _Unit, first: jax.Array, acc, step, _) -> None:
    """The gradients of a row block, and acc += drop(h)^T dS of it.

    Args:
        first: the bit of the first column.
    """
    stages = static.stages
    slot = lax.rem(step, stages)
    # Numbers of blocks are read one step before they are needed, to hide the latency of device memory.
    this, ahead = unit.block_of(step), unit.block_of(step - 1 + stages)
    rows = pl.ds(this * ROWS, ROWS)
    plgpu.barrier_wait(refs.barrier(slot))  # this row block has arrived
    words = load_words(refs.words_smem.at[slot], first) if static.has_bits else None
    # gradient_tile's first products wait for all that was issued, so for the previous step's product into acc, too.
    gradient_tile(
        refs.gate_smem.at[slot],
        refs.up_smem.at[slot],
        refs.dh_smem.at[slot],
        functools.partial(_factors, static, refs, slot),
        words,
    )
    plgpu.commit_smem()  # all warps have written before the copy engine and the tensor cores read
    dgate_smem, dup_smem, h_smem = refs.gate_smem.at[slot], refs.up_smem.at[slot], refs.dh_smem.at[slot]
    plgpu.copy_smem_to_gmem(dgate_smem, refs.dgate_gmem.at[rows, unit.columns])
    plgpu.copy_smem_to_gmem(dup_smem, refs.dup_gmem.at[rows, unit.columns])
    if static.wants_h:
        plgpu.copy_smem_to_gmem(h_smem, refs.h_gmem.at[rows, unit.columns])
    plgpu.wgmma(acc, h_smem.transpose((1, 0)), refs.ds_t_smem.at[slot].transpose((1, 0)))  # awaited by the next step
    # The previous step's slot is free: all stores but this step's have been read, its product has completed, and every
    # warp is past the barrier above.
    plgpu.wait_smem_to_gmem(3 if static.wants_h else 2, wait_read_only=True)
    pl.when(step > 0)(lambda: _fetch(static, refs, unit, step - 1 + stages, lax.rem(step - 1, stages), ahead))


def _factors(static: _Static, refs: _Refs, slot, columns) -> list[tuple[Any, Any]]:
    """The operands of the low-rank parts of dh, gate and up, for `products`."""
    low_smem = refs.low_smem.at[slot]
    ds = low_smem.at[:, pl.ds(static.both, static.rank)], refs.a_smem.at[:, columns]
    return [ds, *(low_factors(low_smem, refs.b_smem.at[:, columns], part) for part in static.places)]


def gradient_tile(
    gate_smem,
    up_smem,
    dh_smem,
    factors: Callable[[Any], Sequence],
    words: jax.Array | None,
    round_to: Callable[[int, Any, jax.Array], None] | None = None,
) -> None:
    """Replaces gate by dgate, up by dup and dh by drop(h), a part of the columns at a time.

    silu = g sigmoid(g);  h = silu u;  dup = dh silu;  dgate = dh u (sigmoid(g) + silu (1 - sigmoid(g)))

    Args:
        factors: columns -> the operands of the low-rank parts of dh, gate and up, for `products`.
        round_to: called with (0, first column, that part of dgate) and (1, first column, that part of dup).
    """
    dtype = gate_smem.dtype
    for first in range(0, WIDTH, PART):
        columns = pl.ds(first, PART)
        low_dh, low_gate, low_up = products(*factors(columns))  # complete when this returns
        if words is not None:
            low_dh = keep_words_of(low_dh, words, first=first // WORDS)
        # Results overwrite the operands, part by part, in the tiles from which they leave.
        dh = registers(dh_smem.at[:, columns]) + low_dh
        u = registers(up_smem.at[:, columns]) + low_up
        g = registers(gate_smem.at[:, columns]) + low_gate
        sigmoid_g = sigmoid(g)
        silu = g * sigmoid_g
        h = silu * u
        dropped = h if words is None else keep_words_of(h, words, first=first // WORDS)
        dh_smem[:, columns] = dropped.astype(dtype)
        dup = dh * silu
        up_smem[:, columns] = dup.astype(dtype)
        if round_to is not None:
            round_to(1, first, dup)
        dgate = dh * u * (sigmoid_g + silu * (1.0 - sigmoid_g))
        gate_smem[:, columns] = dgate.astype(dtype)
        if round_to is not None:
            round_to(0, first, dgate)
