"""A product of 8-bit floats with its scales and low-rank part in the last step, for Hopper (TMA, wgmma).

    y[m, n] = (sum_c lhs[m, c] rhs[n, c] + low[m] bank[k, :, n]) · row_scale[m] · column_scale[n],  k = adapter of row m
              or instead of a low-rank part + addend[m, n], after the scales

The low-rank part goes into the accumulator in bfloat16, divided by the scales beforehand: they are powers of two, so
nothing is rounded. cuBLAS knows one scale for a whole array only; this saves the pass that would scale its result. A
tile of the addend is fetched during its product, into the shared memory from which the result is stored. Tiles and
walk are those of `linear.hopper.gemm`. Where stages divide the steps, the pipeline goes on from tile to tile: the first
operands of a tile are copied while the one before it is stored.

GEMM letters: M rows · C contracted features · N columns of the result · R padded rank · A adapters
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.linear.hopper.gemm_config import GemmConfig
from pallas_kernels.linear.hopper.tiling import SMEM_BYTES, store_fragment, transforms
from pallas_kernels.manual_axes import vary_like

BY_ROW, BY_COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
OUT = jnp.bfloat16
DEFAULT = GemmConfig(tile_k=128, split_n=False, along_n=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """The low-rank part of a product.

    Args:
        s: [M, >= R], divided by the row scales; columns offset .. offset + R meet the bank.
        bank: [A + 1, R, N], divided by the column scales; adapter A is zero and serves padding rows.
        block_adapter: of every block of config.tile_m rows.
    """

    s: Float[Array, "M _"]
    bank: Float[Array, "A R N"]
    block_adapter: Int[Array, " blocks"]
    offset: int = 0


def gemm(
    lhs: Float[Array, "M C"],
    rhs: Float[Array, "N C"],
    row_scales: Float[Array, " M"],
    column_scales: Float[Array, " N"] | None,
    low: LowRank | None = None,
    addend: Float[Array, "M N"] | None = None,
    *,
    config: GemmConfig = DEFAULT,
    num_sms: int,
) -> Float[Array, "M N"]:
    """Returns y in bfloat16. Blocks of the config divide M, N and C.

    Args:
        addend: bfloat16, in a call without low-rank part; `fit_addend` makes a config that leaves room for it.
    """
    return _run(lhs, rhs, row_scales, column_scales, low, addend, config=config, num_sms=num_sms, measured=False)[0]


def measured_gemm(
    lhs: Float[Array, "M C"],
    rhs: Float[Array, "N C"],
    row_scales: Float[Array, " M"],
    column_scales: Float[Array, " N"] | None,
    *,
    config: GemmConfig = DEFAULT,
    num_sms: int,
) -> tuple[Float[Array, "M N"], Float[Array, " M"]]:
    """Returns y, and the largest |y| of every row as it is before it is rounded; NaN counts as nothing."""
    operands = (lhs, rhs, row_scales, column_scales, None, None)
    y, largest = _run(*operands, config=config, num_sms=num_sms, measured=True)
    # A row for each column tile: blocks need not agree on one maximum while they run.
    return y, largest.max(0)


def _run(lhs, rhs, row_scales, column_scales, low: LowRank | None, addend, *, config, num_sms, measured: bool):
    assert low is None or addend is None
    num_rows, depth = lhs.shape
    num_columns = rhs.shape[0]
    grid = num_rows // config.block_m, num_columns // config.block_n
    by_name = {"lhs": lhs, "rhs": rhs, "row": row_scales, "column": column_scales, "addend": addend}
    by_name |= {"low": low and low.s, "bank": low and low.bank, "adapter": low and low.block_adapter}
    operands = {name: array for name, array in by_name.items() if array is not None}
    static = _Static(
        config=config,
        grid=grid,
        steps=depth // config.tile_k,
        rank=low.bank.shape[1] if low else 0,
        offset=low.offset if low else 0,
    )

    def kernel(*refs):
        names = (*operands, "out", *(["largest"] if measured else []))
        _walk(static, _Refs(**dict(zip(names, refs, strict=True))))

    out_type = (
        jax.ShapeDtypeStruct((num_rows, num_columns), OUT),
        jax.ShapeDtypeStruct((num_columns // config.tile_n, num_rows), jnp.float32),
    )
    run = plgpu.kernel(
        kernel,
        out_type=out_type if measured else out_type[:1],
        grid=(num_sms,),
        grid_names=("sm",),
        # Two warpgroups compute, and a third one copies.
        num_threads=3,
        thread_name="wg",
        kernel_name="fp8_product" if addend is None else "fp8_product_add",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return vary_like(run(*operands.values()), lhs)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Static:
    """What the kernel is built from, besides its operands."""

    config: GemmConfig
    grid: tuple[int, int]  # blocks of the output
    steps: int
    rank: int  # 0 without a low-rank part
    offset: int  # first column of S


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Refs:
    """Operands and results in device memory; None where a call has none."""

    lhs: Any  # e4m3 [M, C]
    rhs: Any  # e4m3 [N, C]
    row: Any  # float32 [M]
    column: Any = None  # float32 [N]
    addend: Any = None  # [M, N]
    low: Any = None  # [M, >= R]
    bank: Any = None  # [A + 1, R, N]
    adapter: Any = None  # int32 [M / tile_m]
    out: Any  # [M, N]
    largest: Any = None  # float32 [N / tile_n, M]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Scratch:
    """Shared memory of a block besides the pipeline's buffers; the first axis is the compute warpgroup."""

    out_smem: Any  # [2, slots, store_m, store_n]; with an addend [2, tile_m, tile_n]
    addend_barrier: Any = None
    low_smem: Any = None  # [2, tile_m, R]
    bank_smem: Any = None  # [2, R, tile_n]
    low_barrier: Any = None  # passed by the copies of low and of the bank


def fit_addend(config: GemmConfig) -> GemmConfig:
    """Removes stages until a tile of the addend fits beside them for each of the two warpgroups."""
    tiles = 2 * config.tile_m * config.tile_n * jnp.dtype(OUT).itemsize
    stage = config.tile_k * (config.block_m + config.block_n)
    return dataclasses.replace(config, stages=min(config.stages, (SMEM_BYTES - tiles) // stage))


def _walk(static: _Static, refs: _Refs) -> None:
    """Walks a block over its output tiles."""
    config, rank = static.config, static.rank
    # Stages of a tile must begin where those of the tile before it ended.
    goes_on = static.steps % config.stages == 0
    height, width = min(config.store_m, config.tile_m), min(config.store_n, config.tile_n)
    # An addend arrives as a whole tile in the place from which the result leaves; otherwise chunks take turns.
    slots = (config.tile_m, config.tile_n) if refs.addend is not None else (2, height, width)
    scopes = {"out_smem": plgpu.SMEM((2, *slots), OUT, transforms=transforms(width, OUT))}
    if refs.addend is not None:
        scopes["addend_barrier"] = plgpu.Barrier(num_barriers=2)
    if rank:
        layout = transforms(rank, OUT)  # both operands of the low-rank product must have the same swizzle
        scopes["low_smem"] = plgpu.SMEM((2, config.tile_m, rank), OUT, transforms=layout)
        scopes["bank_smem"] = plgpu.SMEM((2, rank, config.tile_n), OUT, transforms=layout)
        scopes["low_barrier"] = plgpu.Barrier(num_arrivals=2, num_barriers=2)
    # Allocated here, once: the pipeline is made anew for every output tile.
    scopes["buffers"] = _pipeline(config, static.steps, _nothing, _nothing).get_allocations(refs.lhs, refs.rhs)

    @functools.partial(pl.run_scoped, collective_axes="wg", **scopes)
    def _(buffers, **scratch):
        tiles, warpgroup = _Scratch(**scratch), lax.axis_index("wg")

        @plgpu.nd_loop((static.grid[0] * static.grid[1],), collective_axes="sm")
        def _(info):
            # Blocks work on neighbouring tiles at the same time, which share operands in L2.
            block = plgpu.planar_snake(info.index[0], static.grid, 1 if config.along_n else 0, config.band)
            first, later = plgpu.PipelinePipeline.START, plgpu.PipelinePipeline.STEADY
            state = jnp.where(info.local_index == 0, first, later) if goes_on else None
            pipeline = functools.partial(_pipeline, config, static.steps, state=state)
            _multiply_tile(static, refs, tiles, warpgroup, pipeline, buffers, *block)

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tiles are read before the block's memory goes


def _multiply_tile(
    static: _Static,
    refs: _Refs,
    scratch: _Scratch,
    warpgroup: Any,
    pipeline: Any,
    buffers: Any,
    block_row: Any,
    block_col: Any,
) -> None:
    config = static.config
    row0 = block_row * config.block_m + (0 if config.split_n else warpgroup * config.tile_m)
    col0 = block_col * config.block_n + (warpgroup * config.tile_n if config.split_n else 0)
    rows, columns = pl.ds(row0, config.tile_m), pl.ds(col0, config.tile_n)

    def context(run):
        """What a compute warpgroup does around the steps of the pipeline, which are `run`."""
        # These copies are awaited after the last step: they run during the whole product.
        if static.rank:
            # Both places are free: the low-rank product of the previous tile was awaited.
            barrier, adapter = scratch.low_barrier.at[warpgroup], refs.adapter[lax.div(row0, config.tile_m)]
            source = refs.low.at[rows, pl.ds(static.offset, static.rank)]
            plgpu.copy_gmem_to_smem(source, scratch.low_smem.at[warpgroup], barrier)
            plgpu.copy_gmem_to_smem(refs.bank.at[adapter].at[:, columns], scratch.bank_smem.at[warpgroup], barrier)
        if refs.addend is not None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous tile has left out_smem
            source, barrier = refs.addend.at[rows, columns], scratch.addend_barrier.at[warpgroup]
            plgpu.copy_gmem_to_smem(source, scratch.out_smem.at[warpgroup], barrier)

        @functools.partial(pl.run_scoped, acc=plgpu.ACC((config.tile_m, config.tile_n), jnp.float32))
        def _(acc):
            run(acc)
            if static.rank:
                plgpu.barrier_wait(scratch.low_barrier.at[warpgroup])  # low and bank have arrived
                plgpu.wgmma(acc, scratch.low_smem.at[warpgroup], scratch.bank_smem.at[warpgroup])
                plgpu.wgmma_wait(0)
            store = _store if refs.addend is None else _add_and_store
            store(config, refs, scratch, warpgroup, acc[...], row0, col0)

    def step(_, lhs_smem, rhs_smem, acc):
        if config.split_n:
            rhs_smem = rhs_smem.at[pl.ds(warpgroup * config.tile_n, config.tile_n), :]
        else:
            lhs_smem = lhs_smem.at[pl.ds(warpgroup * config.tile_m, config.tile_m)]
        plgpu.wgmma(acc, lhs_smem, rhs_smem.transpose((1, 0)))
        plgpu.wgmma_wait(0)  # the pipeline hands these buffers to the copy engine when this returns
        return acc

    pipeline(step, context)(
        refs.lhs.at[pl.ds(block_row * config.block_m, config.block_m), :],
        refs.rhs.at[pl.ds(block_col * config.block_n, config.block_n), :],
        allocations=buffers,
    )


def _store(config: GemmConfig, refs: _Refs, scratch: _Scratch, warpgroup: Any, acc: Any, row0: Any, col0: Any) -> None:
    """Scales, converts and stores the tile chunk by chunk through two shared-memory slots."""
    height, width = min(config.store_m, config.tile_m), min(config.store_n, config.tile_n)
    per_column = config.tile_m // height
    out_tile = refs.out.at[pl.ds(row0, config.tile_m), pl.ds(col0, config.tile_n)]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # both slots are free: the previous tile's chunks have been read
    largest = None
    for j, chunk in enumerate(_scaled(config, refs, acc, row0, col0, width)):
        if refs.largest is not None:
            most = jnp.max(jnp.abs(chunk), axis=1)
            largest = most if largest is None else jnp.maximum(largest, most)
        chunk = chunk.astype(OUT)
        for i in range(per_column):
            rows, slot = slice(i * height, (i + 1) * height), (j * per_column + i) % 2
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # but one store: this slot's last one has been read
            scratch.out_smem[warpgroup, slot] = chunk[rows]
            plgpu.commit_smem()  # all warps have written before the copy engine reads
            target = out_tile.at[rows, slice(j * width, (j + 1) * width)]
            plgpu.copy_smem_to_gmem(scratch.out_smem.at[warpgroup, slot], target)
    if largest is not None:
        store_fragment(refs.largest.at[lax.div(col0, config.tile_n), pl.ds(row0, config.tile_m)], largest)


def _add_and_store(
    config: GemmConfig, refs: _Refs, scratch: _Scratch, warpgroup: Any, acc: Any, row0: Any, col0: Any
) -> None:
    """Scales the tile, adds it to the addend's tile in shared memory, and stores that."""
    width, out_smem = min(config.store_n, config.tile_n), scratch.out_smem.at[warpgroup]
    plgpu.barrier_wait(scratch.addend_barrier.at[warpgroup])  # the addend's tile has arrived
    for j, chunk in enumerate(_scaled(config, refs, acc, row0, col0, width)):
        columns = out_smem.at[:, pl.ds(j * width, width)]
        addend = plgpu.load(columns, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
        columns[...] = (chunk + addend).astype(OUT)
    plgpu.commit_smem()  # all warps have written before the copy engine reads
    plgpu.copy_smem_to_gmem(out_smem, refs.out.at[pl.ds(row0, config.tile_m), pl.ds(col0, config.tile_n)])


def _scaled(config: GemmConfig, refs: _Refs, acc: Any, row0: Any, col0: Any, width: int) -> Iterator[Any]:
    """The tile times its scales, `width` columns at a time."""
    # Not optimized: a thread reads scattered words here, no 128-byte lines.
    row_scales = plgpu.load(refs.row.at[pl.ds(row0, config.tile_m)], layout=BY_ROW, optimized=False)
    by_row = lax.broadcast_in_dim(row_scales, (config.tile_m, width), [0])
    for j in range(config.tile_n // width):
        chunk = acc[:, j * width : (j + 1) * width] * by_row
        if refs.column is not None:
            scales = plgpu.load(refs.column.at[pl.ds(col0 + j * width, width)], layout=BY_COLUMN, optimized=False)
            chunk = chunk * lax.broadcast_in_dim(scales, (config.tile_m, width), [1])
        yield chunk


def _pipeline(config: GemmConfig, steps: int, body: Any, context: Any, state: Any = None) -> Any:
    def spec(rows: int):
        layout = transforms(config.tile_k, jnp.float8_e4m3fn)
        return plgpu.BlockSpec((rows, config.tile_k), lambda c: (0, c), transforms=layout, memory_space=plgpu.SMEM)

    return plgpu.emit_pipeline_warp_specialized(
        body,
        grid=(steps,),
        # The copying warpgroup needs few; the two that compute hold the accumulators.
        memory_registers=40,
        max_concurrent_steps=config.stages,
        wg_axis="wg",
        num_compute_wgs=2,
        compute_context=context,
        pipeline_state=state,
        in_specs=[spec(config.block_m), spec(config.block_n)],
    )


def _nothing(*_: Any, **__: Any) -> None:
    return None
