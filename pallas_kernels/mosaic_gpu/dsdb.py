"""dS = scale dY B^T and dB = scale S^T dY in one pass over dY, for Hopper: one tile of dY feeds both products.

A program owns up to a few row blocks of one adapter and a range of columns.  dS of its rows stays in registers over all
columns; dB of a column block is summed over its rows and written as one partial sum.  The more rows, the fewer bytes:
partial sums are 2 R / rows of the bytes of dY, written and read again.

T packed tokens · N out features · R padded rank · A adapters · C chunks of row blocks
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
from pallas_kernels.manual_axes import vary_like
from pallas_kernels.mosaic_gpu.tiling import ROWS, store_fragment, transforms


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WideDsdbConfig:
    blocks_per_chunk: int = 4
    block_n: int = 64
    split_n: int = 8
    stages: int = 3

    block_t = ROWS

    def smem_bytes(self, rank: int) -> int:
        """Shared memory of a program with 2-byte operands."""
        rows = self.blocks_per_chunk * ROWS
        return 2 * (self.stages * self.block_n * (rows + rank) + rows * rank)


def wide_dsdb(
    dy: jax.Array, s: jax.Array, b: jax.Array, chunks: Chunks, *, rank_offset: int = 0, config: WideDsdbConfig
) -> tuple[jax.Array, jax.Array]:
    """Returns partial sums, float32, of dS [split_n, T, R] and of dB [C, N, R] (without scale; transposed).

    Args:
        s: [>= R, T + 64]: transposed, 64 zeros behind; rows rank_offset .. rank_offset + R belong to this projection.
        b: [A + 1, R, N], the scale folded in; padding rows are served by an adapter of zeros.
        chunks: of 64-row blocks.
    """
    num_rows, num_out = dy.shape
    rank, last = b.shape[1], b.shape[0] - 1
    width, size = config.block_n, config.blocks_per_chunk
    steps = num_out // width // config.split_n
    stages = min(config.stages, steps)
    total = chunks.blocks.shape[0]

    def kernel(dy_gmem, s_gmem, b_gmem, blocks_gmem, count_gmem, adapter_gmem, ds_gmem, db_gmem):
        chunk, part = lax.axis_index("chunk"), lax.axis_index("part")
        count = count_gmem[chunk]
        adapter = lax.clamp(jnp.int32(0), adapter_gmem[chunk], jnp.int32(last))

        # where there is no j-th block, those of the first: rows of the same adapter, weighted with zero
        blocks = [blocks_gmem[chunk * size + jnp.where(j < count, j, 0)] for j in range(size)]
        row_ranges = [pl.ds(lax.max(block, jnp.int32(0)) * ROWS, ROWS) for block in blocks]

        @functools.partial(
            pl.run_scoped,
            dy_smem=plgpu.SMEM((stages, size, ROWS, width), dy.dtype, transforms=transforms(width, dy.dtype)),
            b_smem=plgpu.SMEM((stages, rank, width), dy.dtype, transforms=transforms(width, dy.dtype)),
            s_smem=plgpu.SMEM((size, rank, ROWS), dy.dtype, transforms=transforms(ROWS, dy.dtype)),
            barrier=plgpu.Barrier(num_arrivals=size + 1, num_barriers=stages),
            s_barrier=plgpu.Barrier(num_arrivals=size),
        )
        def _(dy_smem, b_smem, s_smem, barrier, s_barrier):
            @pl.when(count > 0)
            def _():
                def fetch(step, slot):
                    columns = pl.ds((part * steps + step) * width, width)
                    for j in range(size):
                        plgpu.copy_gmem_to_smem(
                            dy_gmem.at[row_ranges[j], columns], dy_smem.at[slot, j], barrier.at[slot]
                        )
                    plgpu.copy_gmem_to_smem(b_gmem.at[adapter].at[:, columns], b_smem.at[slot], barrier.at[slot])

                for step in range(stages):
                    fetch(step, step)
                own = pl.ds(rank_offset, rank)
                for j in range(size):
                    row0 = jnp.where(j < count, blocks[j] * ROWS, num_rows)
                    plgpu.copy_gmem_to_smem(s_gmem.at[own, pl.ds(row0, ROWS)], s_smem.at[j], s_barrier)
                plgpu.barrier_wait(s_barrier)

                @functools.partial(pl.run_scoped, ds_accs=[plgpu.ACC((ROWS, rank), jnp.float32)] * size)
                def _(ds_accs):
                    def body(step, _):
                        slot = lax.rem(step, stages)
                        plgpu.barrier_wait(barrier.at[slot])

                        @functools.partial(pl.run_scoped, db_acc=plgpu.ACC((width, rank), jnp.float32))
                        def _(db_acc):
                            for j in range(size):
                                tile = dy_smem.at[slot, j]
                                plgpu.wgmma(ds_accs[j], tile, b_smem.at[slot].transpose((1, 0)))
                                plgpu.wgmma(db_acc, tile.transpose((1, 0)), s_smem.at[j].transpose((1, 0)))
                            plgpu.wgmma_wait(0)
                            columns = pl.ds((part * steps + step) * width, width)
                            store_fragment(db_gmem.at[chunk, columns, :], db_acc[...])

                        plgpu.commit_smem()  # every warp is done with the slot

                        @pl.when(step + stages < steps)
                        def _():
                            fetch(step + stages, slot)

                    lax.fori_loop(0, steps, body, None)
                    for j in range(size):

                        @pl.when(j < count)
                        def _(j=j):
                            store_fragment(ds_gmem.at[part, row_ranges[j], :], ds_accs[j][...])

    run = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((config.split_n, num_rows, rank), jnp.float32),
            jax.ShapeDtypeStruct((total, num_out, rank), jnp.float32),
        ),
        grid=(total, config.split_n),
        grid_names=("chunk", "part"),
        kernel_name="lora_wide_dsdb",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return vary_like(run(dy, s, b, chunks.blocks.reshape(-1), chunks.count, chunks.adapter), dy)
