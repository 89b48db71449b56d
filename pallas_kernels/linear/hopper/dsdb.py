"""dS = scale dY B^T and dB = scale S^T dY in one pass over dY, for Hopper: one tile of dY feeds both products.

A program has a few row blocks of one adapter and a range of columns.  It loads S of its rows once and streams dY and B
through a ring of `stages` slots, a column block at a time.  dS stays in registers over all columns.  dB of a column
block is summed over the rows and written as one partial sum.  More rows mean fewer bytes: partial sums, written and
read again, are 2 R / rows of the bytes of dY.

T packed tokens · N out features · R padded rank · A adapters · C chunks of row blocks
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.linear.chunks import Chunks
from pallas_kernels.linear.hopper.tiling import ROWS, store_fragment, transforms
from pallas_kernels.manual_axes import vary_like
from pallas_kernels.policy import HOPPER_SMS
from pallas_kernels.sizes import row_block, split_loop


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


def wide_dsdb_config(num_rows: int, num_out: int) -> WideDsdbConfig:
    block_n = row_block(num_out, 64)
    split = split_loop(num_rows // (ROWS * 4), num_out // block_n, wanted=2 * HOPPER_SMS)
    return WideDsdbConfig(block_n=block_n, split_n=split)


def wide_dsdb(
    dy: jax.Array, s: jax.Array, b: jax.Array, chunks: Chunks, *, rank_offset: int = 0, config: WideDsdbConfig
) -> tuple[jax.Array, jax.Array]:
    """Returns partial sums, float32, of dS [split_n, T, R] and of dB [C, N, R] (without scale; transposed).

    Args:
        s: [>= R, T + 64]: transposed, 64 zeros after the rows. Rows rank_offset .. rank_offset + R
            belong to this projection.
        b: [A + 1, R, N], the scale folded in; padding rows are served by an adapter of zeros.
        chunks: of 64-row blocks.
    """
    (num_rows, num_out), total, rank = dy.shape, chunks.blocks.shape[0], b.shape[1]
    steps = num_out // config.block_n // config.split_n
    static = _Static(
        config=config, rank=rank, rank_offset=rank_offset, last=b.shape[0] - 1, num_rows=num_rows, steps=steps,
        stages=min(config.stages, steps),
    )  # fmt: skip
    operands = {
        "dy_gmem": dy, "s_gmem": s, "b_gmem": b, "blocks_gmem": chunks.blocks.reshape(-1), "count_gmem": chunks.count,
        "adapter_gmem": chunks.adapter,
    }  # fmt: skip
    results = {
        "ds_gmem": jax.ShapeDtypeStruct((config.split_n, num_rows, rank), jnp.float32),
        "db_gmem": jax.ShapeDtypeStruct((total, num_out, rank), jnp.float32),
    }

    def kernel(*gmem):
        in_memory = dict(zip((*operands, *results), gmem, strict=True))
        chunk = _chunk(static, _Refs(**in_memory))

        @functools.partial(pl.run_scoped, **_scratch(static, dy.dtype))
        def _(**scratch):
            refs, tiles = _Refs(**in_memory), _Scratch(**scratch)
            pl.when(chunk.count > 0)(lambda: _multiply_chunk(static, refs, tiles, chunk))

    run = plgpu.kernel(
        kernel,
        out_type=tuple(results.values()),
        grid=(total, config.split_n),
        grid_names=("chunk", "part"),
        kernel_name="lora_wide_dsdb",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return vary_like(run(*operands.values()), dy)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Static:
    """What the kernel is built from, besides its operands."""

    config: WideDsdbConfig
    rank: int
    rank_offset: int
    last: int  # the adapter of zeros
    num_rows: int
    steps: int
    stages: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Refs:
    """Operands and results in device memory."""

    dy_gmem: Any  # [T, N]
    s_gmem: Any  # [>= R, T + 64], the last 64 columns zero
    b_gmem: Any  # [A + 1, R, N]
    blocks_gmem: Any  # int32, row blocks of all chunks
    count_gmem: Any  # int32 [C], row blocks of a chunk
    adapter_gmem: Any  # int32 [C]
    ds_gmem: Any  # float32 [split_n, T, R]
    db_gmem: Any  # float32 [C, N, R]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Scratch:
    """Tiles in shared memory, and their barriers."""

    dy_smem: Any  # [stages, blocks of a chunk, 64, block_n]
    b_smem: Any  # [stages, R, block_n]
    s_smem: Any  # [blocks of a chunk, R, 64]
    barrier: Any  # one a slot, passed by its copies of dY and B
    s_barrier: Any  # passed by the copies of S


class _Chunk(NamedTuple):
    """What a program works on: a part of the columns of a chunk's rows."""

    number: Any
    part: Any
    count: Any  # of row blocks
    adapter: Any
    blocks: list[Any]
    row_ranges: list[Any]

    def columns(self, static: _Static, step) -> Any:
        return pl.ds((self.part * static.steps + step) * static.config.block_n, static.config.block_n)


def _chunk(static: _Static, refs: _Refs) -> _Chunk:
    number, part = lax.axis_index("chunk"), lax.axis_index("part")
    count = refs.count_gmem[number]
    adapter = lax.clamp(jnp.int32(0), refs.adapter_gmem[number], jnp.int32(static.last))
    # A chunk with fewer blocks repeats its first one: every program has the same loads and products. The repeated rows
    # meet S of zeros, so they add nothing to dB, and their dS is not stored.
    size = static.config.blocks_per_chunk
    blocks = [refs.blocks_gmem[number * size + jnp.where(j < count, j, 0)] for j in range(size)]
    row_ranges = [pl.ds(lax.max(block, jnp.int32(0)) * ROWS, ROWS) for block in blocks]
    return _Chunk(number, part, count, adapter, blocks, row_ranges)


def _scratch(static: _Static, dtype: Any) -> dict[str, Any]:
    stages, rank, size, width = static.stages, static.rank, static.config.blocks_per_chunk, static.config.block_n
    return {
        "dy_smem": plgpu.SMEM((stages, size, ROWS, width), dtype, transforms=transforms(width, dtype)),
        "b_smem": plgpu.SMEM((stages, rank, width), dtype, transforms=transforms(width, dtype)),
        "s_smem": plgpu.SMEM((size, rank, ROWS), dtype, transforms=transforms(ROWS, dtype)),
        "barrier": plgpu.Barrier(num_arrivals=size + 1, num_barriers=stages),
        "s_barrier": plgpu.Barrier(num_arrivals=size),
    }


def _multiply_chunk(static: _Static, refs: _Refs, tiles: _Scratch, chunk: _Chunk) -> None:
    size = static.config.blocks_per_chunk
    for step in range(static.stages):
        _fetch(static, refs, tiles, chunk, step, step)
    ranks = pl.ds(static.rank_offset, static.rank)
    for j in range(size):
        row0 = jnp.where(j < chunk.count, chunk.blocks[j] * ROWS, static.num_rows)  # after the last row are zeros
        plgpu.copy_gmem_to_smem(refs.s_gmem.at[ranks, pl.ds(row0, ROWS)], tiles.s_smem.at[j], tiles.s_barrier)
    plgpu.barrier_wait(tiles.s_barrier)  # S stays for all columns

    @functools.partial(pl.run_scoped, ds_accs=[plgpu.ACC((ROWS, static.rank), jnp.float32)] * size)
    def _(ds_accs):
        lax.fori_loop(0, static.steps, functools.partial(_multiply_columns, static, refs, tiles, chunk, ds_accs), None)
        for j in range(size):

            @pl.when(j < chunk.count)
            def _(j=j):
                store_fragment(refs.ds_gmem.at[chunk.part, chunk.row_ranges[j], :], ds_accs[j][...])


def _fetch(static: _Static, refs: _Refs, tiles: _Scratch, chunk: _Chunk, step, slot) -> None:
    """Starts the copies of a column block into a slot: dY of every row block, and B."""
    columns, barrier = chunk.columns(static, step), tiles.barrier.at[slot]
    for j, rows in enumerate(chunk.row_ranges):
        plgpu.copy_gmem_to_smem(refs.dy_gmem.at[rows, columns], tiles.dy_smem.at[slot, j], barrier)
    plgpu.copy_gmem_to_smem(refs.b_gmem.at[chunk.adapter].at[:, columns], tiles.b_smem.at[slot], barrier)


def _multiply_columns(static: _Static, refs: _Refs, tiles: _Scratch, chunk: _Chunk, ds_accs, step, _) -> None:
    """dS += dY B^T of every row block, and dB of a column block."""
    slot = lax.rem(step, static.stages)
    plgpu.barrier_wait(tiles.barrier.at[slot])  # dY and B of these columns have arrived

    @functools.partial(pl.run_scoped, db_acc=plgpu.ACC((static.config.block_n, static.rank), jnp.float32))
    def _(db_acc):
        for j, ds_acc in enumerate(ds_accs):
            tile = tiles.dy_smem.at[slot, j]
            plgpu.wgmma(ds_acc, tile, tiles.b_smem.at[slot].transpose((1, 0)))
            plgpu.wgmma(db_acc, tile.transpose((1, 0)), tiles.s_smem.at[j].transpose((1, 0)))
        plgpu.wgmma_wait(0)  # all products at once: each reads dY from the same tile
        store_fragment(refs.db_gmem.at[chunk.number, chunk.columns(static, step), :], db_acc[...])

    plgpu.commit_smem()  # a barrier of the warpgroup: every warp's products have read the slot

    @pl.when(step + static.stages < static.steps)
    def _():
        _fetch(static, refs, tiles, chunk, step + static.stages, slot)
