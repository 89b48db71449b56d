"""All gradients around the gate in one pass: those of `gate_backward`, and dS and dB of gate and up besides.

dgate and dup are not read again, 0.47 GB of 8192 x 14336.  A block has a few row blocks of one adapter and every
parts-th tile of 64 columns.  Its warpgroups share a ring of `stages` slots, each with a tile of gate, up and dh:

    stream   loads tiles into free slots, and stores gradients          ready[slot]   a tile has arrived
    gate     some of them: replace a tile by its gradients              gated[slot]   the slot holds gradients
    sum      multiplies gradients with S, dS and B                      summed[slot]  only the store may still read

A slot is loaded again once it is summed and stored.  dS of the rows stays in the registers of the summing warpgroup
over all columns; dA and dB of a column tile are summed over the rows and written as partial sums.  Registers suffice
for ranks of 16.

T packed tokens · F MLP width · R padded rank · A adapters · C chunks of row blocks
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dropout import BLOCK, WORDS
from pallas_kernels.linear.hopper.mask import first_bit, load_words
from pallas_kernels.linear.hopper.tiling import ROWS, store_fragment
from pallas_kernels.manual_axes import vary_like
from pallas_kernels.mlp.hopper.gate.backward import gradient_tile
from pallas_kernels.mlp.hopper.gate.config import (
    PART,
    RANK,
    WIDTH,
    BackwardInputs,
    Place,
    Places,
    Rounding,
    WideGateConfig,
)
from pallas_kernels.mlp.hopper.gate.tile import COMPILER_PARAMS, rounded_tile, store_rounded, tile
from pallas_kernels.quantised.rows import E4M3

DS = 2  # index of dS in the tables below, after the two halves of S

# A product with a tile whose rows are 64 bytes long takes 32 ranks at a time: 16 wanted ones and 16 that meet zeros.
# Left: windows of the rows [S first half, S second half, dS]; right: of [B first half, 0, B second half, 0, A].
LOW_ROWS: tuple[Place, ...] = ((0, RANK), (RANK, RANK), (2 * RANK, RANK))
LOW_WINDOWS: tuple[Place, ...] = ((0, 2 * RANK), (0, 2 * RANK), (RANK, 2 * RANK))
BANK_ROWS: tuple[Place, ...] = ((0, RANK), (2 * RANK, RANK), (4 * RANK, RANK))
BANK_WINDOWS: tuple[Place, ...] = ((0, 2 * RANK), (RANK, 2 * RANK), (3 * RANK, 2 * RANK))
BANKS = 2  # column tiles of the bank in shared memory


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refs:
    """Operands and results (_g: device memory), tiles of a block (_s: shared memory), and barriers."""

    gate_g: Any  # [T, F], as are up and dh
    up_g: Any
    dh_g: Any
    low_g: Any  # [3 R, T]: both halves of S, and dS, transposed
    bank_g: Any  # [A (+ 1), 5 R, F], see `stacked`
    blocks_g: Any  # int32, row blocks of all chunks
    count_g: Any  # int32 [C], row blocks of a chunk
    adapter_g: Any  # int32 [C]
    bits_g: Any = None  # uint32 [T, F / 256, 8]
    inverse_g: Any = None  # float32 [2, T], see `Rounding`
    factor_g: Any = None  # float32 [2, F]
    dgate_g: Any  # [T, F], as is dup
    dup_g: Any
    ds_g: Any  # float32 [parts, T, 2 R]
    da_g: Any  # float32 [C, F, R], as are both dB
    db_gate_g: Any
    db_up_g: Any
    h_g: Any = None  # [T, F], drop(h)
    gate_s: Any  # [stages, 64, WIDTH], as are up and dh
    up_s: Any
    dh_s: Any
    low_s: Any  # [row blocks of a chunk, 3 R, 64]
    bank_s: Any  # [BANKS, 5 R, WIDTH]
    words_s: Any = None  # uint32 [stages, 64, 8]
    rounded_s: Any = None  # e4m3 [gating, 2, 64, WIDTH]: dgate and dup on their way out
    ready: Any
    gated: Any
    summed: Any
    bank_ready: Any
    bank_free: Any
    low_ready: Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Static:
    """What a kernel is built from, besides its operands."""

    config: WideGateConfig
    columns: int  # tiles of a row
    size: int  # row blocks of a chunk
    parts: int
    places: Places
    has_bits: bool
    wants_h: bool
    rounds: bool

    @property
    def sides(self) -> tuple[int, int]:
        """The halves of S of gate and of up, 0 or 1."""
        return self.places[0][0] // RANK, self.places[1][0] // RANK


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """The tiles of a block: number n is row block n % count of column tile n // count."""

    chunk: jax.Array
    part: jax.Array  # of the columns
    adapter: jax.Array
    count: jax.Array  # of row blocks
    steps: jax.Array  # number of column tiles


def wide_gate_backward(
    inputs: BackwardInputs,
    *,
    places: Places,
    config: WideGateConfig,
    wants_h: bool = False,
    rounding: Rounding | None = None,
) -> tuple[jax.Array, ...]:
    """Returns dgate and dup [T, F], partial sums of dS of gate and up, float32 [P, T, R of both], partial sums of dA
    (without the dropout scale) and of dB of gate and of up (without scale; transposed), float32 [C, F, R] each, and
    drop(h) [T, F] where it is wanted.

    Args:
        inputs: with ranks of 16.
        places: (first column of S, rank) of gate and of up.
        rounding: dgate and dup come back in e4m3, times these factors.
    """
    gate, up, dh, s, ds, b, a, bits, chunks = inputs
    assert not (wants_h and rounding), "the streaming warpgroup stores h after dgate and dup"
    assert (b.shape[1], a.shape[1]) == (2 * RANK, RANK), (b.shape, a.shape)
    (num_rows, num_columns), (total, size) = gate.shape, chunks.blocks.shape
    columns = num_columns // WIDTH
    static = _Static(
        config=config, columns=columns, size=size,
        parts=max(1, min(config.parts, columns // BANKS)),  # each part has a column
        places=places, has_bits=bits is not None, wants_h=wants_h, rounds=rounding is not None,
    )  # fmt: skip
    operands = {
        "gate_g": gate, "up_g": up, "dh_g": dh, "low_g": jnp.concatenate([s, ds], 1).T,
        "bank_g": stacked(b, a), "blocks_g": chunks.blocks.reshape(-1), "count_g": chunks.count,
        "adapter_g": chunks.adapter,
    }  # fmt: skip
    if bits is not None:
        operands["bits_g"] = bits
    if rounding is not None:
        operands |= {"inverse_g": rounding.inverse, "factor_g": rounding.factor}
    gradient = jax.ShapeDtypeStruct((num_rows, num_columns), gate.dtype if rounding is None else E4M3)
    sums = jax.ShapeDtypeStruct((total, num_columns, RANK), jnp.float32)
    results = {
        "dgate_g": gradient, "dup_g": gradient,
        "ds_g": jax.ShapeDtypeStruct((static.parts, num_rows, 2 * RANK), jnp.float32),
        "da_g": sums, "db_gate_g": sums, "db_up_g": sums,
    }  # fmt: skip
    if wants_h:
        results["h_g"] = gradient
    scratch = _scratch(static, gate.dtype)

    def body(*arrays):
        refs = Refs(**dict(zip((*operands, *results, *scratch), arrays, strict=True)))
        _work_on(static, refs, lax.axis_index("program"), lax.axis_index("wg"))

    run = plgpu.kernel(
        body,
        out_type=tuple(results.values()),
        grid=(total * static.parts,),
        grid_names=("program",),
        num_threads=config.gating + 2,
        thread_name="wg",
        kernel_name="lora_wide_gate_backward",
        scratch_types=tuple(scratch.values()),  # positional: named scratch would be allocated in alphabetical order
        compiler_params=COMPILER_PARAMS,
    )
    return vary_like(run(*operands.values()), gate)


def stacked(b: jax.Array, a: jax.Array) -> jax.Array:
    """Stacks [B first half, 0, B second half, 0, A]: [A (+ 1), 5 R, F], see BANK_WINDOWS."""
    a = a[: b.shape[0]]  # without a table of adapters, B has no zero adapter for padding rows
    zeros = jnp.zeros_like(a)
    return jnp.concatenate([b[:, :RANK], zeros, b[:, RANK:], zeros, a], axis=1)


def _scratch(static: _Static, dtype: Any) -> dict[str, Any]:
    stages = static.config.stages
    scratch = {
        "gate_s": tile(stages, ROWS, dtype=dtype), "up_s": tile(stages, ROWS, dtype=dtype),
        "dh_s": tile(stages, ROWS, dtype=dtype), 
        "low_s": tile(static.size, 3 * RANK, dtype=dtype),  # transposed: 64 rows of S are as wide as a tile
        "bank_s": tile(BANKS, 5 * RANK, dtype=dtype),
        "ready": plgpu.Barrier(num_arrivals=4 if static.has_bits else 3, num_barriers=stages),
        "gated": plgpu.Barrier(num_barriers=stages),
        "summed": plgpu.Barrier(num_barriers=stages),
        "bank_ready": plgpu.Barrier(num_barriers=BANKS),
        "bank_free": plgpu.Barrier(num_arrivals=static.config.gating + 1, num_barriers=BANKS),
        "low_ready": plgpu.Barrier(num_arrivals=static.size),
    }  # fmt: skip
    if static.has_bits:
        scratch["words_s"] = plgpu.SMEM((stages, ROWS, WORDS), jnp.uint32)
    if static.rounds:
        scratch["rounded_s"] = rounded_tile(static.config.gating, 2)
    return scratch


def _work_on(static: _Static, refs: Refs, program: jax.Array, wg: jax.Array) -> None:
    chunk, part = lax.div(program, static.parts), lax.rem(program, static.parts)
    work = _Work(
        chunk=chunk, part=part, adapter=lax.max(refs.adapter_g[chunk], jnp.int32(0)), count=refs.count_g[chunk],
        steps=lax.div(static.columns - part + (static.parts - 1), static.parts),
    )  # fmt: skip
    many = static.config.gating
    pl.when((work.count > 0) & (wg < many))(lambda: _gate(static, refs, work, wg))
    pl.when((work.count > 0) & (wg == many))(lambda: _sum(static, refs, work))
    pl.when((work.count > 0) & (wg == many + 1))(lambda: _stream(static, refs, work))


def _gate(static: _Static, refs: Refs, work: _Work, wg: jax.Array) -> None:
    """A gating warpgroup: takes tiles wg, wg + gating, ...; as `gating` divides `stages`, its slots are always its."""
    many, stages = static.config.gating, static.config.stages
    plgpu.barrier_wait(refs.low_ready)  # S and dS stay for all columns

    def gate_column(step, _):
        before = step * work.count  # number of tiles in the column tiles before
        first = lax.rem(wg + many - lax.rem(before, many), many)  # row block of this warpgroup's first tile
        bank, bit = lax.rem(step, BANKS), first_bit(_column(static, work, step))
        plgpu.barrier_wait(refs.bank_ready.at[bank])  # the bank's columns of this step have arrived

        def gate_tile(i, _):
            j = first + i * many
            slot = lax.rem(before + j, stages)
            plgpu.barrier_wait(refs.ready.at[slot])  # gate, up and dh have arrived
            words = load_words(refs.words_s.at[slot], bit) if static.has_bits else None
            factors = functools.partial(_factors, refs.low_s.at[j], refs.bank_s.at[bank], static.sides)
            wide = refs.gate_s.at[slot], refs.up_s.at[slot], refs.dh_s.at[slot]
            if static.rounds:
                column, rows = _column(static, work, step), _row_range(static, refs, work, j)
                gradient_tile(*wide, factors, words, _rounded(refs, wg, rows, column))
            else:
                gradient_tile(*wide, factors, words)
            plgpu.commit_smem()  # all warps have written before stores and products read
            plgpu.barrier_arrive(refs.gated.at[slot])
            if static.rounds:
                for number, gmem in enumerate((refs.dgate_g, refs.dup_g)):
                    plgpu.copy_smem_to_gmem(refs.rounded_s.at[wg, number], gmem.at[rows, pl.ds(column, WIDTH)])

        lax.fori_loop(0, lax.div(lax.max(work.count - first, 0) + (many - 1), many), gate_tile, None)
        plgpu.barrier_arrive(refs.bank_free.at[bank])  # gating and summing warpgroups have read it

    lax.fori_loop(0, work.steps, gate_column, None)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # rounded tiles are read before the block's memory goes


def _rounded(refs: Refs, wg: jax.Array, rows: Any, column: jax.Array) -> Callable[[int, Any, jax.Array], None]:
    """The `round_to` of `gradient_tile`: writes a part of dgate or dup, rounded, to this warpgroup's rounded_s."""
    inverse = [
        plgpu.load(refs.inverse_g.at[number, rows], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        for number in range(2)
    ]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous tile has left rounded_s

    def store(number: int, first: int, value: jax.Array) -> None:
        factors = refs.factor_g.at[number, pl.ds(column + first, PART)]
        factor = plgpu.load(factors, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
        value = value * lax.broadcast_in_dim(factor, value.shape, [1])
        store_rounded(refs.rounded_s.at[wg, number].at[:, pl.ds(first, PART)], value, inverse[number])

    return store


def _factors(low, bank, sides, columns) -> list[tuple[Any, Any]]:
    """The operands of the low-rank parts of dh, gate and up, for `products`."""
    return [
        (_transposed(_rows(low, LOW_WINDOWS[index])), _rows(bank, BANK_WINDOWS[index]).at[:, columns])
        for index in (DS, *sides)
    ]


def _sum(static: _Static, refs: Refs, work: _Work) -> None:
    """The summing warpgroup: keeps dS of all row blocks in registers."""
    plgpu.barrier_wait(refs.low_ready)  # S and dS of all row blocks have arrived, and stay

    @functools.partial(pl.run_scoped, ds_accs=[[plgpu.ACC((ROWS, RANK), jnp.float32)] * 2] * static.size)
    def _(ds_accs):
        lax.fori_loop(0, work.steps, functools.partial(_sum_column, static, refs, work, ds_accs), None)
        for j in range(static.size):

            @pl.when(j < work.count)
            def _(j=j):
                rows = _row_range(static, refs, work, j)
                for (first, rank), acc in zip(static.places, ds_accs[j], strict=True):
                    store_fragment(refs.ds_g.at[work.part, rows, pl.ds(first, rank)], acc[...])


def _sum_column(static: _Static, refs: Refs, work: _Work, ds_accs, step, _) -> None:
    """dA and dB of a column tile, and its share of dS."""
    bank = lax.rem(step, BANKS)
    plgpu.barrier_wait(refs.bank_ready.at[bank])

    @functools.partial(pl.run_scoped, accs=[plgpu.ACC((WIDTH, RANK), jnp.float32)] * 3)
    def _(accs):
        def sum_tile(j, _):
            slot = lax.rem(step * work.count + j, static.config.stages)
            plgpu.barrier_wait(refs.gated.at[slot])  # the slot holds gradients
            _multiply(static, refs, ds_accs, accs, j, slot, bank)  # complete when it returns
            plgpu.barrier_arrive(refs.summed.at[slot])

        lax.fori_loop(0, work.count, sum_tile, None)
        plgpu.barrier_arrive(refs.bank_free.at[bank])
        for gmem, acc in zip((refs.da_g, refs.db_gate_g, refs.db_up_g), accs, strict=True):
            store_fragment(gmem.at[work.chunk, pl.ds(_column(static, work, step), WIDTH), :], acc[...])


def _multiply(static: _Static, refs: Refs, ds_accs, accs, j, slot, bank) -> None:
    """dA += h^T dS, dB += dgate^T S, dS += dgate B^T, for gate and up."""
    # All products are issued without a wait between them. They read gradients and bank until the wait at the end.
    low, bank_s = refs.low_s.at[j], refs.bank_s.at[bank]
    gradients = refs.gate_s.at[slot], refs.up_s.at[slot]
    plgpu.wgmma(accs[0], _transposed(refs.dh_s.at[slot]), _transposed(_rows(low, LOW_ROWS[DS])))
    for acc, gradient, side in zip(accs[1:], gradients, static.sides, strict=True):
        plgpu.wgmma(acc, _transposed(gradient), _transposed(_rows(low, LOW_ROWS[side])))
    for block in range(static.size):  # registers cannot be indexed by j, which is only known on the device

        @pl.when(block == j)
        def _(block=block):
            for acc, gradient, side in zip(ds_accs[block], gradients, static.sides, strict=True):
                plgpu.wgmma(acc, gradient, _transposed(_rows(bank_s, BANK_ROWS[side])))

    plgpu.wgmma_wait(0)


def _stream(static: _Static, refs: Refs, work: _Work) -> None:
    """The streaming warpgroup: moves tiles between device and shared memory, `stages - 1` tiles ahead."""
    for j in range(static.size):  # a chunk with fewer blocks loads any rows, which nobody reads
        row0 = lax.max(refs.blocks_g[work.chunk * static.size + j], jnp.int32(0)) * ROWS
        plgpu.copy_gmem_to_smem(refs.low_g.at[:, pl.ds(row0, ROWS)], refs.low_s.at[j], refs.low_ready)
    for bank in range(BANKS):
        _fetch_bank(static, refs, work, jnp.int32(bank))
    for number in range(static.config.stages):
        _fetch(static, refs, work, jnp.int32(number))

    def stream_column(step, _):
        def stream_tile(j, _):
            number = step * work.count + j
            slot = lax.rem(number, static.config.stages)
            rows, columns = _row_range(static, refs, work, j), pl.ds(_column(static, work, step), WIDTH)
            plgpu.barrier_wait(refs.gated.at[slot])
            if not static.rounds:  # rounded gradients are stored by the gating warpgroups
                plgpu.copy_smem_to_gmem(refs.gate_s.at[slot], refs.dgate_g.at[rows, columns])
                plgpu.copy_smem_to_gmem(refs.up_s.at[slot], refs.dup_g.at[rows, columns])
            if static.wants_h:
                plgpu.copy_smem_to_gmem(refs.dh_s.at[slot], refs.h_g.at[rows, columns])
            plgpu.wait_smem_to_gmem(3 if static.wants_h else 2, wait_read_only=True)  # the previous tile's are read

            # The previous tile's slot: stored above; once it is summed, it is free.
            @pl.when(number > 0)
            def _():
                plgpu.barrier_wait(refs.summed.at[lax.rem(number - 1, static.config.stages)])
                _fetch(static, refs, work, number - 1 + static.config.stages)

        lax.fori_loop(0, work.count, stream_tile, None)
        plgpu.barrier_wait(refs.bank_free.at[lax.rem(step, BANKS)])  # every other warpgroup is done with this step
        _fetch_bank(static, refs, work, step + BANKS)

    lax.fori_loop(0, work.steps, stream_column, None)
    # Costs nothing: the last bank was free after the last sum. A barrier ends when everybody has seen its last phase.
    plgpu.barrier_wait(refs.summed.at[lax.rem(work.steps * work.count - 1, static.config.stages)])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last stores are read before the block's memory goes


def _fetch(static: _Static, refs: Refs, work: _Work, number: jax.Array) -> None:
    """Starts the copies of a tile into its slot, if there is such a tile."""
    step = lax.div(number, work.count)

    @pl.when(step < work.steps)
    def _():
        slot, column = lax.rem(number, static.config.stages), _column(static, work, step)
        rows, columns = _row_range(static, refs, work, lax.rem(number, work.count)), pl.ds(column, WIDTH)
        for source, target in ((refs.gate_g, refs.gate_s), (refs.up_g, refs.up_s), (refs.dh_g, refs.dh_s)):
            plgpu.copy_gmem_to_smem(source.at[rows, columns], target.at[slot], refs.ready.at[slot])
        if static.has_bits:
            words_g = refs.bits_g.at[rows, lax.div(column, BLOCK), :]
            plgpu.copy_gmem_to_smem(words_g, refs.words_s.at[slot], refs.ready.at[slot])


def _fetch_bank(static: _Static, refs: Refs, work: _Work, step: jax.Array) -> None:
    """Starts the copy of the bank's columns of a step, if there is such a step."""

    @pl.when(step < work.steps)
    def _():
        bank = lax.rem(step, BANKS)
        source = refs.bank_g.at[work.adapter].at[:, pl.ds(_column(static, work, step), WIDTH)]
        plgpu.copy_gmem_to_smem(source, refs.bank_s.at[bank], refs.bank_ready.at[bank])


def _column(static: _Static, work: _Work, step: jax.Array) -> jax.Array:
    """First column of a step's tile: the parts of a chunk work side by side, so whole pages of memory are read."""
    return (work.part + step * static.parts) * WIDTH


def _row_range(static: _Static, refs: Refs, work: _Work, j):
    return pl.ds(refs.blocks_g[work.chunk * static.size + j] * ROWS, ROWS)


def _rows(ref, part: Place):
    return ref.at[pl.ds(*part), :]


def _transposed(ref):
    return ref.transpose((1, 0))
