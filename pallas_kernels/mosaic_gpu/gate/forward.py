"""h = silu(gate) · up with the low-rank parts of both, and S and the keep bits of the projection behind the gate.

T packed tokens · F MLP width · R padded rank · A adapters
"""

from __future__ import annotations

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dropout import BLOCK, WORDS, Dropout, threshold
from pallas_kernels.manual_axes import vary_like
from pallas_kernels.mosaic_gpu.gate.config import PART, WIDTH, GateConfig, Places
from pallas_kernels.mosaic_gpu.gate.tile import launch, low, low_factors, products, registers, sigmoid, tile
from pallas_kernels.mosaic_gpu.mask import keep_words_of, make_words, shifted
from pallas_kernels.mosaic_gpu.tiling import ROWS, store_fragment

STEPS = BLOCK // WIDTH  # tiles of a block of keep words
MIN_BLOCKS = 4  # of 256 columns, for a program: fewer, and filling its pipeline shows


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
    split = parts_of_a_row(width // BLOCK)
    steps = width // WIDTH // split
    stages = min(config.forward_stages, steps)
    last = 0 if dropout is None else dropout.key.shape[0] - 1

    def work(unit, gmem, gate_smem, up_smem, b_smem, a_smem, s_smem, barrier, s_barrier):
        gate_gmem, up_gmem, s_gmem, b_gmem, a_gmem, adapter_gmem, *rest = gmem
        if dropout is None:
            h_gmem, s_out_gmem = rest
        else:
            key_gmem, thresh_gmem, row_key_gmem, h_gmem, s_out_gmem, bits_gmem = rest
        part, block_row = lax.rem(unit, split), lax.div(unit, split)
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
                plgpu.copy_gmem_to_smem(source, target.at[slot], barrier(slot))

        plgpu.copy_gmem_to_smem(s_gmem.at[rows, :], s_smem, s_barrier())
        for step in range(stages):
            fetch(step, step)
        plgpu.barrier_wait(s_barrier())

        @functools.partial(pl.run_scoped, acc=plgpu.ACC((ROWS, rank), jnp.float32))
        def _(acc):
            def block(number, _):
                words = None
                if dropout is not None:
                    words = make_words(key, thresh, row_key, part * (steps // STEPS) + number)
                    store_fragment(bits_gmem.at[rows, part * (steps // STEPS) + number, :], words)
                lax.fori_loop(0, STEPS, functools.partial(one_tile, number, words), None)

            def one_tile(number, words, quarter, _):
                step = number * STEPS + quarter
                slot = lax.rem(step, stages)
                if words is not None:
                    words = shifted(words, quarter * (WIDTH // WORDS))
                plgpu.barrier_wait(barrier(slot))
                gate_tile(gate_smem.at[slot], up_smem.at[slot], s_smem, b_smem.at[slot], words, places)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(gate_smem.at[slot], h_gmem.at[rows, columns_of(step)])
                kept_smem = gate_smem if words is None else up_smem
                plgpu.wgmma(acc, kept_smem.at[slot], a_smem.at[slot].transpose((1, 0)))  # the next step waits for it
                # the tile before this one: stored, and spent by every warp, which passed the barrier above
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)

                @pl.when((step > 0) & (step - 1 + stages < steps))
                def _():
                    fetch(step - 1 + stages, lax.rem(step - 1, stages))

            lax.fori_loop(0, steps // STEPS, block, None)
            plgpu.wgmma_wait(0)
            store_fragment(s_out_gmem.at[part, rows, :], acc[...])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    operands = [gate, up, s, b, a, block_adapter]
    out_type = [
        jax.ShapeDtypeStruct((num_rows, width), dtype), jax.ShapeDtypeStruct((split, num_rows, rank), jnp.float32),
    ]  # fmt: skip
    if dropout is not None:
        operands += [dropout.key.astype(jnp.uint32), threshold(dropout.rate), dropout.row_key.astype(jnp.uint32)]
        out_type += [jax.ShapeDtypeStruct((num_rows, width // BLOCK, WORDS), jnp.uint32)]
    tiles = {
        "gate_smem": tile(stages, ROWS, dtype=dtype), "up_smem": tile(stages, ROWS, dtype=dtype),
        "b_smem": low(stages, both, WIDTH, dtype=dtype), "a_smem": tile(stages, rank, dtype=dtype),
        "s_smem": low(ROWS, both, dtype=dtype),
    }  # fmt: skip
    out = launch(
        work, operands, out_type, units=num_rows // ROWS * split, warpgroups=config.warpgroups, tiles=tiles,
        barriers={"barrier": (4, stages), "s_barrier": (1, 1)}, name="lora_gate",
    )  # fmt: skip
    h, s_out, *bits = vary_like(out, gate)
    return h, s_out.sum(0).astype(dtype), bits[0] if bits else None


def gate_tile(gate_smem, up_smem, s_smem, b_smem, words: jax.Array | None, places: Places) -> None:
    """Leaves h where gate was, and with dropout drop(h) where up was; a part of the columns at a time."""
    dtype = gate_smem.dtype
    for first in range(0, WIDTH, PART):
        columns = pl.ds(first, PART)
        low_gate, low_up = products(*(low_factors(s_smem, b_smem.at[:, columns], place) for place in places))
        g = registers(gate_smem.at[:, columns]) + low_gate
        u = registers(up_smem.at[:, columns]) + low_up
        h = g * sigmoid(g) * u
        gate_smem[:, columns] = h.astype(dtype)
        if words is not None:
            up_smem[:, columns] = keep_words_of(h, words, first=first // WORDS).astype(dtype)


def parts_of_a_row(blocks: int) -> int:
    """As many as leave each at least MIN_BLOCKS blocks of 256 columns."""
    fitting = [part for part in range(1, blocks // MIN_BLOCKS + 1) if blocks % part == 0]
    return max(fitting, default=1)
