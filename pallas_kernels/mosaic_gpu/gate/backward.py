"""dgate, dup and partial sums of dA of the projection behind the gate, from the frozen part of the gradient of h.

T packed tokens · F MLP width · R padded rank · A adapters · C chunks of row blocks
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.chunks import Chunks
from pallas_kernels.dropout import BLOCK, WORDS
from pallas_kernels.manual_axes import vary_like
from pallas_kernels.mosaic_gpu.gate.config import PART, WIDTH, GateConfig, Places
from pallas_kernels.mosaic_gpu.gate.tile import launch, low, low_factors, products, registers, sigmoid, tile
from pallas_kernels.mosaic_gpu.mask import first_bit, keep_words_of, load_words
from pallas_kernels.mosaic_gpu.tiling import ROWS, block_of_chunk, store_fragment


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
    total, size = chunks.blocks.shape
    stages = min(config.backward_stages, size)
    has_bits = bits is not None

    def work(
        unit, gmem, gate_smem, up_smem, dh_smem, ds_t_smem, low_smem, b_smem, a_smem, barrier, bank_barrier,
        words_smem=None,
    ):  # fmt: skip
        gate_gmem, up_gmem, dh_gmem, low_gmem, ds_t_gmem, b_gmem, a_gmem, blocks_gmem, count_gmem, *rest = gmem
        adapter_gmem, *rest = rest
        bits_gmem, dgate_gmem, dup_gmem, da_gmem = rest if has_bits else (None, *rest)
        chunk = lax.div(unit, num_columns // WIDTH)
        col0 = lax.rem(unit, num_columns // WIDTH) * WIDTH  # programs side by side: whole pages of device memory
        columns = pl.ds(col0, WIDTH)
        count = count_gmem[chunk]
        adapter = lax.max(adapter_gmem[chunk], jnp.int32(0))

        block_of = functools.partial(block_of_chunk, blocks_gmem, chunk, size)

        def factors(low_smem, columns):
            ds = low_smem.at[:, pl.ds(both, rank)], a_smem.at[:, columns]
            return ds, *(low_factors(low_smem, b_smem.at[:, columns], place) for place in places)

        def fetch(step, slot, block):
            @pl.when(step < count)
            def _():
                rows = pl.ds(block * ROWS, ROWS)
                for source, target in ((gate_gmem, gate_smem), (up_gmem, up_smem), (dh_gmem, dh_smem)):
                    plgpu.copy_gmem_to_smem(source.at[rows, columns], target.at[slot], barrier(slot))
                plgpu.copy_gmem_to_smem(ds_t_gmem.at[:, rows], ds_t_smem.at[slot], barrier(slot))
                plgpu.copy_gmem_to_smem(low_gmem.at[rows, :], low_smem.at[slot], barrier(slot))
                if has_bits:
                    words_gmem = bits_gmem.at[rows, lax.div(col0, BLOCK), :]
                    plgpu.copy_gmem_to_smem(words_gmem, words_smem.at[slot], barrier(slot))

        for bank_gmem, bank_smem in ((b_gmem, b_smem), (a_gmem, a_smem)):
            plgpu.copy_gmem_to_smem(bank_gmem.at[adapter].at[:, columns], bank_smem, bank_barrier())
        for step in range(stages):
            fetch(jnp.int32(step), step, block_of(jnp.int32(step)))
        plgpu.barrier_wait(bank_barrier())
        first = first_bit(col0)

        @functools.partial(pl.run_scoped, acc=plgpu.ACC((WIDTH, rank), jnp.float32))
        def _(acc):
            def one_tile(step, _):
                slot = lax.rem(step, stages)
                this, ahead = block_of(step), block_of(step - 1 + stages)  # early: device memory is far
                rows = pl.ds(this * ROWS, ROWS)
                plgpu.barrier_wait(barrier(slot))
                words = load_words(words_smem.at[slot], first) if has_bits else None
                wide = gate_smem.at[slot], up_smem.at[slot], dh_smem.at[slot]
                gradient_tile(*wide, functools.partial(factors, low_smem.at[slot]), words)
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

            lax.fori_loop(0, count, one_tile, None)
            plgpu.wgmma_wait(0)
            store_fragment(da_gmem.at[chunk, columns, :], acc[...])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    tables = (chunks.blocks.reshape(-1), chunks.count, chunks.adapter)
    operands = (gate, up, dh, jnp.concatenate([s, ds], axis=1), ds.T, b, a, *tables, *([bits] if has_bits else []))
    out_type = (
        jax.ShapeDtypeStruct((num_rows, num_columns), dtype), jax.ShapeDtypeStruct((num_rows, num_columns), dtype),
        jax.ShapeDtypeStruct((total, num_columns, rank), jnp.float32),
    )  # fmt: skip
    tiles = {
        "gate_smem": tile(stages, ROWS, dtype=dtype), "up_smem": tile(stages, ROWS, dtype=dtype),
        "dh_smem": tile(stages, ROWS, dtype=dtype), "ds_t_smem": tile(stages, rank, dtype=dtype),
        "low_smem": low(stages, ROWS, both + rank, dtype=dtype), "b_smem": low(both, WIDTH, dtype=dtype),
        "a_smem": low(rank, WIDTH, dtype=dtype),
    }  # fmt: skip
    if has_bits:
        tiles["words_smem"] = plgpu.SMEM((stages, ROWS, WORDS), jnp.uint32)
    out = launch(
        work, operands, out_type, units=num_columns // WIDTH * total, warpgroups=config.warpgroups, tiles=tiles,
        barriers={"barrier": (6 if has_bits else 5, stages), "bank_barrier": (2, 1)}, name="lora_gate_backward",
    )  # fmt: skip
    return vary_like(out, gate)


def gradient_tile(gate_smem, up_smem, dh_smem, factors: Callable[[Any], Sequence], words: jax.Array | None) -> None:
    """Leaves dgate where gate was, dup where up was and drop(h) where dh was; a part of the columns at a time.

    Args:
        factors: what `products` takes for the low-rank parts of dh, gate and up, of some columns.
    """
    dtype = gate_smem.dtype
    for first in range(0, WIDTH, PART):
        columns = pl.ds(first, PART)
        low_dh, low_gate, low_up = products(*factors(columns))
        if words is not None:
            low_dh = keep_words_of(low_dh, words, first=first // WORDS)
        dh = registers(dh_smem.at[:, columns]) + low_dh
        u = registers(up_smem.at[:, columns]) + low_up
        g = registers(gate_smem.at[:, columns]) + low_gate
        own_sigmoid = sigmoid(g)
        silu = g * own_sigmoid
        h = silu * u
        kept = h if words is None else keep_words_of(h, words, first=first // WORDS)
        dh_smem[:, columns] = kept.astype(dtype)
        up_smem[:, columns] = (dh * silu).astype(dtype)
        gate_smem[:, columns] = (dh * u * (own_sigmoid + silu * (1.0 - own_sigmoid))).astype(dtype)
