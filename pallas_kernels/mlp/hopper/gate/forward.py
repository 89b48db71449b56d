"""h = silu(gate) · up with the low-rank parts of both, and S and the keep bits of the projection after the gate.

A warpgroup has a part of the columns of 64 rows.  It loads S of its rows once and streams gate, up and its adapter's
columns of both banks through a ring of `stages` slots.  h replaces gate in shared memory, is stored from there and, as
drop(h) in place of up, meets A there.

T packed tokens · F MLP width · R padded rank · A adapters
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dropout import BLOCK, WORDS, Dropout, threshold
from pallas_kernels.linear.hopper.mask import keep_words_of, make_words, shifted
from pallas_kernels.linear.hopper.tiling import ROWS, store_fragment
from pallas_kernels.manual_axes import vary_like
from pallas_kernels.mlp.hopper.gate.config import PART, WIDTH, GateConfig, Places
from pallas_kernels.mlp.hopper.gate.tile import (
    launch,
    low,
    low_factors,
    products,
    registers,
    rounded_tile,
    sigmoid,
    store_rounded,
    tile,
)
from pallas_kernels.quantised.rows import E4M3

STEPS = BLOCK // WIDTH  # tiles of a block of keep words
MIN_BLOCKS = 4  # of 256 columns, for a program: fewer, and filling its pipeline shows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Static:
    """What the kernel is built from, besides its operands."""

    split: int  # units of a row
    steps: int  # tiles of a unit
    both: int  # ranks of gate and up together
    rank: int  # of the projection after the gate
    adapters: int
    stages: int
    places: Places
    drops: bool
    rounds: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Refs:
    """Operands and results (gmem: device memory), and a warpgroup's tiles (smem: shared memory) and barriers."""

    gate_gmem: Any  # [T, F]
    up_gmem: Any  # [T, F]
    s_gmem: Any  # [T, R of both]
    b_gmem: Any  # [A + 1, R of both, F]
    a_gmem: Any  # [A + 1, R, F]
    adapter_gmem: Any  # int32 [T / 64]
    inverse_gmem: Any = None  # float32 [T]
    key_gmem: Any = None  # uint32 [A]
    thresh_gmem: Any = None  # uint32 [A]
    row_key_gmem: Any = None  # uint32 [T]
    h_gmem: Any  # [T, F]
    s_out_gmem: Any  # float32 [parts, T, R]
    bits_gmem: Any = None  # uint32 [T, F / 256, 8]
    gate_smem: Any  # [stages, 64, WIDTH]
    up_smem: Any  # [stages, 64, WIDTH]
    b_smem: Any  # [stages, R of both, WIDTH]
    a_smem: Any  # [stages, R, WIDTH]
    s_smem: Any  # [64, R of both]
    rounded_smem: Any = None  # e4m3 [64, WIDTH]: h on its way out
    barrier: Callable[..., Any]  # slot -> barrier, passed by the copies into it
    s_barrier: Callable[..., Any]


class _Unit(NamedTuple):
    """What a warpgroup works on: a part of the columns of 64 rows."""

    part: Any
    rows: Any
    adapter: Any
    dropout: tuple[Any, Any, jax.Array] | None  # key, threshold and row keys
    inverse: jax.Array | None  # of the scales by which rows are rounded

    def columns(self, static: _Static, step) -> Any:
        return pl.ds((self.part * static.steps + step) * WIDTH, WIDTH)


def gate_forward(
    gate: jax.Array,
    up: jax.Array,
    s: jax.Array,
    b: jax.Array,
    a: jax.Array,
    block_adapter: jax.Array,
    dropout: Dropout | None,
    inverse: jax.Array | None = None,
    *,
    places: Places,
    config: GateConfig,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns h [T, F], S of the projection after the gate [T, R], and with dropout keep bits uint32 [T, F / 256, 8].

    Args:
        inverse: float32 [T]; if given, h is h · inverse rounded to e4m3.
        gate, up: [T, F], the frozen products (with bias).
        s: [T, R of both].
        places: (first column of S, rank) of gate and of up.
        b: [A + 1, R of both, F], rows in the order of the columns of S, scales folded in; adapter A is zero.
        a: [A + 1, R, F], of the projection after the gate, transposed, the dropout scale folded in.
        block_adapter: int32 [T / 64], 0..A.
    """
    num_rows, width = gate.shape
    split = parts_of_a_row(width // BLOCK)
    steps = width // WIDTH // split
    static = _Static(
        split=split, steps=steps, both=b.shape[1], rank=a.shape[1],
        adapters=1 if dropout is None else dropout.key.shape[0], stages=min(config.forward_stages, steps),
        places=places, drops=dropout is not None, rounds=inverse is not None,
    )  # fmt: skip
    operands = {"gate_gmem": gate, "up_gmem": up, "s_gmem": s, "b_gmem": b, "a_gmem": a, "adapter_gmem": block_adapter}
    results = {
        "h_gmem": jax.ShapeDtypeStruct((num_rows, width), gate.dtype if inverse is None else E4M3),
        "s_out_gmem": jax.ShapeDtypeStruct((split, num_rows, static.rank), jnp.float32),
    }
    if inverse is not None:
        operands["inverse_gmem"] = inverse
    if dropout is not None:
        operands |= {
            "key_gmem": dropout.key.astype(jnp.uint32), "thresh_gmem": threshold(dropout.rate),
            "row_key_gmem": dropout.row_key.astype(jnp.uint32),
        }  # fmt: skip
        results["bits_gmem"] = jax.ShapeDtypeStruct((num_rows, width // BLOCK, WORDS), jnp.uint32)

    def work(unit, gmem, **scratch):
        in_memory = dict(zip((*operands, *results), gmem, strict=True))
        _work_on(static, _Refs(**in_memory, **scratch), unit)

    out = launch(
        work, tuple(operands.values()), tuple(results.values()), units=num_rows // ROWS * split,
        warpgroups=config.warpgroups, tiles=_tiles(static, gate.dtype),
        barriers={"barrier": (4, static.stages), "s_barrier": (1, 1)}, name="lora_gate",
    )  # fmt: skip
    h, s_out, *bits = vary_like(out, gate)
    return h, s_out.sum(0).astype(gate.dtype), bits[0] if bits else None


def _tiles(static: _Static, dtype: Any) -> dict[str, Any]:
    stages = static.stages
    rounded = {"rounded_smem": rounded_tile()} if static.rounds else {}
    return rounded | {
        "gate_smem": tile(stages, ROWS, dtype=dtype), "up_smem": tile(stages, ROWS, dtype=dtype),
        "b_smem": low(stages, static.both, WIDTH, dtype=dtype), "a_smem": tile(stages, static.rank, dtype=dtype),
        "s_smem": low(ROWS, static.both, dtype=dtype),
    }  # fmt: skip


def _work_on(static: _Static, refs: _Refs, number: jax.Array) -> None:
    """h of a unit, and its partial sum of S."""
    unit = _unit(static, refs, number)
    plgpu.copy_gmem_to_smem(refs.s_gmem.at[unit.rows, :], refs.s_smem, refs.s_barrier())
    for step in range(static.stages):
        _fetch(static, refs, unit, step, step)
    plgpu.barrier_wait(refs.s_barrier())  # S stays for all columns

    @functools.partial(pl.run_scoped, acc=plgpu.ACC((ROWS, static.rank), jnp.float32))
    def _(acc):
        lax.fori_loop(0, static.steps // STEPS, functools.partial(_work_on_block, static, refs, unit, acc), None)
        plgpu.wgmma_wait(0)  # the last product into acc
        store_fragment(refs.s_out_gmem.at[unit.part, unit.rows, :], acc[...])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last stores are read before the memory goes


def _unit(static: _Static, refs: _Refs, number: jax.Array) -> _Unit:
    part, block_row = lax.rem(number, static.split), lax.div(number, static.split)
    rows = pl.ds(block_row * ROWS, ROWS)
    adapter = refs.adapter_gmem[block_row]
    dropout = None
    if static.drops:
        keyed = lax.min(adapter, jnp.asarray(static.adapters - 1, adapter.dtype))  # padding rows meet zeros of A
        key, thresh = refs.key_gmem[keyed], refs.thresh_gmem[keyed]
        row_key = plgpu.load(refs.row_key_gmem.at[rows], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        dropout = key, thresh, row_key
    inverse = None
    if static.rounds:
        inverse = plgpu.load(refs.inverse_gmem.at[rows], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
    return _Unit(part, rows, adapter, dropout, inverse)


def _fetch(static: _Static, refs: _Refs, unit: _Unit, step, slot) -> None:
    """Starts the four copies of a tile into a slot."""
    columns = unit.columns(static, step)
    for source, target in (
        (refs.gate_gmem.at[unit.rows, columns], refs.gate_smem),
        (refs.up_gmem.at[unit.rows, columns], refs.up_smem),
        (refs.b_gmem.at[unit.adapter].at[:, columns], refs.b_smem),
        (refs.a_gmem.at[unit.adapter].at[:, columns], refs.a_smem),
    ):
        plgpu.copy_gmem_to_smem(source, target.at[slot], refs.barrier(slot))


def _work_on_block(static: _Static, refs: _Refs, unit: _Unit, acc, number, _) -> None:
    """The tiles of a block of keep words, which are hashed while the tiles travel."""
    words = None
    if unit.dropout is not None:
        block = unit.part * (static.steps // STEPS) + number
        words = make_words(*unit.dropout, block)
        store_fragment(refs.bits_gmem.at[unit.rows, block, :], words)
    lax.fori_loop(0, STEPS, functools.partial(_work_on_tile, static, refs, unit, acc, number, words), None)


def _work_on_tile(static: _Static, refs: _Refs, unit: _Unit, acc, number, words: jax.Array | None, quarter, _) -> None:
    """h of a tile, and acc += drop(h) A."""
    stages = static.stages
    step = number * STEPS + quarter
    slot = lax.rem(step, stages)
    if words is not None:
        words = shifted(words, quarter * (WIDTH // WORDS))
    gate_smem, up_smem = refs.gate_smem.at[slot], refs.up_smem.at[slot]
    plgpu.barrier_wait(refs.barrier(slot))  # gate, up and both banks have arrived
    stored_smem = refs.rounded_smem if static.rounds else gate_smem
    if static.rounds:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous tile has left rounded_smem
    rounding = (refs.rounded_smem, unit.inverse) if static.rounds else None
    # Its first products wait for all that was issued, so for the previous step's product into acc, too.
    gate_tile(gate_smem, up_smem, refs.s_smem, refs.b_smem.at[slot], words, static.places, rounding)
    plgpu.commit_smem()  # all warps have written before the copy engine and the tensor cores read
    plgpu.copy_smem_to_gmem(stored_smem, refs.h_gmem.at[unit.rows, unit.columns(static, step)])
    kept_smem = gate_smem if words is None else up_smem
    plgpu.wgmma(acc, kept_smem, refs.a_smem.at[slot].transpose((1, 0)))  # awaited by the next step
    # The previous step's slot is free: its store has been read, its product has completed, and every warp is past the
    # barrier above.
    plgpu.wait_smem_to_gmem(1, wait_read_only=True)

    @pl.when((step > 0) & (step - 1 + stages < static.steps))
    def _():
        _fetch(static, refs, unit, step - 1 + stages, lax.rem(step - 1, stages))


def gate_tile(
    gate_smem, up_smem, s_smem, b_smem, words: jax.Array | None, places: Places, rounding: tuple | None
) -> None:
    """Replaces gate by h = silu(g) u and, with dropout, up by drop(h), a part of the columns at a time.

    Args:
        rounding: tile for rounded rows, and the inverse of their scales. With it and dropout, gate is left as it is.
    """
    dtype = gate_smem.dtype
    for first in range(0, WIDTH, PART):
        columns = pl.ds(first, PART)
        low_gate, low_up = products(*(low_factors(s_smem, b_smem.at[:, columns], part) for part in places))
        g = registers(gate_smem.at[:, columns]) + low_gate
        u = registers(up_smem.at[:, columns]) + low_up
        # The results replace operands that are in registers now; only `rounded_smem` is a tile of its own.
        h = g * sigmoid(g) * u
        if rounding is not None:
            store_rounded(rounding[0].at[:, columns], h, rounding[1])
        if rounding is None or words is None:
            gate_smem[:, columns] = h.astype(dtype)
        if words is not None:
            up_smem[:, columns] = keep_words_of(h, words, first=first // WORDS).astype(dtype)


def parts_of_a_row(blocks: int) -> int:
    """The most parts with at least MIN_BLOCKS blocks of 256 columns each."""
    fitting = [part for part in range(1, blocks // MIN_BLOCKS + 1) if blocks % part == 0]
    return max(fitting, default=1)
