"""silu(gate) · up with the LoRA branches around it, in one pass over the wide arrays, for Hopper.

The products before the gate are left to cuBLAS, without their low-rank parts; those are added here, where the wide
arrays are read anyway, and S = drop(h) A of the projection behind the gate is made while h is at hand:

    forward    g = gate + S_g B_g,  u = up + S_u B_u,  h = silu(g) · u,  S = drop(h) A
    backward   dh = dh0 + mask * (dS A^T),  dg, du from dh,  dA = drop(h)^T dS        (h is made again)

A program owns 64 rows (forward) or 64 columns (backward) at a time; results overwrite the tiles they came from.

T packed tokens · F MLP width · R padded rank · A adapters · C chunks of row blocks
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.chunks import Chunks
from pallas_kernels.dropout import BLOCK, WORDS, Dropout, threshold
from pallas_kernels.manual_axes import vary_like
from pallas_kernels.mosaic_gpu.mask import keep_words_of, make_words
from pallas_kernels.mosaic_gpu.tiling import ROWS, store_fragment, transforms

WIDTH = 64  # columns of a tile: a 128-byte row
PART = 32  # columns in registers at a time: 128 of a thread's registers are taken, whole tiles take up to 228
STEPS = BLOCK // WIDTH  # tiles of a block of keep words
LOW_SWIZZLE = 16  # elements: rows of S may be as short as that, and what they meet must lie alike
# exp2 as the hardware has it, 2 units in the last place: the exact one is a fifth of all instructions
COMPILER_PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True)
MIN_BLOCKS = 4  # of 256 columns, for a forward program: fewer, and filling its pipeline shows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """How a program is built.

    Attributes:
        warpgroups: each with work of its own. One takes 100 to 130 registers, so four programs could share a
            multiprocessor; shared memory leaves room for two or three.
        forward_stages, backward_stages: tiles under way; two or more: one is fetched when the one before it is spent.
    """

    warpgroups: int = 1
    forward_stages: int = 4
    backward_stages: int = 3

    def smem_bytes(self, both: int, rank: int) -> int:
        """Shared memory of the larger program with 2-byte operands, for ranks of gate and up together and behind."""
        forward = self.forward_stages * 2 * WIDTH * (2 * ROWS + both + rank) + 2 * ROWS * both
        stage = 2 * WIDTH * (3 * ROWS + rank) + 2 * ROWS * (both + rank) + 4 * ROWS * WORDS
        backward = self.backward_stages * stage + 2 * WIDTH * (both + rank)
        return self.warpgroups * max(forward, backward)


type Places = tuple[tuple[int, int], tuple[int, int]]  # (first column of S, rank) of gate and of up


def gate_forward(
    gate: jax.Array,
    up: jax.Array,
    s: jax.Array,
    b: jax.Array,
    a: jax.Array,
    block_adapter: jax.Array,
    dropout: Dropout | None,
    *,
    places: Places,
    config: GateConfig,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns h [T, F], S of the projection behind the gate [T, R], and with dropout keep bits uint32 [T, F / 256, 8].

    Args:
        gate, up: [T, F], the frozen products (with bias).
        s: [T, R of both]; `places` says whose columns are where.
        b: [A + 1, R of both, F], of gate and up as S lies, scales folded in; adapter A is zero.
        a: [A + 1, R, F], of the projection behind the gate, transposed, the dropout scale folded in.
        block_adapter: int32 [T / 64], 0..A.
    """
    num_rows, width = gate.shape
    dtype = gate.dtype
    both, rank = b.shape[1], a.shape[1]
    split = _split(width // BLOCK)
    steps = width // WIDTH // split
    warpgroups, stages = config.warpgroups, min(config.forward_stages, steps)
    units = num_rows // ROWS * split
    last = 0 if dropout is None else dropout.key.shape[0] - 1

    def kernel(gate_gmem, up_gmem, s_gmem, b_gmem, a_gmem, adapter_gmem, *rest):
        if dropout is None:
            h_gmem, s_out_gmem = rest
        else:
            key_gmem, thresh_gmem, row_key_gmem, h_gmem, s_out_gmem, bits_gmem = rest
        wg = lax.axis_index("wg")
        unit = lax.axis_index("program") * warpgroups + wg
        part = lax.rem(unit, split)

        def work(gate_smem, up_smem, b_smem, a_smem, s_smem, barrier, s_barrier):
            block_row = lax.div(unit, split)
            rows = pl.ds(block_row * ROWS, ROWS)
            adapter = adapter_gmem[block_row]
            if dropout is not None:
                owner = lax.min(adapter, jnp.asarray(last, adapter.dtype))
                key, thresh = key_gmem[owner], thresh_gmem[owner]
                row_key = plgpu.load(row_key_gmem.at[rows], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

            def columns_of(step):
                return pl.ds((part * steps + step) * WIDTH, WIDTH)

            def fetch(step, slot):
                columns = columns_of(step)
                for source, target in (
                    (gate_gmem.at[rows, columns], gate_smem),
                    (up_gmem.at[rows, columns], up_smem),
                    (b_gmem.at[adapter].at[:, columns], b_smem),
                    (a_gmem.at[adapter].at[:, columns], a_smem),
                ):
                    plgpu.copy_gmem_to_smem(source, target.at[slot], barrier.at[wg * stages + slot])

            plgpu.copy_gmem_to_smem(s_gmem.at[rows, :], s_smem, s_barrier)
            for step in range(stages):
                fetch(step, step)
            plgpu.barrier_wait(s_barrier)

            @functools.partial(pl.run_scoped, acc=plgpu.ACC((ROWS, rank), jnp.float32))
            def _(acc):
                def block(number, _):
                    words = None
                    if dropout is not None:
                        words = make_words(key, thresh, row_key, part * (steps // STEPS) + number)
                        store_fragment(bits_gmem.at[rows, part * (steps // STEPS) + number, :], words)
                    lax.fori_loop(0, STEPS, functools.partial(tile, number, words), None)

                def tile(number, words, quarter, _):
                    step = number * STEPS + quarter
                    slot = lax.rem(step, stages)
                    if words is not None:
                        words = _shifted(words, quarter * (WIDTH // WORDS))
                    plgpu.barrier_wait(barrier.at[wg * stages + slot])
                    for first in range(0, WIDTH, PART):
                        columns = pl.ds(first, PART)
                        own_b = b_smem.at[slot].at[:, columns]
                        low_gate, low_up = _products(*((s_smem, own_b, place, place) for place in places))
                        g = _registers(gate_smem.at[slot].at[:, columns]) + low_gate
                        u = _registers(up_smem.at[slot].at[:, columns]) + low_up
                        h = g * _sigmoid(g) * u
                        gate_smem[slot, :, columns] = h.astype(dtype)
                        if words is not None:
                            up_smem[slot, :, columns] = keep_words_of(h, words, first=first // WORDS).astype(dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(gate_smem.at[slot], h_gmem.at[rows, columns_of(step)])
                    kept_smem = gate_smem if words is None else up_smem
                    plgpu.wgmma(acc, kept_smem.at[slot], a_smem.at[slot].transpose((1, 0)))  # next step waits for it
                    # the tile before this one: stored, and spent by every warp, which passed the barrier above
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)

                    @pl.when((step > 0) & (step - 1 + stages < steps))
                    def _():
                        fetch(step - 1 + stages, lax.rem(step - 1, stages))

                lax.fori_loop(0, steps // STEPS, block, None)
                plgpu.wgmma_wait(0)
                store_fragment(s_out_gmem.at[part, rows, :], acc[...])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @functools.partial(
            pl.run_scoped,
            gate_smem=_tiles(warpgroups, stages, ROWS, dtype=dtype),
            up_smem=_tiles(warpgroups, stages, ROWS, dtype=dtype),
            b_smem=_low(warpgroups, stages, both, WIDTH, dtype=dtype),
            a_smem=_tiles(warpgroups, stages, rank, dtype=dtype),
            s_smem=_low(warpgroups, ROWS, both, dtype=dtype),
            barrier=plgpu.Barrier(num_arrivals=4, num_barriers=warpgroups * stages),
            s_barrier=plgpu.Barrier(num_barriers=warpgroups),
            collective_axes="wg",
        )
        def _(barrier, s_barrier, **tiles):
            own = {name: ref.at[wg] for name, ref in tiles.items()}
            pl.when(unit < units)(lambda: work(**own, barrier=barrier, s_barrier=s_barrier.at[wg]))

    bits = [] if dropout is None else [jax.ShapeDtypeStruct((num_rows, width // BLOCK, WORDS), jnp.uint32)]
    run = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((num_rows, width), dtype),
            jax.ShapeDtypeStruct((split, num_rows, rank), jnp.float32),
            *bits,
        ),
        grid=(-(-units // warpgroups),),
        grid_names=("program",),
        num_threads=warpgroups,
        thread_name="wg",
        kernel_name="lora_gate",
        compiler_params=COMPILER_PARAMS,
    )
    operands = [gate, up, s, b, a, block_adapter]
    if dropout is not None:
        operands += [dropout.key.astype(jnp.uint32), threshold(dropout.rate), dropout.row_key.astype(jnp.uint32)]
    h, s_out, *bits = vary_like(run(*operands), gate)
    return h, s_out.sum(0).astype(dtype), bits[0] if bits else None


def gate_backward(
    gate: jax.Array,
    up: jax.Array,
    dh: jax.Array,
    s: jax.Array,
    ds: jax.Array,
    b: jax.Array,
    a: jax.Array,
    bits: jax.Array | None,
    chunks: Chunks,
    *,
    places: Places,
    config: GateConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns dgate and dup [T, F], and partial sums of dA, float32 [C, F, R] (without the dropout scale).

    Args:
        dh: [T, F], the frozen part dY W^T of the gradient of h.
        ds: [T, R], of the projection behind the gate.
        chunks: of 64-row blocks.
        gate, up, s, b, a, bits, places: as in and out of `gate_forward`.
    """
    num_rows, num_columns = gate.shape
    dtype = gate.dtype
    both, rank = b.shape[1], a.shape[1]
    ds_place = (both, rank)
    size = chunks.blocks.shape[1]
    warpgroups, stages = config.warpgroups, min(config.backward_stages, size)
    total = chunks.blocks.shape[0]
    units = num_columns // WIDTH * total
    has_bits = bits is not None

    def kernel(
        gate_gmem, up_gmem, dh_gmem, low_gmem, ds_t_gmem, b_gmem, a_gmem, blocks_gmem, count_gmem, adapter_gmem, *rest,
    ):  # fmt: skip
        bits_gmem, dgate_gmem, dup_gmem, da_gmem = rest if has_bits else (None, *rest)
        wg = lax.axis_index("wg")
        unit = lax.axis_index("program") * warpgroups + wg

        def work(
            gate_smem, up_smem, dh_smem, ds_t_smem, low_smem, b_smem, a_smem, barrier, bank_barrier, words_smem=None
        ):
            chunk = lax.rem(unit, total)
            col0 = lax.div(unit, total) * WIDTH
            columns = pl.ds(col0, WIDTH)
            count = count_gmem[chunk]
            adapter = lax.max(adapter_gmem[chunk], jnp.int32(0))

            def block_of(step):
                return blocks_gmem[chunk * size + lax.min(step, jnp.int32(size - 1))]

            def fetch(step, slot, block):
                @pl.when(step < count)
                def _():
                    rows, at = pl.ds(block * ROWS, ROWS), barrier.at[wg * stages + slot]
                    for source, target in ((gate_gmem, gate_smem), (up_gmem, up_smem), (dh_gmem, dh_smem)):
                        plgpu.copy_gmem_to_smem(source.at[rows, columns], target.at[slot], at)
                    plgpu.copy_gmem_to_smem(ds_t_gmem.at[:, rows], ds_t_smem.at[slot], at)
                    plgpu.copy_gmem_to_smem(low_gmem.at[rows, :], low_smem.at[slot], at)
                    if has_bits:
                        plgpu.copy_gmem_to_smem(bits_gmem.at[rows, lax.div(col0, BLOCK), :], words_smem.at[slot], at)

            for bank_gmem, bank_smem in ((b_gmem, b_smem), (a_gmem, a_smem)):
                plgpu.copy_gmem_to_smem(bank_gmem.at[adapter].at[:, columns], bank_smem, bank_barrier)
            for step in range(stages):
                fetch(jnp.int32(step), step, block_of(jnp.int32(step)))
            plgpu.barrier_wait(bank_barrier)
            first = lax.div(lax.rem(col0, BLOCK), WORDS).astype(jnp.uint32)

            @functools.partial(pl.run_scoped, acc=plgpu.ACC((WIDTH, rank), jnp.float32))
            def _(acc):
                def body(step, _):
                    slot = lax.rem(step, stages)
                    this, ahead = block_of(step), block_of(step - 1 + stages)  # early: device memory is far
                    rows = pl.ds(this * ROWS, ROWS)
                    plgpu.barrier_wait(barrier.at[wg * stages + slot])
                    if has_bits:
                        words = plgpu.load(words_smem.at[slot], layout=plgpu.Layout.WGMMA, optimized=False)
                        words = _shifted(words, first)
                    low_of = low_smem.at[slot]
                    for first_of_part in range(0, WIDTH, PART):
                        part = pl.ds(first_of_part, PART)
                        low_dh, low_gate, low_up = _products(
                            (low_of, a_smem.at[:, part], ds_place, (0, rank)),
                            *((low_of, b_smem.at[:, part], place, place) for place in places),
                        )
                        if has_bits:
                            low_dh = keep_words_of(low_dh, words, first=first_of_part // WORDS)
                        own_dh = _registers(dh_smem.at[slot].at[:, part]) + low_dh
                        u = _registers(up_smem.at[slot].at[:, part]) + low_up
                        g = _registers(gate_smem.at[slot].at[:, part]) + low_gate
                        sigmoid = _sigmoid(g)
                        silu = g * sigmoid
                        h = silu * u
                        kept = keep_words_of(h, words, first=first_of_part // WORDS) if has_bits else h
                        dh_smem[slot, :, part] = kept.astype(dtype)
                        up_smem[slot, :, part] = (own_dh * silu).astype(dtype)
                        gate_smem[slot, :, part] = (own_dh * u * (sigmoid + silu * (1.0 - sigmoid))).astype(dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(gate_smem.at[slot], dgate_gmem.at[rows, columns])
                    plgpu.copy_smem_to_gmem(up_smem.at[slot], dup_gmem.at[rows, columns])
                    # the next step waits for it
                    plgpu.wgmma(acc, dh_smem.at[slot].transpose((1, 0)), ds_t_smem.at[slot].transpose((1, 0)))
                    # the tiles before these: stored, and spent by every warp, which passed the barrier above
                    plgpu.wait_smem_to_gmem(2, wait_read_only=True)

                    @pl.when(step > 0)
                    def _():
                        fetch(step - 1 + stages, lax.rem(step - 1, stages), ahead)

                lax.fori_loop(0, count, body, None)
                plgpu.wgmma_wait(0)
                store_fragment(da_gmem.at[chunk, columns, :], acc[...])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @functools.partial(
            pl.run_scoped,
            gate_smem=_tiles(warpgroups, stages, ROWS, dtype=dtype),
            up_smem=_tiles(warpgroups, stages, ROWS, dtype=dtype),
            dh_smem=_tiles(warpgroups, stages, ROWS, dtype=dtype),
            ds_t_smem=_tiles(warpgroups, stages, rank, dtype=dtype),
            low_smem=_low(warpgroups, stages, ROWS, both + rank, dtype=dtype),
            b_smem=_low(warpgroups, both, WIDTH, dtype=dtype),
            a_smem=_low(warpgroups, rank, WIDTH, dtype=dtype),
            **({"words_smem": plgpu.SMEM((warpgroups, stages, ROWS, WORDS), jnp.uint32)} if has_bits else {}),
            barrier=plgpu.Barrier(num_arrivals=6 if has_bits else 5, num_barriers=warpgroups * stages),
            bank_barrier=plgpu.Barrier(num_arrivals=2, num_barriers=warpgroups),
            collective_axes="wg",
        )
        def _(barrier, bank_barrier, **tiles):
            own = {name: ref.at[wg] for name, ref in tiles.items()}
            pl.when(unit < units)(lambda: work(**own, barrier=barrier, bank_barrier=bank_barrier.at[wg]))

    run = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((num_rows, num_columns), dtype),
            jax.ShapeDtypeStruct((num_rows, num_columns), dtype),
            jax.ShapeDtypeStruct((total, num_columns, rank), jnp.float32),
        ),
        grid=(-(-units // warpgroups),),
        grid_names=("program",),
        num_threads=warpgroups,
        thread_name="wg",
        kernel_name="lora_gate_backward",
        compiler_params=COMPILER_PARAMS,
    )
    tables = (chunks.blocks.reshape(-1), chunks.count, chunks.adapter)
    operands = (gate, up, dh, jnp.concatenate([s, ds], axis=1), ds.T, b, a, *tables)
    return vary_like(run(*operands, *([bits] if has_bits else [])), gate)


def _tiles(warpgroups: int, stages: int, rows: int, dtype: jnp.dtype):
    """Wide tiles of every warpgroup."""
    return plgpu.SMEM((warpgroups, stages, rows, WIDTH), dtype, transforms=transforms(PART, dtype))


def _low(*shape: int, dtype: jnp.dtype):
    """Rows of S, or of what they meet, of every warpgroup."""
    return plgpu.SMEM(shape, dtype, transforms=transforms(LOW_SWIZZLE, dtype))


def _registers(tile_smem) -> jax.Array:
    return plgpu.load(tile_smem, layout=plgpu.Layout.WGMMA).astype(jnp.float32)


type Range = tuple[int, int]  # first, size


def _products(*given: tuple[Any, Any, Range, Range]) -> tuple[jax.Array, ...]:
    """Products of (left, right, columns of left, rows of right), with one wait for all and what was issued before."""

    def run(*accs):
        for acc, (left, right, (column, rank), (row, _)) in zip(accs, given, strict=True):
            plgpu.wgmma(acc, left.at[:, pl.ds(column, rank)], right.at[pl.ds(row, rank), :])
        plgpu.wgmma_wait(0)
        return tuple(acc[...] for acc in accs)

    return pl.run_scoped(run, *[plgpu.ACC((ROWS, PART), jnp.float32)] * len(given))


def _shifted(words: jax.Array, bits: Any) -> jax.Array:
    return lax.shift_right_logical(words, jnp.broadcast_to(jnp.asarray(bits).astype(jnp.uint32), words.shape))


def _sigmoid(x: jax.Array) -> jax.Array:
    return 1.0 / (1.0 + jnp.exp(-x))


def _split(blocks: int) -> int:
    """Parts of a row, as many as leave each at least MIN_BLOCKS blocks of 256 columns."""
    fitting = [part for part in range(1, blocks // MIN_BLOCKS + 1) if blocks % part == 0]
    return max(fitting, default=1)
