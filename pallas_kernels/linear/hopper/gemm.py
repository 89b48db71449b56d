"""The frozen product with the low-rank product in the same accumulator, for Hopper (TMA, wgmma, warp specialisation).

forward:   y  = x W + S B[k]                 (scale folded into B)
backward:  dx = dY W^T + mask * (dS A[k]^T)   (dropout scale folded into A)

A persistent grid walks the output tiles.  One warpgroup streams operand tiles into shared memory, two multiply.  Each
of the two fetches its own rows of S and its adapter's slice of the bank before its first step and spends them after
the last one, so their latency is hidden.  Without dropout they are one more wgmma into the accumulator; with dropout
the product is formed in pieces in the epilogue, masked with packed keep bits whose order is the accumulator's own
register layout, and added.

GEMM letters: M rows · C contracted features · N columns of the result (T, K and N of the layer forward; T, N and K
backward) · R padded rank · A adapters
"""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
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
        _walk(
            static,
            SimpleNamespace(
                lhs_gmem=lhs_gmem, rhs_gmem=rhs_gmem, low_gmem=low_gmem, bank_gmem=bank_gmem, adapter_gmem=adapter_gmem,
                bits_gmem=bits_gmem, out_gmem=out_gmem,
            ),
        )  # fmt: skip

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


def _walk(static: _Static, refs: SimpleNamespace) -> None:
    """A block's way over the output."""
    scopes = _scopes(static.config, static.dtype, static.rank, static.transposed)
    scopes["buffers"] = _pipeline(static, _do_nothing, _do_nothing).get_allocations(refs.lhs_gmem, refs.rhs_gmem)

    @functools.partial(pl.run_scoped, collective_axes="wg", **scopes)
    def _(buffers, **scratch):
        own = SimpleNamespace(**vars(refs), **scratch, wg=lax.axis_index("wg"))

        @plgpu.nd_loop((static.grid[0] * static.grid[1],), collective_axes="sm")
        def _(info):
            _one_tile(static, own, buffers, info.index[0])

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _one_tile(static: _Static, refs: SimpleNamespace, buffers: Any, number: jax.Array) -> None:
    config = static.config
    block_row, block_col = plgpu.planar_snake(number, static.grid, 1 if config.along_n else 0, config.band)
    tile = _Tile(
        config=config, dtype=static.dtype, rank=static.rank, transposed=static.transposed, wg=refs.wg,
        row0=block_row * config.block_m + (0 if config.split_n else refs.wg * config.tile_m),
        col0=block_col * config.block_n + (refs.wg * config.tile_n if config.split_n else 0),
        low_smem=refs.low_smem, bank_smem=refs.bank_smem, low_barrier=refs.low_barrier, out_smem=refs.out_smem,
    )  # fmt: skip

    def context(run):
        adapter = refs.adapter_gmem[lax.div(tile.row0, config.tile_m)]
        tile.fetch_low(refs.low_gmem, static.low_offset, refs.bank_gmem.at[adapter])
        words = None if refs.bits_gmem is None else tile.load_words(refs.bits_gmem)

        @functools.partial(pl.run_scoped, acc=plgpu.ACC((config.tile_m, config.tile_n), jnp.float32))
        def _(acc):
            run(acc)
            plgpu.barrier_wait(refs.low_barrier.at[refs.wg])
            if words is None:
                tile.multiply_low(acc, adapter)
            tile.store(acc[...], refs.out_gmem, words)

    def step(_, lhs_smem, rhs_smem, acc):
        plgpu.wgmma(acc, *tile.operands(lhs_smem, rhs_smem))
        plgpu.wgmma_wait(0)
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

    config: GemmConfig
    dtype: Any
    rank: int
    transposed: bool
    wg: Any
    row0: Any
    col0: Any
    low_smem: Any
    bank_smem: Any
    low_barrier: Any
    out_smem: Any

    def fetch_low(self, low_gmem, low_offset, bank_gmem) -> None:
        """Starts the copies of S and of a slice of the adapter's bank."""
        rows, columns = pl.ds(self.row0, self.config.tile_m), pl.ds(self.col0, self.config.tile_n)
        barrier = self.low_barrier.at[self.wg]
        plgpu.copy_gmem_to_smem(low_gmem.at[rows, pl.ds(low_offset, self.rank)], self.low_smem.at[self.wg], barrier)
        source = bank_gmem.at[columns, :] if self.transposed else bank_gmem.at[:, columns]
        plgpu.copy_gmem_to_smem(source, self.bank_smem.at[self.wg], barrier)

    def operands(self, lhs_smem, rhs_smem):
        """This warpgroup's part of the streamed operands."""
        config = self.config
        if config.split_n:
            part = pl.ds(self.wg * config.tile_n, config.tile_n)
            rhs_smem = rhs_smem.at[part, :] if self.transposed else rhs_smem.at[:, part]
        else:
            lhs_smem = lhs_smem.at[pl.ds(self.wg * config.tile_m, config.tile_m)]
        return lhs_smem, rhs_smem.transpose((1, 0)) if self.transposed else rhs_smem

    def multiply_low(self, acc, adapter) -> None:
        # The place is wg, but the assembler cannot know that, as it depends on a number from memory. Otherwise it works
        # out these operands' addresses ahead of all tiles and holds them in uniform registers; at rank 64 none are left
        # for those of the streamed operands then, which pass through others in every step: 2.76 instead of 2.42 million
        # cycles for 8192^3, 8 % longer at the power limit of an H200 (`ptxas_report.py` looks for such steps).
        place = self.wg + lax.shift_right_logical(adapter, jnp.int32(ADAPTER_BITS))
        bank = self.bank_smem.at[place]
        plgpu.wgmma(acc, self.low_smem.at[place], bank.transpose((1, 0)) if self.transposed else bank)
        plgpu.wgmma_wait(0)

    def load_words(self, bits_gmem):
        """Loads the tile's keep words: a thread gets exactly the words of its own rows and column pairs."""
        return plgpu.load(
            bits_gmem.at[pl.ds(self.row0, self.config.tile_m), lax.div(self.col0, BLOCK), :],
            layout=plgpu.Layout.WGMMA,
            optimized=False,
        )

    def masked_low(self, words, j: int):
        """mask * (S B) of the j-th store chunk, in a small accumulator of its own."""
        width = self.config.store_n
        columns = pl.ds(j * width, width)
        bank = self.bank_smem.at[self.wg]
        bank = bank.at[columns, :].transpose((1, 0)) if self.transposed else bank.at[:, columns]

        @functools.partial(pl.run_scoped, acc=plgpu.ACC((self.config.tile_m, width), jnp.float32))
        def low(acc):
            plgpu.wgmma(acc, self.low_smem.at[self.wg], bank)
            plgpu.wgmma_wait(0)
            return acc[...]

        return keep_words_of(low, words, first=j * width // WORDS)

    def store(self, acc, out_gmem, words) -> None:
        """Converts and stores the tile chunk by chunk through two shared-memory slots."""
        config = self.config
        height, width = min(config.store_m, config.tile_m), min(config.store_n, config.tile_n)
        per_column = config.tile_m // height
        slots = min(2, per_column * (config.tile_n // width))
        out_tile = out_gmem.at[pl.ds(self.row0, config.tile_m), pl.ds(self.col0, config.tile_n)]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        # after the loop, or it would wait for the load
        words = None if words is None else shifted(words, first_bit(self.col0))
        for j in range(config.tile_n // width):
            columns = slice(j * width, (j + 1) * width)
            chunk = acc[:, columns]
            if words is not None:
                chunk = chunk + self.masked_low(words, j)
            chunk = chunk.astype(self.dtype)
            for i in range(per_column):
                rows = slice(i * height, (i + 1) * height)
                slot = (j * per_column + i) % slots
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                self.out_smem[self.wg, slot] = chunk[rows]
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(self.out_smem.at[self.wg, slot], out_tile.at[rows, columns])


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
    # both operands of the low-rank product must share one swizzle; S has rows of R elements, so R decides
    low = transforms(rank, dtype)
    bank = (2, config.tile_n, rank) if transposed else (2, rank, config.tile_n)
    return {
        "out_smem": plgpu.SMEM((2, slots, height, width), dtype, transforms=transforms(width, dtype)),
        "low_smem": plgpu.SMEM((2, config.tile_m, rank), dtype, transforms=low),
        "bank_smem": plgpu.SMEM(bank, dtype, transforms=low),
        "low_barrier": plgpu.Barrier(num_arrivals=2, num_barriers=2),
    }
