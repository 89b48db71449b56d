"""dA = drop(x)^T dS in one pass over x, for Hopper: tiles of x are masked in shared memory and multiplied from there.

T packed tokens · K in features · R padded rank (of all projections together) · C chunks
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
from pallas_kernels.dropout import BLOCK, WORDS
from pallas_kernels.manual_axes import vary_like
from pallas_kernels.mosaic_gpu.mask import apply_words, first_bit, keep_words_of, load_words
from pallas_kernels.mosaic_gpu.tiling import ROWS, block_of_chunk, store_fragment, transforms

LOW_RANK = 64  # dS^T is read transposed in its 128-byte swizzle: the low-rank product takes 64 ranks at a time


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DropDaConfig:
    blocks_per_chunk: int = 16
    block_k: int = 128
    stages: int = 4

    block_t = ROWS

    def smem_bytes(self, rank: int) -> int:
        """Shared memory of a program with 2-byte operands, with the low-rank part of dx: without it, less."""
        depth = -(-rank // LOW_RANK) * LOW_RANK
        stage = 2 * ROWS * (self.block_k + depth) + 4 * ROWS * WORDS
        return min(self.stages, self.blocks_per_chunk) * stage + 2 * self.block_k * (depth + ROWS)


def drop_da(
    x: jax.Array,
    ds: jax.Array,
    bits: jax.Array,
    chunks: Chunks,
    bank: jax.Array | None = None,
    *,
    rank: int,
    config: DropDaConfig,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns partial sums of dA, float32 [C, K, R] (without the dropout scale), and mask * (dS A^T) [T, K].

    The second is the low-rank part of dx, for a product that adds to it; without a bank it is left to others.

    Args:
        ds: [>= R, T]: transposed, so that its tiles lie in shared memory as those of x do; zeros behind R.
        bits: uint32 [T, K / 256, 8].
        chunks: of 64-row blocks.
        bank: [A + 1, rows of ds: a multiple of LOW_RANK, K], the dropout scale folded in; adapter A is zero.
    """
    num_in, depth = x.shape[1], ds.shape[0]
    width, size, stages = config.block_k, config.blocks_per_chunk, min(config.stages, config.blocks_per_chunk)
    total = chunks.blocks.shape[0]

    has_low = bank is not None

    def kernel(x_gmem, ds_gmem, bits_gmem, blocks_gmem, count_gmem, *rest: Any):
        adapter_gmem: Any  # with the next one, only where there is a bank
        bank_gmem: Any
        adapter_gmem, bank_gmem, out_gmem, low_gmem = rest if has_low else (None, None, *rest, None)
        chunk = lax.axis_index("chunk")
        col0 = lax.axis_index("columns") * width
        columns = pl.ds(col0, width)
        count = count_gmem[chunk]

        @functools.partial(
            pl.run_scoped,
            x_smem=plgpu.SMEM((stages, ROWS, width), x.dtype, transforms=transforms(width, x.dtype)),
            ds_smem=plgpu.SMEM((stages, depth, ROWS), x.dtype, transforms=transforms(ROWS, x.dtype)),
            words_smem=plgpu.SMEM((stages, ROWS, WORDS), jnp.uint32),
            barrier=plgpu.Barrier(num_arrivals=3, num_barriers=stages),
            bank_smem=plgpu.SMEM((depth, width), x.dtype, transforms=transforms(width, x.dtype)) if has_low else None,
            low_smem=plgpu.SMEM((ROWS, width), x.dtype, transforms=transforms(width, x.dtype)) if has_low else None,
            bank_barrier=plgpu.Barrier() if has_low else None,
        )
        def _(x_smem, ds_smem, words_smem, barrier, bank_smem, low_smem, bank_barrier):
            block_of = functools.partial(block_of_chunk, blocks_gmem, chunk, size)

            def fetch(step, slot, block):
                @pl.when(step < count)
                def _():
                    rows = pl.ds(block * ROWS, ROWS)
                    plgpu.copy_gmem_to_smem(x_gmem.at[rows, columns], x_smem.at[slot], barrier.at[slot])
                    plgpu.copy_gmem_to_smem(ds_gmem.at[:, rows], ds_smem.at[slot], barrier.at[slot])
                    plgpu.copy_gmem_to_smem(
                        bits_gmem.at[rows, lax.div(col0, BLOCK), :], words_smem.at[slot], barrier.at[slot]
                    )

            if has_low:
                adapter = lax.max(adapter_gmem[chunk], jnp.int32(0))
                plgpu.copy_gmem_to_smem(bank_gmem.at[adapter].at[:, columns], bank_smem, bank_barrier)
            for step in range(stages):
                fetch(jnp.int32(step), step, block_of(jnp.int32(step)))
            if has_low:
                plgpu.barrier_wait(bank_barrier)
            first = first_bit(col0)

            @functools.partial(pl.run_scoped, acc=plgpu.ACC((width, rank), jnp.float32))
            def _(acc):
                def body(step, _):
                    slot = lax.rem(step, stages)
                    this, ahead = block_of(step), block_of(step - 1 + stages)  # early: device memory is far
                    plgpu.barrier_wait(barrier.at[slot])
                    words = load_words(words_smem.at[slot], first)
                    apply_words(x_smem.at[slot], words)

                    # every warp has passed a barrier since it spent the slot before this one
                    @pl.when(step > 0)
                    def _():
                        fetch(step - 1 + stages, lax.rem(step - 1, stages), ahead)

                    own = ds_smem.at[slot, pl.ds(0, rank)]
                    plgpu.wgmma(acc, x_smem.at[slot].transpose((1, 0)), own.transpose((1, 0)))
                    if has_low:
                        low = low_rank(ds_smem.at[slot].transpose((1, 0)), bank_smem)
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        low_smem[...] = keep_words_of(low, words).astype(x.dtype)
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(low_smem, low_gmem.at[pl.ds(this * ROWS, ROWS), columns])
                    else:
                        plgpu.wgmma_wait(0)

                lax.fori_loop(0, count, body, None)
                store_fragment(out_gmem.at[chunk, columns, :], acc[...])
                if has_low:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def low_rank(ds_smem, bank_smem):
        """dS A^T of a tile; waits for everything that was issued."""

        @functools.partial(pl.run_scoped, acc=plgpu.ACC((ROWS, width), jnp.float32))
        def low(acc):
            plgpu.wgmma(acc, ds_smem, bank_smem)
            plgpu.wgmma_wait(0)
            return acc[...]

        return low

    partials = jax.ShapeDtypeStruct((total, num_in, rank), jnp.float32)
    run = plgpu.kernel(
        kernel,
        out_type=(partials, jax.ShapeDtypeStruct(x.shape, x.dtype)) if has_low else (partials,),
        grid=(num_in // width, total),
        grid_names=("columns", "chunk"),
        kernel_name="lora_drop_da",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    low_inputs = (chunks.adapter, bank) if has_low else ()
    out = vary_like(run(x, ds, bits, chunks.blocks.reshape(-1), chunks.count, *low_inputs), x)
    return out if has_low else (out[0], None)
