"""dA = drop(x)^T dS in one pass over x, for Hopper: tiles of x are masked in shared memory and multiplied there.

A program reads some columns of a chunk's row blocks through a ring of `stages` slots.  One warpgroup masks, multiplies
and refills the slots: the copy engine works `stages - 1` blocks ahead.

T packed tokens · K in features · R padded rank (of all projections together) · C chunks
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

from pallas_kernels.dropout import BLOCK, WORDS
from pallas_kernels.linear.chunks import Chunks
from pallas_kernels.linear.hopper.mask import apply_words, first_bit, keep_words_of, load_words
from pallas_kernels.linear.hopper.tiling import ROWS, block_of_chunk, store_fragment, transforms
from pallas_kernels.manual_axes import vary_like

LOW_RANK = 64  # dS^T is read transposed in its 128-byte swizzle: the low-rank product takes 64 ranks at a time


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DropDaConfig:
    blocks_per_chunk: int = 16
    block_k: int = 128
    stages: int = 4

    block_t = ROWS

    def smem_bytes(self, rank: int) -> int:
        """Shared memory of a program with 2-byte operands, if it makes the low-rank part of dx, too."""
        depth = -(-rank // LOW_RANK) * LOW_RANK
        stage = 2 * ROWS * (self.block_k + depth) + 4 * ROWS * WORDS
        return min(self.stages, self.blocks_per_chunk) * stage + 2 * self.block_k * (depth + ROWS)


def drop_da_config(num_rows: int, num_in: int, rank: int) -> DropDaConfig:
    size = max(1, min(num_rows // 8, 1024) // ROWS)
    return DropDaConfig(blocks_per_chunk=size, stages=3 if rank <= 64 else 2)  # two blocks a multiprocessor


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

    The second is the low-rank part of dx, for a product that adds to it; None without a bank.

    Args:
        ds: [>= R, T]: transposed, so that its tiles lie in shared memory as those of x do; zeros after R.
        bits: uint32 [T, K / 256, 8].
        chunks: of 64-row blocks.
        bank: [A + 1, rows of ds: a multiple of LOW_RANK, K], the dropout scale folded in; adapter A is zero.
    """
    num_in, total, has_low = x.shape[1], chunks.blocks.shape[0], bank is not None
    static = _Static(
        width=config.block_k, rank=rank, depth=ds.shape[0], dtype=x.dtype, size=config.blocks_per_chunk,
        stages=min(config.stages, config.blocks_per_chunk), has_low=has_low,
    )  # fmt: skip
    operands = {
        "x_gmem": x, "ds_gmem": ds, "bits_gmem": bits, "blocks_gmem": chunks.blocks.reshape(-1),
        "count_gmem": chunks.count,
    }  # fmt: skip
    results = {"out_gmem": jax.ShapeDtypeStruct((total, num_in, rank), jnp.float32)}
    if has_low:
        operands |= {"adapter_gmem": chunks.adapter, "bank_gmem": bank}
        results["low_gmem"] = jax.ShapeDtypeStruct(x.shape, x.dtype)
    out = vary_like(_launch(static, operands, results, grid=(total, num_in // static.width)), x)
    return out if has_low else (out[0], None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Static:
    """What the kernel is built from, besides its operands."""

    width: int  # columns of x
    rank: int
    depth: int  # rows of ds
    dtype: Any
    size: int  # blocks of a chunk at most
    stages: int
    has_low: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Refs:
    """Operands and results (gmem: device memory), and slots in shared memory (smem); the last five need a bank."""

    x_gmem: Any  # [T, K]
    ds_gmem: Any  # [>= R, T]
    bits_gmem: Any  # uint32 [T, K / 256, 8]
    blocks_gmem: Any  # int32, row blocks of all chunks
    count_gmem: Any  # int32 [C], row blocks of a chunk
    out_gmem: Any  # float32 [C, K, R], sums of dA
    x_smem: Any  # [stages, 64, width]
    ds_smem: Any  # [stages, depth, 64]
    words_smem: Any  # uint32 [stages, 64, 8]
    barrier: Any  # one a slot, passed by the copies of x, dS and words
    adapter_gmem: Any = None  # int32 [C]
    bank_gmem: Any = None  # [A + 1, depth, K]
    low_gmem: Any = None  # [T, K], mask * (dS A^T)
    bank_smem: Any = None  # [depth, width]: the adapter's columns, loaded once
    low_smem: Any = None  # [64, width]: a tile on its way out
    bank_barrier: Any = None


class _Chunk(NamedTuple):
    """What a program works on: some columns of a chunk's rows."""

    number: Any
    column0: Any
    columns: Any
    count: Any  # of row blocks
    block_of: Callable[[Any], Any]  # step -> row block


def _launch(static: _Static, operands: dict[str, jax.Array], results: dict[str, Any], *, grid: tuple[int, int]):
    """One program for `width` columns and a chunk of row blocks; neighbours share pages of device memory."""

    def kernel(*gmem):
        in_memory = dict(zip((*operands, *results), gmem, strict=True))

        @functools.partial(pl.run_scoped, **_scratch(static))
        def _(**scratch):
            _multiply_chunk(static, _Refs(**in_memory, **scratch))

    return plgpu.kernel(
        kernel,
        out_type=tuple(results.values()),
        grid=grid,
        grid_names=("chunk", "columns"),
        kernel_name="lora_drop_da",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(*operands.values())


def _scratch(static: _Static) -> dict[str, Any]:
    stages, width, dtype = static.stages, static.width, static.dtype
    wide, narrow = transforms(width, dtype), transforms(ROWS, dtype)
    scratch = {
        "x_smem": plgpu.SMEM((stages, ROWS, width), dtype, transforms=wide),
        "ds_smem": plgpu.SMEM((stages, static.depth, ROWS), dtype, transforms=narrow),
        "words_smem": plgpu.SMEM((stages, ROWS, WORDS), jnp.uint32),
        "barrier": plgpu.Barrier(num_arrivals=3, num_barriers=stages),
    }
    if static.has_low:
        scratch |= {
            "bank_smem": plgpu.SMEM((static.depth, width), dtype, transforms=wide),
            "low_smem": plgpu.SMEM((ROWS, width), dtype, transforms=wide),
            "bank_barrier": plgpu.Barrier(),
        }
    return scratch


def _multiply_chunk(static: _Static, refs: _Refs) -> None:
    """dA of some columns over a chunk, and their low-rank part of dx."""
    number, column0 = lax.axis_index("chunk"), lax.axis_index("columns") * static.width
    chunk = _Chunk(
        number=number,
        column0=column0,
        columns=pl.ds(column0, static.width),
        count=refs.count_gmem[number],
        block_of=functools.partial(block_of_chunk, refs.blocks_gmem, number, static.size),
    )
    if static.has_low:
        adapter = lax.max(
            refs.adapter_gmem[number], jnp.int32(0)
        )  # an empty chunk has -1, and loads what it never uses
        plgpu.copy_gmem_to_smem(refs.bank_gmem.at[adapter].at[:, chunk.columns], refs.bank_smem, refs.bank_barrier)
    for step in range(static.stages):
        _fetch(refs, chunk, jnp.int32(step), step, chunk.block_of(jnp.int32(step)))
    if static.has_low:
        plgpu.barrier_wait(refs.bank_barrier)  # the first tiles are under way meanwhile
    first = first_bit(column0)

    @functools.partial(pl.run_scoped, acc=plgpu.ACC((static.width, static.rank), jnp.float32))
    def _(acc):
        multiply_tile = functools.partial(_multiply_tile, static, refs, chunk, first, acc)
        lax.fori_loop(0, chunk.count, multiply_tile, None)
        store_fragment(refs.out_gmem.at[number, chunk.columns, :], acc[...])
        if static.has_low:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # low_smem is read before the program's memory goes


def _fetch(refs: _Refs, chunk: _Chunk, step, slot, block) -> None:
    """Starts the three copies of a row block into a slot; nothing after the chunk's last block."""

    @pl.when(step < chunk.count)
    def _():
        rows = pl.ds(block * ROWS, ROWS)
        plgpu.copy_gmem_to_smem(refs.x_gmem.at[rows, chunk.columns], refs.x_smem.at[slot], refs.barrier.at[slot])
        plgpu.copy_gmem_to_smem(refs.ds_gmem.at[:, rows], refs.ds_smem.at[slot], refs.barrier.at[slot])
        words_gmem = refs.bits_gmem.at[rows, lax.div(chunk.column0, BLOCK), :]
        plgpu.copy_gmem_to_smem(words_gmem, refs.words_smem.at[slot], refs.barrier.at[slot])


def _multiply_tile(static: _Static, refs: _Refs, chunk: _Chunk, first: jax.Array, acc, step, _) -> None:
    """acc += drop(x)^T dS of a row block, and with a bank mask * (dS A^T) of it.

    Args:
        first: the bit of the first column.
    """
    stages = static.stages
    slot = lax.rem(step, stages)
    # Numbers of blocks are read one step before they are needed, to hide the latency of device memory.
    this, ahead = chunk.block_of(step), chunk.block_of(step - 1 + stages)
    plgpu.barrier_wait(refs.barrier.at[slot])  # x, dS and words of this block have arrived
    words = load_words(refs.words_smem.at[slot], first)
    apply_words(refs.x_smem.at[slot], words)  # ends in a barrier of the warpgroup

    # The previous step's slot is free: its products have completed, and every warp reads before that barrier.
    @pl.when(step > 0)
    def _():
        _fetch(refs, chunk, step - 1 + stages, lax.rem(step - 1, stages), ahead)

    ranks = refs.ds_smem.at[slot, pl.ds(0, static.rank)]  # without the zeros that fill up the bank's tiles
    plgpu.wgmma(acc, refs.x_smem.at[slot].transpose((1, 0)), ranks.transpose((1, 0)))
    if static.has_low:
        low = _low_rank(refs.ds_smem.at[slot].transpose((1, 0)), refs.bank_smem)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous tile has left low_smem
        refs.low_smem[...] = keep_words_of(low, words).astype(static.dtype)
        plgpu.commit_smem()  # all warps have written before the copy engine reads
        plgpu.copy_smem_to_gmem(refs.low_smem, refs.low_gmem.at[pl.ds(this * ROWS, ROWS), chunk.columns])
    else:
        plgpu.wgmma_wait(0)


def _low_rank(ds_smem, bank_smem) -> jax.Array:
    """dS A^T of a tile. Waits for all products that were issued, so also for that of dA."""

    @functools.partial(pl.run_scoped, acc=plgpu.ACC((ROWS, bank_smem.shape[1]), jnp.float32))
    def low(acc):
        plgpu.wgmma(acc, ds_smem, bank_smem)
        plgpu.wgmma_wait(0)
        return acc[...]

    return low
