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

WIDTH = 64  # columns of a tile: a 128-byte row, and three of them in float32 leave room in the registers
STEPS = BLOCK // WIDTH  # tiles of a block of keep words
FORWARD_STAGES, BACKWARD_STAGES = 4, 3  # two programs a multiprocessor: their registers allow no more
MIN_BLOCKS = 4  # of 256 columns, for a forward program: fewer, and filling its pipeline shows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Banks:
    """The small matrices that meet the wide arrays, [A + 1, R, F] each, scales folded in; adapter A is zero."""

    gate: jax.Array
    up: jax.Array
    down: jax.Array  # A of the projection behind the gate, transposed

    @property
    def ranks(self) -> tuple[int, int, int]:
        return self.gate.shape[1], self.up.shape[1], self.down.shape[1]


def gate_forward(
    gate: jax.Array,
    up: jax.Array,
    s: jax.Array,
    banks: Banks,
    block_adapter: jax.Array,
    dropout: Dropout | None,
    *,
    offsets: tuple[int, int],
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns h [T, F], S of the projection behind the gate [T, R], and with dropout keep bits uint32 [T, F / 256, 8].

    Args:
        gate, up: [T, F], the frozen products (with bias).
        s: [T, >= R]; columns offsets[0] .. meet banks.gate, offsets[1] .. banks.up.
        block_adapter: int32 [T / 64], 0..A.
    """
    num_rows, width = gate.shape
    dtype = gate.dtype
    rank_gate, rank_up, rank = banks.ranks
    split = _split(width // BLOCK)
    steps = width // WIDTH // split
    stages = min(FORWARD_STAGES, steps)
    last = 0 if dropout is None else dropout.key.shape[0] - 1

    def kernel(gate_gmem, up_gmem, s_gmem, b_gate_gmem, b_up_gmem, a_gmem, adapter_gmem, *rest):
        if dropout is None:
            h_gmem, s_out_gmem = rest
        else:
            key_gmem, thresh_gmem, row_key_gmem, h_gmem, s_out_gmem, bits_gmem = rest
        part = lax.axis_index("part")
        rows = pl.ds(lax.axis_index("block") * ROWS, ROWS)
        adapter = adapter_gmem[lax.axis_index("block")]
        if dropout is not None:
            owner = lax.min(adapter, jnp.asarray(last, adapter.dtype))
            key, thresh = key_gmem[owner], thresh_gmem[owner]
            row_key = plgpu.load(row_key_gmem.at[rows], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

        @functools.partial(
            pl.run_scoped,
            gate_smem=_tiles(stages, ROWS, dtype),
            up_smem=_tiles(stages, ROWS, dtype),
            b_gate_smem=_banks(stages, rank_gate, dtype),
            b_up_smem=_banks(stages, rank_up, dtype),
            a_smem=_tiles(stages, rank, dtype),
            s_gate_smem=_low(1, rank_gate, dtype),
            s_up_smem=_low(1, rank_up, dtype),
            barrier=plgpu.Barrier(num_arrivals=5, num_barriers=stages),
            s_barrier=plgpu.Barrier(num_arrivals=2),
        )
        def _(gate_smem, up_smem, b_gate_smem, b_up_smem, a_smem, s_gate_smem, s_up_smem, barrier, s_barrier):
            def columns_of(step):
                return pl.ds((part * steps + step) * WIDTH, WIDTH)

            def fetch(step, slot):
                columns = columns_of(step)
                for source, target in (
                    (gate_gmem.at[rows, columns], gate_smem),
                    (up_gmem.at[rows, columns], up_smem),
                    (b_gate_gmem.at[adapter].at[:, columns], b_gate_smem),
                    (b_up_gmem.at[adapter].at[:, columns], b_up_smem),
                    (a_gmem.at[adapter].at[:, columns], a_smem),
                ):
                    plgpu.copy_gmem_to_smem(source, target.at[slot], barrier.at[slot])

            for target, offset, width in ((s_gate_smem, offsets[0], rank_gate), (s_up_smem, offsets[1], rank_up)):
                plgpu.copy_gmem_to_smem(s_gmem.at[rows, pl.ds(offset, width)], target.at[0], s_barrier)
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
                    for place in range(STEPS):
                        step = number * STEPS + place
                        slot = lax.rem(step, stages)
                        plgpu.barrier_wait(barrier.at[slot])
                        g = _registers(gate_smem.at[slot]) + _product(s_gate_smem.at[0], b_gate_smem.at[slot])
                        u = _registers(up_smem.at[slot]) + _product(s_up_smem.at[0], b_up_smem.at[slot])
                        h = (g * _sigmoid(g) * u).astype(dtype)
                        gate_smem[slot] = h
                        if words is not None:
                            up_smem[slot] = keep_words_of(h, words, first=place * WIDTH // WORDS)
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(gate_smem.at[slot], h_gmem.at[rows, columns_of(step)])
                        kept_smem = gate_smem if words is None else up_smem
                        plgpu.wgmma(acc, kept_smem.at[slot], a_smem.at[slot].transpose((1, 0)))
                        plgpu.wgmma_wait(0)
                        # the tile before this one: stored, and spent by every warp, which passed the barrier above
                        plgpu.wait_smem_to_gmem(1, wait_read_only=True)

                        @pl.when((step > 0) & (step - 1 + stages < steps))
                        def _(step=step):
                            fetch(step - 1 + stages, lax.rem(step - 1, stages))

                lax.fori_loop(0, steps // STEPS, block, None)
                store_fragment(s_out_gmem.at[part, rows, :], acc[...])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    bits = [] if dropout is None else [jax.ShapeDtypeStruct((num_rows, width // BLOCK, WORDS), jnp.uint32)]
    run = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((num_rows, width), dtype),
            jax.ShapeDtypeStruct((split, num_rows, rank), jnp.float32),
            *bits,
        ),
        grid=(num_rows // ROWS, split),
        grid_names=("block", "part"),
        kernel_name="lora_gate",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    operands = [gate, up, s, banks.gate, banks.up, banks.down, block_adapter]
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
    banks: Banks,
    bits: jax.Array | None,
    chunks: Chunks,
    *,
    offsets: tuple[int, int],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns dgate and dup [T, F], and partial sums of dA, float32 [C, F, R] (without the dropout scale).

    Args:
        dh: [T, F], the frozen part dY W^T of the gradient of h.
        ds: [T, R], of the projection behind the gate.
        chunks: of 64-row blocks.
        gate, up, s, banks, bits, offsets: as in and out of `gate_forward`.
    """
    num_rows, num_columns = gate.shape
    dtype = gate.dtype
    rank_gate, rank_up, rank = banks.ranks
    size = chunks.blocks.shape[1]
    stages = min(BACKWARD_STAGES, size)
    total = chunks.blocks.shape[0]
    has_bits = bits is not None

    def kernel(
        gate_gmem, up_gmem, dh_gmem, s_gmem, ds_gmem, ds_t_gmem, b_gate_gmem, b_up_gmem, a_gmem, blocks_gmem,
        count_gmem, adapter_gmem, *rest,
    ):  # fmt: skip
        bits_gmem, dgate_gmem, dup_gmem, da_gmem = rest if has_bits else (None, *rest)
        chunk = lax.axis_index("chunk")
        col0 = lax.axis_index("columns") * WIDTH
        columns = pl.ds(col0, WIDTH)
        count = count_gmem[chunk]
        adapter = lax.max(adapter_gmem[chunk], jnp.int32(0))

        @functools.partial(
            pl.run_scoped,
            gate_smem=_tiles(stages, ROWS, dtype),
            up_smem=_tiles(stages, ROWS, dtype),
            dh_smem=_tiles(stages, ROWS, dtype),
            ds_t_smem=_tiles(stages, rank, dtype),
            s_gate_smem=_low(stages, rank_gate, dtype),
            s_up_smem=_low(stages, rank_up, dtype),
            ds_smem=_low(stages, rank, dtype),
            words_smem=plgpu.SMEM((stages, ROWS, WORDS), jnp.uint32) if has_bits else None,
            b_gate_smem=_banks(1, rank_gate, dtype),
            b_up_smem=_banks(1, rank_up, dtype),
            a_smem=_banks(1, rank, dtype),
            barrier=plgpu.Barrier(num_arrivals=8 if has_bits else 7, num_barriers=stages),
            bank_barrier=plgpu.Barrier(num_arrivals=3),
        )
        def _(
            gate_smem, up_smem, dh_smem, ds_t_smem, s_gate_smem, s_up_smem, ds_smem, words_smem, b_gate_smem, b_up_smem,
            a_smem, barrier, bank_barrier,
        ):  # fmt: skip
            def block_of(step):
                return blocks_gmem[chunk * size + lax.min(step, jnp.int32(size - 1))]

            def fetch(step, slot, block):
                @pl.when(step < count)
                def _():
                    rows = pl.ds(block * ROWS, ROWS)
                    for source, target in ((gate_gmem, gate_smem), (up_gmem, up_smem), (dh_gmem, dh_smem)):
                        plgpu.copy_gmem_to_smem(source.at[rows, columns], target.at[slot], barrier.at[slot])
                    plgpu.copy_gmem_to_smem(ds_t_gmem.at[:, rows], ds_t_smem.at[slot], barrier.at[slot])
                    for source, target, offset, width in (
                        (s_gmem, s_gate_smem, offsets[0], rank_gate),
                        (s_gmem, s_up_smem, offsets[1], rank_up),
                        (ds_gmem, ds_smem, 0, rank),
                    ):
                        plgpu.copy_gmem_to_smem(
                            source.at[rows, pl.ds(offset, width)], target.at[slot], barrier.at[slot]
                        )
                    if has_bits:
                        words = bits_gmem.at[rows, lax.div(col0, BLOCK), :]
                        plgpu.copy_gmem_to_smem(words, words_smem.at[slot], barrier.at[slot])

            for bank_gmem, bank_smem in ((b_gate_gmem, b_gate_smem), (b_up_gmem, b_up_smem), (a_gmem, a_smem)):
                plgpu.copy_gmem_to_smem(bank_gmem.at[adapter].at[:, columns], bank_smem.at[0], bank_barrier)
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
                    plgpu.barrier_wait(barrier.at[slot])
                    low = _product(ds_smem.at[slot], a_smem.at[0])
                    if has_bits:
                        words = plgpu.load(words_smem.at[slot], layout=plgpu.Layout.WGMMA, optimized=False)
                        words = lax.shift_right_logical(words, jnp.broadcast_to(first, words.shape))
                        low = keep_words_of(low, words)
                    own_dh = _registers(dh_smem.at[slot]) + low
                    u = _registers(up_smem.at[slot]) + _product(s_up_smem.at[slot], b_up_smem.at[0])
                    g = _registers(gate_smem.at[slot]) + _product(s_gate_smem.at[slot], b_gate_smem.at[0])
                    sigmoid = _sigmoid(g)
                    silu = g * sigmoid
                    h = silu * u
                    dh_smem[slot] = (keep_words_of(h, words) if has_bits else h).astype(dtype)
                    up_smem[slot] = (own_dh * silu).astype(dtype)
                    gate_smem[slot] = (own_dh * u * (sigmoid + silu * (1.0 - sigmoid))).astype(dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(gate_smem.at[slot], dgate_gmem.at[rows, columns])
                    plgpu.copy_smem_to_gmem(up_smem.at[slot], dup_gmem.at[rows, columns])
                    plgpu.wgmma(acc, dh_smem.at[slot].transpose((1, 0)), ds_t_smem.at[slot].transpose((1, 0)))
                    plgpu.wgmma_wait(0)
                    # the tiles before these: stored, and spent by every warp, which passed the barrier above
                    plgpu.wait_smem_to_gmem(2, wait_read_only=True)

                    @pl.when(step > 0)
                    def _():
                        fetch(step - 1 + stages, lax.rem(step - 1, stages), ahead)

                lax.fori_loop(0, count, body, None)
                store_fragment(da_gmem.at[chunk, columns, :], acc[...])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    run = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((num_rows, num_columns), dtype),
            jax.ShapeDtypeStruct((num_rows, num_columns), dtype),
            jax.ShapeDtypeStruct((total, num_columns, rank), jnp.float32),
        ),
        grid=(num_columns // WIDTH, total),
        grid_names=("columns", "chunk"),
        kernel_name="lora_gate_backward",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    tables = (chunks.blocks.reshape(-1), chunks.count, chunks.adapter)
    operands = (gate, up, dh, s, ds, ds.T, banks.gate, banks.up, banks.down, *tables)
    return vary_like(run(*operands, *([bits] if has_bits else [])), gate)


def smem_bytes(ranks: tuple[int, int, int]) -> int:
    """Shared memory of the larger of the two programs with 2-byte operands."""
    tile = 2 * ROWS * WIDTH
    low = 2 * ROWS * (sum(ranks))
    forward = FORWARD_STAGES * (2 * tile + 2 * WIDTH * sum(ranks)) + low
    backward = BACKWARD_STAGES * (3 * tile + low + 2 * WIDTH * ranks[2] + 4 * ROWS * WORDS) + 2 * WIDTH * sum(ranks)
    return max(forward, backward)


def _tiles(count: int, rows: int, dtype: jnp.dtype):
    return plgpu.SMEM((count, rows, WIDTH), dtype, transforms=transforms(WIDTH, dtype))


def _low(count: int, rank: int, dtype: jnp.dtype):
    """Rows of S."""
    return plgpu.SMEM((count, ROWS, rank), dtype, transforms=transforms(rank, dtype))


def _banks(count: int, rank: int, dtype: jnp.dtype):
    """What meets S: the swizzle is that of S, whose rows are R elements long."""
    return plgpu.SMEM((count, rank, WIDTH), dtype, transforms=transforms(rank, dtype))


def _registers(tile_smem) -> jax.Array:
    return plgpu.load(tile_smem, layout=plgpu.Layout.WGMMA).astype(jnp.float32)


def _product(low_smem, bank_smem) -> jax.Array:
    """S B of a tile."""

    @functools.partial(pl.run_scoped, acc=plgpu.ACC((ROWS, WIDTH), jnp.float32))
    def product(acc):
        plgpu.wgmma(acc, low_smem, bank_smem)
        plgpu.wgmma_wait(0)
        return acc[...]

    return product


def _sigmoid(x: jax.Array) -> jax.Array:
    return 1.0 / (1.0 + jnp.exp(-x))


def _split(blocks: int) -> int:
    """Parts of a row, as many as leave each at least MIN_BLOCKS blocks of 256 columns."""
    fitting = [part for part in range(1, blocks // MIN_BLOCKS + 1) if blocks % part == 0]
    return max(fitting, default=1)
