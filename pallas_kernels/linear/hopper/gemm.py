"""The frozen product with the low-rank product in the same accumulator, for Hopper (TMA, wgmma, warp specialisation).

forward:   y  = x W + S B[k]                 (scale folded into B)
backward:  dx = dY W^T + mask * (dS A[k]^T)   (dropout scale folded into A)

A persistent grid walks the output tiles.  One warpgroup streams operand tiles into shared memory, two multiply.  Each
of the two fetches its rows of S and its adapter's slice of the bank before its first step and multiplies them after the
last one, so their latency is hidden.  Without dropout they are one more wgmma into the accumulator.  With dropout their
product is formed in pieces in the epilogue, masked, and added; the packed keep bits have the order of the accumulator's
registers, so no bit moves between threads.

GEMM letters: M rows · C contracted features · N columns of the result (T, K and N of the layer forward; T, N and K
backward) · R padded rank · A adapters
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

from pallas_kernels.dropout import BLOCK, WORDS
from pallas_kernels.linear.hopper.gemm_config import GemmConfig
from pallas_kernels.linear.hopper.mask import first_bit, keep_words_of, shifted
from pallas_kernels.linear.hopper.tiling import transforms
from pallas_kernels.manual_axes import vary_like

ADAPTER_BITS = 24  # of an adapter's number: more adapters than fit into any memory


def gemm(
    lhs: jax.Array,
    rhs: jax.Array,
    low: jax.Array,
    bank: jax.Array,
    block_adapter: jax.Array,
    *,
    transposed: bool,
    low_offset: int = 0,
    bits: jax.Array | None = None,
    config: GemmConfig,
    num_sms: int,
) -> jax.Array:
    """Returns lhs @ rhs + mask * (low @ bank[adapter of the row]), [M, N] in lhs.dtype.

    Args:
        low: [M, >= R]; its columns low_offset .. low_offset + R meet the bank.
        transposed: rhs is [N, C] and bank [A + 1, N, R]; otherwise rhs is [C, N] and bank [A + 1, R, N].
        block_adapter: int32 [M / tile_m], 0..A; adapter A is zero and serves padding rows.
        bits: uint32 [M, N / 256, 8], keep bits over the output's columns.
    """
    num_rows, depth = lhs.shape
    out_features = rhs.shape[0] if transposed else rhs.shape[1]
    static = _Static(
        config=config, dtype=lhs.dtype, rank=bank.shape[2] if transposed else bank.shape[1], transposed=transposed,
        low_offset=low_offset, grid=(num_rows // config.block_m, out_features // config.block_n),
        steps=depth // config.tile_k,
    )  # fmt: skip

    def kernel(lhs_gmem, rhs_gmem, low_gmem, bank_gmem, adapter_gmem, *rest):
        bits_gmem, out_gmem = rest if bits is not None else (None, *rest)
        refs = _Refs(
            lhs_gmem=lhs_gmem, rhs_gmem=rhs_gmem, low_gmem=low_gmem, bank_gmem=bank_gmem, adapter_gmem=adapter_gmem,
            bits_gmem=bits_gmem, out_gmem=out_gmem,
        )  # fmt: skip
        _walk(static, refs)

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((num_rows, out_features), lhs.dtype),
        grid=(num_sms,),
        grid_names=("sm",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return vary_like(run(lhs, rhs, low, bank, block_adapter, *([] if bits is None else [bits])), lhs)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Static:
    """What the kernel is built from, besides its operands."""

    config: GemmConfig
    dtype: Any
    rank: int
    transposed: bool
    low_offset: int
    grid: tuple[int, int]  # output tiles of a block
    steps: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Refs:
    """Operands and result in device memory."""

    lhs_gmem: Any  # [M, C]
    rhs_gmem: Any  # [C, N], transposed [N, C]
    low_gmem: Any  # [M, >= R]
    bank_gmem: Any  # [A + 1, R, N], transposed [A + 1, N, R]
    adapter_gmem: Any  # int32 [M / tile_m]
    bits_gmem: Any | None  # uint32 [M, N / 256, 8]
    out_gmem: Any  # [M, N]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Scratch:
    """Shared memory of a block besides the pipeline's buffers; the first axis is the compute warpgroup."""

    out_smem: Any  # [2, slots, store_m, store_n]: chunks on their way out
    low_smem: Any  # [2, tile_m, R]
    bank_smem: Any  # [2, R, tile_n], transposed [2, tile_n, R]
    low_barrier: Any  # one a warpgroup, passed by the copies of low and of the bank


def _walk(static: _Static, refs: _Refs) -> None:
    """Walks a block over its output tiles."""
    scopes = _scopes(static.config, static.dtype, static.rank, static.transposed)
    # The pipeline's buffers are allocated here, once: it is made anew for every output tile.
    scopes["buffers"] = _pipeline(static, _do_nothing, _do_nothing).get_allocations(refs.lhs_gmem, refs.rhs_gmem)

    @functools.partial(pl.run_scoped, collective_axes="wg", **scopes)
    def _(buffers, **scratch):
        warpgroup = lax.axis_index("wg")

        # Block i takes tiles i, i + num_sms, ...: all blocks work on neighbouring tiles, which share operands in L2.
        @plgpu.nd_loop((static.grid[0] * static.grid[1],), collective_axes="sm")
        def _(info):
            _multiply_tile(static, refs, _Scratch(**scratch), warpgroup, buffers, info.index[0])

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last chunks are read before the block's memory goes


def _multiply_tile(
    static: _Static, refs: _Refs, scratch: _Scratch, warpgroup: jax.Array, buffers: Any, number: jax.Array
) -> None:
    config = static.config
    block_row, block_col = plgpu.planar_snake(number, static.grid, 1 if config.along_n else 0, config.band)
    tile = _Tile(
        static=static, scratch=scratch, wg=warpgroup,
        row0=block_row * config.block_m + (0 if config.split_n else warpgroup * config.tile_m),
        col0=block_col * config.block_n + (warpgroup * config.tile_n if config.split_n else 0),
    )  # fmt: skip

    def context(run):
        """What a compute warpgroup does around the steps of the pipeline, which are `run`."""
        adapter = refs.adapter_gmem[lax.div(tile.row0, config.tile_m)]
        # Started before the first step and awaited after the last: the copies run during the whole product. The
        # warpgroup's parts of low_smem and bank_smem are free: the last tile's low-rank product is complete.
        tile.fetch_low(refs.low_gmem, refs.bank_gmem.at[adapter])
        words = None if refs.bits_gmem is None else tile.load_words(refs.bits_gmem)

        @functools.partial(pl.run_scoped, acc=plgpu.ACC((config.tile_m, config.tile_n), jnp.float32))
        def _(acc):
            run(acc)
            plgpu.barrier_wait(scratch.low_barrier.at[warpgroup])  # low and bank have arrived
            if words is None:
                tile.multiply_low(acc, adapter)
            tile.store(acc[...], refs.out_gmem, words)

    def step(_, lhs_smem, rhs_smem, acc):
        plgpu.wgmma(acc, *tile.operands(lhs_smem, rhs_smem))
        plgpu.wgmma_wait(0)  # the pipeline hands these buffers to the copy engine when this returns
        return acc

    rows = pl.ds(block_row * config.block_m, config.block_m)
    columns = pl.ds(block_col * config.block_n, config.block_n)
    _pipeline(static, step, context)(
        refs.lhs_gmem.at[rows, :],
        refs.rhs_gmem.at[columns, :] if static.transposed else refs.rhs_gmem.at[:, columns],
        allocations=buffers,
    )


def _pipeline(static: _Static, body: Any, context: Any) -> Any:
    return plgpu.emit_pipeline_warp_specialized(
        body,
        grid=(static.steps,),
        memory_registers=40,
        max_concurrent_steps=static.config.stages,
        wg_axis="wg",
        num_compute_wgs=2,
        compute_context=context,
        in_specs=_operand_specs(static.config, static.dtype, static.transposed),
    )


def _do_nothing(*_: Any, **__: Any) -> None:
    return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """One output tile as one compute warpgroup sees it."""

    static: _Static
    scratch: _Scratch
    wg: Any  # number of the warpgroup
    row0: Any
    col0: Any

    def fetch_low(self, low_gmem, bank_gmem) -> None:
        """Starts the copies of S and of a slice of the adapter's bank."""
        static, config = self.static, self.static.config
        rows, columns = pl.ds(self.row0, config.tile_m), pl.ds(self.col0, config.tile_n)
        barrier = self.scratch.low_barrier.at[self.wg]
        low = low_gmem.at[rows, pl.ds(static.low_offset, static.rank)]
        plgpu.copy_gmem_to_smem(low, self.scratch.low_smem.at[self.wg], barrier)
        bank = bank_gmem.at[columns, :] if static.transposed else bank_gmem.at[:, columns]
        plgpu.copy_gmem_to_smem(bank, self.scratch.bank_smem.at[self.wg], barrier)

    def operands(self, lhs_smem, rhs_smem):
        """This warpgroup's part of the streamed operands."""
        config, transposed = self.static.config, self.static.transposed
        if config.split_n:
            part = pl.ds(self.wg * config.tile_n, config.tile_n)
            rhs_smem = rhs_smem.at[part, :] if transposed else rhs_smem.at[:, part]
        else:
            lhs_smem = lhs_smem.at[pl.ds(self.wg * config.tile_m, config.tile_m)]
        return lhs_smem, rhs_smem.transpose((1, 0)) if transposed else rhs_smem

    def multiply_low(self, acc, adapter) -> None:
        """acc += S B of the tile, where nothing is dropped."""
        # The index is wg: an adapter's number has no bit that high. The assembler cannot know that. If it could, it
        # would compute these operands' addresses ahead of all tiles and keep them in uniform registers. At rank 64 none
        # would be left for the streamed operands, whose addresses then move through other registers in every step:
        # 2.76 instead of 2.42 million cycles for 8192^3, 8 % at the power limit of an H200 (see `ptxas_report.py`).
        index = self.wg + lax.shift_right_logical(adapter, jnp.int32(ADAPTER_BITS))
        bank = self.scratch.bank_smem.at[index]
        low = self.scratch.low_smem.at[index]
        plgpu.wgmma(acc, low, bank.transpose((1, 0)) if self.static.transposed else bank)
        plgpu.wgmma_wait(0)

    def load_words(self, bits_gmem):
        """Loads the tile's keep words: a thread gets exactly the words of its own rows and column pairs."""
        return plgpu.load(
            bits_gmem.at[pl.ds(self.row0, self.static.config.tile_m), lax.div(self.col0, BLOCK), :],
            layout=plgpu.Layout.WGMMA,
            optimized=False,  # scattered words: no 128-byte lines
        )

    def masked_low(self, words, j: int):
        """mask * (S B) of the j-th store chunk, in a small accumulator beside that of the product."""
        config, width = self.static.config, self.static.config.store_n
        columns = pl.ds(j * width, width)
        bank = self.scratch.bank_smem.at[self.wg]
        bank = bank.at[columns, :].transpose((1, 0)) if self.static.transposed else bank.at[:, columns]

        @functools.partial(pl.run_scoped, acc=plgpu.ACC((config.tile_m, width), jnp.float32))
        def low(acc):
            plgpu.wgmma(acc, self.scratch.low_smem.at[self.wg], bank)
            plgpu.wgmma_wait(0)
            return acc[...]

        return keep_words_of(low, words, first=j * width // WORDS)

    def store(self, acc, out_gmem, words) -> None:
        """Converts and stores the tile chunk by chunk through two shared-memory slots."""
        config, out_smem = self.static.config, self.scratch.out_smem
        height, width = min(config.store_m, config.tile_m), min(config.store_n, config.tile_n)
        per_column = config.tile_m // height
        slots = min(2, per_column * (config.tile_n // width))
        out_tile = out_gmem.at[pl.ds(self.row0, config.tile_m), pl.ds(self.col0, config.tile_n)]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # both slots are free: the last tile's chunks have been read
        # Shifted only now: before the steps of the pipeline, it would wait for the words to arrive.
        words = None if words is None else shifted(words, first_bit(self.col0))
        for j in range(config.tile_n // width):
            columns = slice(j * width, (j + 1) * width)
            chunk = acc[:, columns]
            if words is not None:
                chunk = chunk + self.masked_low(words, j)
            chunk = chunk.astype(self.static.dtype)
            for i in range(per_column):
                rows = slice(i * height, (i + 1) * height)
                slot = (j * per_column + i) % slots
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # but one store: this slot's last one has been read
                out_smem[self.wg, slot] = chunk[rows]
                plgpu.commit_smem()  # all warps have written before the copy engine reads
                plgpu.copy_smem_to_gmem(out_smem.at[self.wg, slot], out_tile.at[rows, columns])


def _operand_specs(config: GemmConfig, dtype: Any, transposed: bool):
    depth = config.tile_k
    rhs = ((config.block_n, depth), lambda k: (0, k)) if transposed else ((depth, config.block_n), lambda k: (k, 0))
    operands = (((config.block_m, depth), lambda k: (0, k)), rhs)
    return [
        plgpu.BlockSpec(shape, index, transforms=transforms(depth, dtype), memory_space=plgpu.SMEM)
        for shape, index in operands
    ]


def _scopes(config: GemmConfig, dtype: Any, rank: int, transposed: bool) -> dict[str, Any]:
    """Shared memory of a block besides the pipeline's buffers."""
    height, width = min(config.store_m, config.tile_m), min(config.store_n, config.tile_n)
    slots = min(2, (config.tile_m // height) * (config.tile_n // width))
    # Both operands of the low-rank product must have the same swizzle; rows of S have R elements, so R decides.
    low = transforms(rank, dtype)
    bank = (2, config.tile_n, rank) if transposed else (2, rank, config.tile_n)
    return {
        "out_smem": plgpu.SMEM((2, slots, height, width), dtype, transforms=transforms(width, dtype)),
        "low_smem": plgpu.SMEM((2, config.tile_m, rank), dtype, transforms=low),
        "bank_smem": plgpu.SMEM(bank, dtype, transforms=low),
        "low_barrier": plgpu.Barrier(num_arrivals=2, num_barriers=2),
    }
