"""Candidate tile sizes of every kernel for one layer shape.

T packed tokens · K in features · N out features · R padded rank · A adapters
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arg_specs import LinearSpec, make_arrays
from pallas_kernels.device import interprets, num_sms, shared_memory_bytes
from pallas_kernels.dropout import BLOCK, keep_words
from pallas_kernels.linear import passes
from pallas_kernels.linear.hopper import gemm as hopper
from pallas_kernels.linear.hopper.da import LOW_RANK, DropDaConfig, drop_da, drop_da_config
from pallas_kernels.linear.hopper.down import DropDownConfig, drop_down, drop_down_config
from pallas_kernels.linear.hopper.dsdb import WideDsdbConfig, wide_dsdb, wide_dsdb_config
from pallas_kernels.linear.hopper.gemm_config import GemmConfig as HopperGemmConfig
from pallas_kernels.linear.hopper.gemm_config import gemm_config as hopper_gemm_config
from pallas_kernels.linear.hopper.tiling import ROWS, fit
from pallas_kernels.linear.passes.config import (
    DaConfig,
    DownConfig,
    DsdbConfig,
    da_config,
    down_config,
    dsdb_config,
    fit_pass,
)
from pallas_kernels.linear.split_graph import Prepared, prepare
from pallas_kernels.linear.triton import gemm as triton
from pallas_kernels.policy import MIN_RANK, padded_rank
from pallas_kernels.problem import Operands, Static
from pallas_kernels.sizes import row_block
from pallas_kernels.tiles import row_adapter

LARGE_ROOM = 227 * 1024  # shared memory of a program on Hopper
SETS = 3  # copies of the large operand that calls rotate through, so that it is not in the cache


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One kernel with one choice of tiles: a function of a list of large operands."""

    kernel: str
    config: Any
    run: Callable[..., Any]
    large: str  # which array is streamed: "x" or "dy"
    bytes: int = 0
    flops: int = 0


def candidates(spec: LinearSpec, *, quick: bool = False) -> Iterator[Candidate]:
    """Yields every candidate that fits the shape; for each kernel, the heuristic's choice first, as the baseline."""
    t, k, n, r, tile = spec.tokens, spec.in_features, spec.out_features, padded_rank(spec.rank), _tile(spec)
    over_x, over_dy, product = _work(spec)
    yield from _compared(
        fit_pass(down_config(t, k, r, tile), r, drops=bool(spec.rate)), down_grid(quick),
        lambda config: k % (config.block_k * config.split_k) == 0 and tile % config.block_t == 0,
        kernel="down", run=_down, **over_x,
    )  # fmt: skip
    yield from _compared(
        fit_pass(da_config(t, k, r, tile), r, drops=bool(spec.rate)), da_grid(quick),
        lambda config: k % config.block_k == 0 and tile % config.block_t == 0,
        kernel="da", run=_da, **over_x,
    )  # fmt: skip
    yield from _compared(
        fit_pass(dsdb_config(t, n, r, tile), r, drops=False), dsdb_grid(quick),
        lambda config: n % (config.block_n * config.split_n) == 0 and tile % config.chunk == 0,
        kernel="dsdb", run=_dsdb, **over_dy,
    )  # fmt: skip
    if tile % ROWS == 0:
        yield from hopper_passes(spec, quick)
    rows = row_block(tile, 128)  # rows of a product's block; shorter tiles use the same grid with fewer rows
    of_hopper = [dataclasses.replace(config, tile_m=min(config.tile_m, rows)) for config in hopper_grid(quick)]
    of_triton = [dataclasses.replace(config, block_m=min(config.block_m, rows)) for config in triton_grid(quick)]
    for kernel, inner, outer, run, large in (("fwd", k, n, _forward, "x"), ("dx", n, k, _dx, "dy")):
        yield from _compared(
            hopper_gemm_config(t, inner, outer, r, tile, transposed=kernel == "dx"), _fitted(of_hopper, r),
            lambda config, i=inner, o=outer: config.divides(t, o, i),
            kernel="mosaic_" + kernel, run=run, large=large, **product,
        )  # fmt: skip
        yield from _compared(
            triton.gemm_config(inner, outer, r, tile), of_triton,
            lambda config, i=inner, o=outer: o % config.block_n == 0 and i % config.block_k == 0,
            kernel="triton_" + kernel, run=run, large=large, **product,
        )  # fmt: skip


def hopper_passes(spec: LinearSpec, quick: bool) -> Iterator[Candidate]:
    """Candidates of the Hopper passes over x with dropout and over dY."""
    t, k, n, r = spec.tokens, spec.in_features, spec.out_features, padded_rank(spec.rank)
    over_x, over_dy, _ = _work(spec)
    if spec.rate and k % BLOCK == 0:
        yield from _compared(
            fit(drop_down_config(t, k), r), _fitted(drop_down_grid(quick), r),
            lambda config: k % (BLOCK * config.split_k) == 0,
            kernel="mosaic_down", run=_drop_down, **over_x,
        )  # fmt: skip
        yield from _compared(
            fit(drop_da_config(t, k, r), r), _fitted(drop_da_grid(quick), r),
            lambda config: k % config.block_k == 0,
            kernel="mosaic_da", run=_drop_da, **over_x,
        )  # fmt: skip
    yield from _compared(
        fit(wide_dsdb_config(t, n), r), _fitted(wide_dsdb_grid(quick), r),
        lambda config: n % (config.block_n * config.split_n) == 0,
        kernel="mosaic_dsdb", run=_wide_dsdb, **over_dy,
    )  # fmt: skip


def _compared[C](heuristic: C | None, grid: list[C], fits: Callable[[C], bool], **rest: Any) -> Iterator[Candidate]:
    """The heuristic's choice and the fitting ones of the grid; empty if there is no alternative."""
    others = [config for config in dict.fromkeys(grid) if config != heuristic and fits(config)]
    if heuristic is not None and others:
        yield from (Candidate(config=config, **rest) for config in (heuristic, *others))


def _fitted[C: (HopperGemmConfig, DropDownConfig, DropDaConfig, WideDsdbConfig)](grid: list[C], rank: int) -> list[C]:
    """Configurations that fit into shared memory, with fewer pipeline stages if needed."""
    return [config for config in (fit(config, rank) for config in grid) if config.stages > 1]


def _work(spec: LinearSpec) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Bytes and FLOPs of a pass over x, a pass over dY and a product."""
    over_x = {"large": "x", "bytes": 2 * spec.tokens * spec.in_features}
    over_dy = {"large": "dy", "bytes": 2 * spec.tokens * spec.out_features}
    return over_x, over_dy, {"flops": 2 * spec.tokens * spec.in_features * spec.out_features}


def _tile(spec: LinearSpec) -> int:
    """Rows per tile: all of them if there is only one adapter."""
    return spec.tokens if spec.adapters == 1 else spec.tile


def drop_down_grid(quick: bool) -> list[DropDownConfig]:
    grid = [
        DropDownConfig(split_k=2, stages=3),
        DropDownConfig(split_k=4, stages=3),
        DropDownConfig(split_k=2, stages=2, block_k=256),
        DropDownConfig(split_k=4, stages=2, block_k=256),
        DropDownConfig(split_k=2, stages=4),
        DropDownConfig(split_k=8, stages=3),
        DropDownConfig(split_k=4, stages=2),  # more programs per multiprocessor, each with fewer loads in flight
        DropDownConfig(split_k=8, stages=2),
    ]
    return grid[:2] if quick else grid


def drop_da_grid(quick: bool) -> list[DropDaConfig]:
    grid = [
        DropDaConfig(blocks_per_chunk=16, block_k=128, stages=4),
        DropDaConfig(blocks_per_chunk=16, block_k=128, stages=3),
        DropDaConfig(blocks_per_chunk=8, block_k=128, stages=4),
        DropDaConfig(blocks_per_chunk=16, block_k=64, stages=4),
        DropDaConfig(blocks_per_chunk=32, block_k=128, stages=4),
        DropDaConfig(blocks_per_chunk=16, block_k=256, stages=3),
        DropDaConfig(blocks_per_chunk=8, block_k=128, stages=2),  # more programs per multiprocessor
        DropDaConfig(blocks_per_chunk=16, block_k=64, stages=3),
        DropDaConfig(blocks_per_chunk=8, block_k=64, stages=3),
    ]
    return grid[:2] if quick else grid


def wide_dsdb_grid(quick: bool) -> list[WideDsdbConfig]:
    grid = [
        WideDsdbConfig(blocks_per_chunk=4, block_n=64, split_n=8, stages=3),
        WideDsdbConfig(blocks_per_chunk=4, block_n=64, split_n=4, stages=3),
        WideDsdbConfig(blocks_per_chunk=2, block_n=64, split_n=8, stages=4),
        WideDsdbConfig(blocks_per_chunk=8, block_n=64, split_n=8, stages=3),
        WideDsdbConfig(blocks_per_chunk=4, block_n=128, split_n=8, stages=3),
        WideDsdbConfig(blocks_per_chunk=4, block_n=64, split_n=16, stages=3),
        WideDsdbConfig(blocks_per_chunk=4, block_n=64, split_n=16, stages=2),
    ]
    return grid[:2] if quick else grid


def down_grid(quick: bool) -> list[DownConfig]:
    grid = [
        DownConfig(block_t=64, block_k=128, split_k=1, num_stages=4),
        DownConfig(block_t=64, block_k=128, split_k=2, num_stages=3),
        DownConfig(block_t=64, block_k=128, split_k=4, num_stages=4),
        DownConfig(block_t=64, block_k=256, split_k=2, num_stages=3),
        DownConfig(block_t=64, block_k=128, split_k=2, num_stages=4, num_warps=8),
        DownConfig(block_t=64, block_k=64, split_k=4, num_stages=4),
        DownConfig(block_t=128, block_k=128, split_k=4, num_stages=3, num_warps=8),
    ]
    return grid[:3] if quick else grid


def da_grid(quick: bool) -> list[DaConfig]:
    grid = [
        DaConfig(block_t=64, blocks_per_chunk=16, block_k=128, num_stages=4),
        DaConfig(block_t=64, blocks_per_chunk=8, block_k=128, num_stages=3),
        DaConfig(block_t=64, blocks_per_chunk=16, block_k=64, num_stages=4),
        DaConfig(block_t=64, blocks_per_chunk=16, block_k=256, num_stages=3, num_warps=8),
        DaConfig(block_t=128, blocks_per_chunk=8, block_k=128, num_stages=3, num_warps=8),
    ]
    return grid[:3] if quick else grid


def dsdb_grid(quick: bool) -> list[DsdbConfig]:
    grid = [
        DsdbConfig(block_t=64, blocks_per_chunk=2, block_n=128, split_n=4, num_stages=3),
        DsdbConfig(block_t=64, blocks_per_chunk=4, block_n=128, split_n=8, num_stages=2),
        DsdbConfig(block_t=64, blocks_per_chunk=1, block_n=128, split_n=4, num_stages=3),
        DsdbConfig(block_t=64, blocks_per_chunk=1, block_n=64, split_n=4, num_stages=4),
        DsdbConfig(block_t=128, blocks_per_chunk=1, block_n=64, split_n=4, num_stages=4),
        DsdbConfig(block_t=128, blocks_per_chunk=1, block_n=128, split_n=4, num_stages=3, num_warps=8),
        DsdbConfig(block_t=64, blocks_per_chunk=2, block_n=64, split_n=4, num_stages=4),
        DsdbConfig(block_t=64, blocks_per_chunk=2, block_n=128, split_n=8, num_stages=3),
        DsdbConfig(block_t=64, blocks_per_chunk=2, block_n=128, split_n=2, num_stages=3),
        DsdbConfig(block_t=128, blocks_per_chunk=2, block_n=64, split_n=8, num_stages=3, num_warps=8),
        DsdbConfig(block_t=64, blocks_per_chunk=4, block_n=64, split_n=8, num_stages=3, num_warps=4),
        DsdbConfig(block_t=64, blocks_per_chunk=4, block_n=64, split_n=8, num_stages=3, num_warps=8),
    ]
    return grid[:4] if quick else grid


def hopper_grid(quick: bool) -> list[HopperGemmConfig]:
    tall = {"split_n": False, "along_n": False}
    grid = [
        HopperGemmConfig(),
        HopperGemmConfig(**tall),
        HopperGemmConfig(along_n=False, band=16),
        HopperGemmConfig(**tall, band=16),
        HopperGemmConfig(stages=3, store_n=64),
        HopperGemmConfig(stages=3, store_n=64, split_n=False),
        HopperGemmConfig(tile_m=64, tile_n=256, stages=3, split_n=False),
    ]
    return grid[:2] if quick else grid


def triton_grid(quick: bool) -> list[triton.GemmConfig]:
    grid = [
        triton.GemmConfig(num_stages=4),
        triton.GemmConfig(num_stages=3),
        triton.GemmConfig(block_n=128, num_warps=4),
    ]
    room = shared_memory_bytes()
    if room < LARGE_ROOM:
        grid = [*small_triton_grid(), *(config for config in grid if _operand_bytes(config) <= room)]
    return grid[:2] if quick else grid


def small_triton_grid() -> list[triton.GemmConfig]:
    """Blocks for 99 or 163 KiB of shared memory; some are beyond the careful estimate of the heuristic."""
    return [
        triton.GemmConfig(block_n=128, num_stages=3),
        triton.GemmConfig(block_n=128, block_k=32, num_stages=4),
        triton.GemmConfig(block_n=64, num_stages=3, num_warps=4),
        triton.GemmConfig(block_m=64, block_n=128, num_stages=3, num_warps=4),
        triton.GemmConfig(block_m=64, block_n=128, block_k=32, num_stages=4, num_warps=4),
    ]


def _operand_bytes(config: triton.GemmConfig) -> int:
    """Of the operands under way in bfloat16, which every program needs."""
    return 2 * (config.block_m + config.block_n) * (config.num_stages - 1) * config.block_k


@functools.partial(jax.tree_util.register_dataclass, data_fields=("ops", "s", "ds", "bits"), meta_fields=("static",))
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The operands of a candidate except the large one."""

    static: Static
    ops: Operands
    s: jax.Array
    ds: jax.Array
    bits: jax.Array | None

    @property
    def prepared(self) -> Prepared:
        return prepare(self.static, self.ops)


def make_inputs(spec: LinearSpec) -> tuple[Inputs, dict[str, list[jax.Array]]]:
    """Draws the arrays, and copies of x, dY and w to rotate through. S and dS are random too."""
    arrays = make_arrays(spec)
    single = spec.adapters == 1
    static = Static(
        tile=_tile(spec),
        num_adapters=spec.adapters,
        single=single,
        interpret=interprets(),
    )
    table = jnp.zeros(1, jnp.int32) if single else arrays["tile_adapter"]
    ops = Operands(
        x=arrays["x"], ws=(arrays["w"],), as_=(arrays["a"],), bs=(arrays["b"],), biases=(None,),
        tile_adapter=table, scale=arrays["scale"], dropout=arrays["dropout"],
    )  # fmt: skip
    total = prepare(static, ops).layout.total
    low = [jax.random.normal(k, (spec.tokens, total), ops.x.dtype) for k in jax.random.split(jax.random.key(7))]
    bits = None
    if ops.dropout is not None:
        bits = jax.jit(keep_words, static_argnums=2)(ops.dropout, row_adapter(table, static.tile), spec.in_features)
    copies = {name: [jnp.roll(arrays[name], i, 0) for i in range(SETS)] for name in ("x", "dy", "w")}
    return Inputs(static=static, ops=ops, s=low[0], ds=low[1], bits=bits), copies


def _down(inputs: Inputs, config: DownConfig, x: jax.Array, w: jax.Array) -> jax.Array:
    prepared = inputs.prepared
    blocks = prepared.block_adapter(config.block_t)
    return passes.load().down(
        x, prepared.bank_a(), blocks, inputs.bits, config=config, interpret=prepared.static.interpret
    )


def _da(inputs: Inputs, config: DaConfig, x: jax.Array, w: jax.Array) -> jax.Array:
    prepared = inputs.prepared
    return passes.load().da(
        x, inputs.ds, inputs.bits, prepared.chunks(config.block_t, config.blocks_per_chunk), config=config,
        contiguous=prepared.contiguous(config.block_t, config.blocks_per_chunk), interpret=prepared.static.interpret,
    ).sum(0)  # fmt: skip


def _drop_down(inputs: Inputs, config: DropDownConfig, x: jax.Array, w: jax.Array):
    prepared = inputs.prepared
    bank = prepared.transposed_bank_a()
    return drop_down(x, bank, prepared.block_adapter(ROWS), inputs.ops.dropout, config=config)


def _drop_da(inputs: Inputs, config: DropDaConfig, x: jax.Array, w: jax.Array):
    prepared, ds, bank = inputs.prepared, inputs.ds.T, None
    chunks, rank = prepared.chunks(ROWS, config.blocks_per_chunk), prepared.layout.total
    if rank > MIN_RANK:  # it also computes the low-rank part of dx
        bank = prepared.transposed_bank_a(LOW_RANK)
        ds = jnp.pad(ds, ((0, bank.shape[1] - rank), (0, 0)))
    partials, low = drop_da(x, ds, inputs.bits, chunks, bank, rank=rank, config=config)
    return partials.sum(0), low


def _wide_dsdb(inputs: Inputs, config: WideDsdbConfig, dy: jax.Array, w: jax.Array):
    prepared = inputs.prepared
    s, chunks = jnp.pad(inputs.s.T, ((0, 0), (0, ROWS))), prepared.chunks(ROWS, config.blocks_per_chunk)
    ds_partials, partials = wide_dsdb(dy, s, prepared.bank_b(0), chunks, config=config)
    return ds_partials.sum(0).astype(dy.dtype), partials.sum(0)


def _dsdb(inputs: Inputs, config: DsdbConfig, dy: jax.Array, w: jax.Array):
    prepared = inputs.prepared
    ds_partials, partials = passes.load().dsdb(
        dy, inputs.s, prepared.bank_b(0), prepared.block_adapter(config.chunk), config=config,
        interpret=prepared.static.interpret,
    )  # fmt: skip
    return ds_partials.sum(0).astype(dy.dtype), partials.sum(0)


def _forward(inputs: Inputs, config: Any, x: jax.Array, w: jax.Array) -> jax.Array:
    return _gemm(inputs, config, x, w, inputs.s, inputs.prepared.bank_b(0), transposed=False)


def _dx(inputs: Inputs, config: Any, dy: jax.Array, w: jax.Array) -> jax.Array:
    return _gemm(inputs, config, dy, w, inputs.ds, inputs.prepared.bank_a(), transposed=True, bits=inputs.bits)


def _gemm(inputs: Inputs, config: Any, lhs, rhs, low, bank, *, transposed, bits=None) -> jax.Array:
    prepared = inputs.prepared
    if isinstance(config, HopperGemmConfig):
        blocks = prepared.block_adapter(config.tile_m)
        return hopper.gemm(
            lhs, rhs, low, bank, blocks, transposed=transposed, bits=bits, config=config, num_sms=num_sms()
        )
    blocks = prepared.block_adapter(config.block_m)
    return triton.gemm(
        lhs, rhs, low, bank, blocks, transposed=transposed, bits=bits, config=config,
        interpret=prepared.static.interpret,
    )  # fmt: skip
