"""A product of 8-bit floats with its scales and low-rank part in the last step, for Hopper (TMA, wgmma).

    y[m, n] = (sum_c lhs[m, c] rhs[n, c] + low[m] bank[k, :, n]) · row_scale[m] · column_scale[n],  k = adapter of row m
              or instead of a low-rank part + addend[m, n], after the scales

The low-rank part goes into the accumulator in bfloat16, divided by the scales beforehand: they are powers of two, so
that rounds nothing. Against cuBLAS's product, which knows one scale for a whole array only, this saves the pass that
scales its result. A tile of the addend is fetched while its product is made, to where the result is stored from. Tiles,
walk and pipeline are those of `linear.hopper.gemm`.

GEMM letters: M rows · C contracted features · N columns of the result · R padded rank · A adapters
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from types import SimpleNamespace
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
    return y, largest.max(0)


def _run(lhs, rhs, row_scales, column_scales, low: LowRank | None, addend, *, config, num_sms, measured: bool):
    assert low is None or addend is None
    num_rows, depth = lhs.shape
    num_columns = rhs.shape[0]
    grid = num_rows // config.block_m, num_columns // config.block_n
    given = {"lhs": lhs, "rhs": rhs, "row": row_scales, "column": column_scales, "addend": addend}
    given |= {"low": low and low.s, "bank": low and low.bank, "adapter": low and low.block_adapter}
    operands = {name: each for name, each in given.items() if each is not None}
    rank, offset = (low.bank.shape[1], low.offset) if low else (0, 0)

    def kernel(*refs):
        names = (*operands, "out", *(["largest"] if measured else []))
        own = dict.fromkeys((*given, "largest")) | dict(zip(names, refs, strict=True))
        _walk(config, grid, depth // config.tile_k, rank, offset, SimpleNamespace(**own))

    out_type = (
        jax.ShapeDtypeStruct((num_rows, num_columns), OUT),
        jax.ShapeDtypeStruct((num_columns // config.tile_n, num_rows), jnp.float32),
    )
    run = plgpu.kernel(
        kernel,
        out_type=out_type if measured else out_type[:1],
        grid=(num_sms,),
        grid_names=("sm",),
        num_threads=3,
        thread_name="wg",
        kernel_name="fp8_product" if addend is None else "fp8_product_add",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return vary_like(run(*operands.values()), lhs)


def fit_addend(config: GemmConfig) -> GemmConfig:
    """Takes stages away until a tile of the addend fits beside them for each of the two warpgroups."""
    tiles = 2 * config.tile_m * config.tile_n * jnp.dtype(OUT).itemsize
    stage = config.tile_k * (config.block_m + config.block_n)
    return dataclasses.replace(config, stages=min(config.stages, (SMEM_BYTES - tiles) // stage))


def _walk(config: GemmConfig, grid: tuple[int, int], steps: int, rank: int, offset: int, refs: SimpleNamespace) -> None:
    """A block's way over the output."""
    pipeline = functools.partial(_pipeline, config, steps)
    height, width = min(config.store_m, config.tile_m), min(config.store_n, config.tile_n)
    slots = (config.tile_m, config.tile_n) if refs.addend is not None else (2, height, width)
    scopes = {"out_smem": plgpu.SMEM((2, *slots), OUT, transforms=transforms(width, OUT))}
    if refs.addend is not None:
        scopes["addend_barrier"] = plgpu.Barrier(num_barriers=2)
    if rank:
        how = transforms(rank, OUT)
        scopes["low_smem"] = plgpu.SMEM((2, config.tile_m, rank), OUT, transforms=how)
        scopes["bank_smem"] = plgpu.SMEM((2, rank, config.tile_n), OUT, transforms=how)
        scopes["low_barrier"] = plgpu.Barrier(num_arrivals=2, num_barriers=2)
    scopes["buffers"] = pipeline(_nothing, _nothing).get_allocations(refs.lhs, refs.rhs)

    @functools.partial(pl.run_scoped, collective_axes="wg", **scopes)
    def _(buffers, **scratch):
        own = SimpleNamespace(**vars(refs), **scratch, wg=lax.axis_index("wg"), rank=rank, offset=offset)

        @plgpu.nd_loop((grid[0] * grid[1],), collective_axes="sm")
        def _(info):
            place = plgpu.planar_snake(info.index[0], grid, 1 if config.along_n else 0, config.band)
            _one_tile(config, pipeline, own, buffers, *place)

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _one_tile(config: GemmConfig, pipeline: Any, refs: SimpleNamespace, buffers: Any, block_row: Any, block_col: Any):
    row0 = block_row * config.block_m + (0 if config.split_n else refs.wg * config.tile_m)
    col0 = block_col * config.block_n + (refs.wg * config.tile_n if config.split_n else 0)
    rows, columns = pl.ds(row0, config.tile_m), pl.ds(col0, config.tile_n)

    def context(run):
        if refs.rank:
            barrier, adapter = refs.low_barrier.at[refs.wg], refs.adapter[lax.div(row0, config.tile_m)]
            source = refs.low.at[rows, pl.ds(refs.offset, refs.rank)]
            plgpu.copy_gmem_to_smem(source, refs.low_smem.at[refs.wg], barrier)
            plgpu.copy_gmem_to_smem(refs.bank.at[adapter].at[:, columns], refs.bank_smem.at[refs.wg], barrier)
        if refs.addend is not None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before this one is stored
            source, barrier = refs.addend.at[rows, columns], refs.addend_barrier.at[refs.wg]
            plgpu.copy_gmem_to_smem(source, refs.out_smem.at[refs.wg], barrier)

        @functools.partial(pl.run_scoped, acc=plgpu.ACC((config.tile_m, config.tile_n), jnp.float32))
        def _(acc):
            run(acc)
            if refs.rank:
                plgpu.barrier_wait(refs.low_barrier.at[refs.wg])
                plgpu.wgmma(acc, refs.low_smem.at[refs.wg], refs.bank_smem.at[refs.wg])
                plgpu.wgmma_wait(0)
            store = _store if refs.addend is None else _add_and_store
            store(config, refs, acc[...], row0, col0)

    def step(_, lhs_smem, rhs_smem, acc):
        if config.split_n:
            rhs_smem = rhs_smem.at[pl.ds(refs.wg * config.tile_n, config.tile_n), :]
        else:
            lhs_smem = lhs_smem.at[pl.ds(refs.wg * config.tile_m, config.tile_m)]
        plgpu.wgmma(acc, lhs_smem, rhs_smem.transpose((1, 0)))
        plgpu.wgmma_wait(0)
        return acc

    pipeline(step, context)(
        refs.lhs.at[pl.ds(block_row * config.block_m, config.block_m), :],
        refs.rhs.at[pl.ds(block_col * config.block_n, config.block_n), :],
        allocations=buffers,
    )


def _store(config: GemmConfig, refs: SimpleNamespace, acc: Any, row0: Any, col0: Any) -> None:
    """Scales, converts and stores the tile chunk by chunk through two shared-memory slots."""
    height, width = min(config.store_m, config.tile_m), min(config.store_n, config.tile_n)
    per_column = config.tile_m // height
    out_tile = refs.out.at[pl.ds(row0, config.tile_m), pl.ds(col0, config.tile_n)]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    largest = None
    for j, chunk in enumerate(_scaled(config, refs, acc, row0, col0, width)):
        if refs.largest is not None:
            own = jnp.max(jnp.abs(chunk), axis=1)
            largest = own if largest is None else jnp.maximum(largest, own)
        chunk = chunk.astype(OUT)
        for i in range(per_column):
            rows, slot = slice(i * height, (i + 1) * height), (j * per_column + i) % 2
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            refs.out_smem[refs.wg, slot] = chunk[rows]
            plgpu.commit_smem()
            target = out_tile.at[rows, slice(j * width, (j + 1) * width)]
            plgpu.copy_smem_to_gmem(refs.out_smem.at[refs.wg, slot], target)
    if largest is not None:
        store_fragment(refs.largest.at[lax.div(col0, config.tile_n), pl.ds(row0, config.tile_m)], largest)


def _add_and_store(config: GemmConfig, refs: SimpleNamespace, acc: Any, row0: Any, col0: Any) -> None:
    """Scales the tile, adds the addend's where that lies, and stores it from there."""
    width, here = min(config.store_n, config.tile_n), refs.out_smem.at[refs.wg]
    plgpu.barrier_wait(refs.addend_barrier.at[refs.wg])
    for j, chunk in enumerate(_scaled(config, refs, acc, row0, col0, width)):
        columns = here.at[:, pl.ds(j * width, width)]
        addend = plgpu.load(columns, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
        columns[...] = (chunk + addend).astype(OUT)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(here, refs.out.at[pl.ds(row0, config.tile_m), pl.ds(col0, config.tile_n)])


def _scaled(config: GemmConfig, refs: SimpleNamespace, acc: Any, row0: Any, col0: Any, width: int) -> Iterator[Any]:
    """The tile times its scales, so many columns at a time."""
    row_scales = plgpu.load(refs.row.at[pl.ds(row0, config.tile_m)], layout=BY_ROW, optimized=False)
    by_row = lax.broadcast_in_dim(row_scales, (config.tile_m, width), [0])
    for j in range(config.tile_n // width):
        chunk = acc[:, j * width : (j + 1) * width] * by_row
        if refs.column is not None:
            own = plgpu.load(refs.column.at[pl.ds(col0 + j * width, width)], layout=BY_COLUMN, optimized=False)
            chunk = chunk * lax.broadcast_in_dim(own, (config.tile_m, width), [1])
        yield chunk


def _pipeline(config: GemmConfig, steps: int, body: Any, context: Any) -> Any:
    def spec(rows: int):
        how = transforms(config.tile_k, jnp.float8_e4m3fn)
        return plgpu.BlockSpec((rows, config.tile_k), lambda c: (0, c), transforms=how, memory_space=plgpu.SMEM)

    return plgpu.emit_pipeline_warp_specialized(
        body,
        grid=(steps,),
        memory_registers=40,
        max_concurrent_steps=config.stages,
        wg_axis="wg",
        num_compute_wgs=2,
        compute_context=context,
        in_specs=[spec(config.block_m), spec(config.block_n)],
    )


def _nothing(*_: Any, **__: Any) -> None:
    return None
