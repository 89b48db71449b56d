"""Tile sizes of all kernels of one call.

Heuristics in the absence of a measurement.  They follow from the H200: memory-bound kernels want about one program per
multiprocessor with 64-row blocks and deep pipelines; the GEMMs want 128 x 256 output tiles.

T packed tokens · K in features · N out features · R padded rank
"""

from __future__ import annotations

import dataclasses
from itertools import product

from pallas_kernels.device import shared_memory_bytes
from pallas_kernels.dropout import BLOCK
from pallas_kernels.mosaic_gpu.da import DropDaConfig
from pallas_kernels.mosaic_gpu.down import DropDownConfig
from pallas_kernels.mosaic_gpu.dsdb import WideDsdbConfig
from pallas_kernels.mosaic_gpu.gate import RANK, GateConfig, WideGateConfig
from pallas_kernels.mosaic_gpu.gemm import SMEM_BYTES
from pallas_kernels.mosaic_gpu.gemm import GemmConfig as MosaicGemmConfig
from pallas_kernels.mosaic_gpu.tiling import ROWS
from pallas_kernels.triton.da import DaConfig
from pallas_kernels.triton.down import DownConfig
from pallas_kernels.triton.dsdb import DsdbConfig
from pallas_kernels.triton.gemm import GemmConfig as TritonGemmConfig

TritonPass = DownConfig | DsdbConfig | DaConfig
NUM_SMS = 132  # programs that keep a Hopper GPU busy; A100 108, L40S 142: near enough for splitting


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelConfigs:
    """Overrides by kernel; None takes the heuristic."""

    down: DownConfig | None = None
    dsdb: DsdbConfig | None = None
    da: DaConfig | None = None
    forward: TritonGemmConfig | MosaicGemmConfig | None = None
    dx: TritonGemmConfig | MosaicGemmConfig | None = None
    drop_down: DropDownConfig | None = None
    drop_da: DropDaConfig | None = None
    wide_dsdb: WideDsdbConfig | None = None
    gate: GateConfig | None = None
    wide_gate: WideGateConfig | None = None


def row_block(tile: int, limit: int) -> int:
    """Returns the largest power of two that divides the tile, up to `limit`."""
    return min(tile & -tile, limit)


def down_config(num_rows: int, num_in: int, rank: int, tile: int) -> DownConfig:
    block_t = row_block(tile, 64)
    narrow = rank <= 32 and num_in <= 8192
    block_k = _divisor(num_in, 64 if narrow or rank > 64 else 128)
    split = _split(num_rows // block_t, num_in // block_k, wanted=(4 if narrow else 2) * NUM_SMS)
    return DownConfig(block_t=block_t, block_k=block_k, split_k=split, num_stages=4 if narrow else 3)


def drop_down_config(num_rows: int, num_in: int) -> DropDownConfig:
    """Two programs a multiprocessor: one makes keep bits while the other multiplies."""
    split = _split(num_rows // ROWS, num_in // BLOCK, wanted=2 * NUM_SMS)
    return DropDownConfig(split_k=split)


def wide_dsdb_config(num_rows: int, num_out: int) -> WideDsdbConfig:
    block_n = _divisor(num_out, 64)
    split = _split(num_rows // (ROWS * 4), num_out // block_n, wanted=2 * NUM_SMS)
    return WideDsdbConfig(block_n=block_n, split_n=split)


def drop_da_config(num_rows: int, num_in: int, rank: int) -> DropDaConfig:
    size = max(1, min(num_rows // 8, 1024) // ROWS)
    return DropDaConfig(blocks_per_chunk=size, stages=3 if rank <= 64 else 2)  # two blocks a multiprocessor


def gate_config(both: int, rank: int, *, drops: bool) -> GateConfig | None:
    """The most stages with which two programs share a multiprocessor, or one fits; None: none does.

    Forward with dropout is the exception. Making bits takes instructions, and a third program, where it fits, issues
    them meanwhile: 223 us with three stages, 230 with four; without dropout 215 and 206 (8192 x 14336, H200).

    Args:
        both: ranks of gate and up together; rank: of the projection behind the gate.
        drops: whether that projection has dropout.
    """
    for room in (SMEM_BYTES // 2, SMEM_BYTES):
        for forward, backward in ((3 if drops else 4, 3), (3, 2), (2, 2)):
            config = GateConfig(forward_stages=forward, backward_stages=backward)
            if config.smem_bytes(both, rank) <= room:
                return config
    return None


def wide_gate_config(num_rows: int, both: int, rank: int) -> WideGateConfig | None:
    """As many parts as leave few multiprocessors idle at the end; None where ranks are too large for the pass.

    A block fills a multiprocessor. The number of rows alone decides, so that the order of an adapter's sums does not
    depend on who else is in the call: 8 parts 480 us with four adapters and 453 with one, 15 parts 472 and 475
    (8192 x 14336 with all sums, H200).
    """
    if (both, rank) != (2 * RANK, RANK):
        return None

    def busy(parts: int) -> float:
        blocks = -(-num_rows // (ROWS * WideGateConfig().blocks_per_chunk)) * parts
        return blocks / (-(-blocks // NUM_SMS) * NUM_SMS)

    return WideGateConfig(parts=max(range(6, 17), key=busy))  # more were not measured: each has a partial sum of dS


def gate_blocks(num_rows: int) -> int:
    """64-row blocks of a chunk in the backward pass over the gate for ranks above 16."""
    return max(1, min(num_rows // 8, 1024) // ROWS)


def dsdb_config(num_rows: int, num_out: int, rank: int, tile: int) -> DsdbConfig:
    block_t = row_block(tile, 64)
    block_n = _divisor(num_out, 64 if rank <= 32 or rank > 64 else 128)
    size = 1 if rank > 64 else 2
    while tile % (block_t * size):  # a chunk must lie inside a tile
        size //= 2
    split = _split(num_rows // (block_t * size), num_out // block_n, wanted=2 * NUM_SMS)
    stages = 4 if rank <= 32 else 3 if size <= 2 else 2
    return DsdbConfig(block_t=block_t, blocks_per_chunk=size, block_n=block_n, split_n=split, num_stages=stages)


def da_config(num_rows: int, num_in: int, rank: int, tile: int) -> DaConfig:
    block_t = row_block(tile, 64)
    block_k = _divisor(num_in, 128 if rank <= 64 else 64)
    size = max(1, min(num_rows // 8, 1024) // block_t)
    return DaConfig(block_t=block_t, blocks_per_chunk=size, block_k=block_k, num_stages=4 if rank <= 32 else 3)


def triton_gemm_config(num_in: int, num_out: int, rank: int, tile: int, item: int = 2) -> TritonGemmConfig:
    """The largest tiles that fit into the device's shared memory: an A100 has 163 KiB for a program, an L40S 99.

    Args:
        num_in: contracted; num_out: columns of the result; item: bytes of an element.
    """
    rows, room = row_block(tile, 128), shared_memory_bytes()
    wide, deep = 256 if rank <= 64 and rows >= 64 else 128, 64 if rank <= 128 else 32
    sizes = (
        (128, wide, deep, 3),
        (128, 128, deep, 3),
        (128, 128, 32, 3),
        (128, 64, 32, 3),
        (64, 64, 32, 2),
        (32, 32, 16, 2),
    )
    configs = [
        TritonGemmConfig(
            block_m=min(rows, height), block_n=_divisor(num_out, columns), block_k=_divisor(num_in, depth),
            num_stages=stages, num_warps=8 if min(rows, height) == 128 else 4,
        )
        for height, columns, depth, stages in sizes
    ]  # fmt: skip
    return next((config for config in configs if config.shared_bytes(rank, item) <= room), configs[-1])


def fit_pass[C: TritonPass](config: C, rank: int, item: int = 2, *, drops: bool) -> C:
    """Takes stages, then a chunk's blocks, columns and rows away until a program fits into the device's shared memory.

    Ranks from 64 on need it on an A100 (bfloat16: 176 KiB for dS and dB), float32 of rank 256 on an H200.
    """
    columns = "block_n" if isinstance(config, DsdbConfig) else "block_k"
    sizes = product(
        _halves(config.block_t),
        _halves(getattr(config, columns)),
        _halves(config.blocks_per_chunk, 1) if isinstance(config, DsdbConfig) else (None,),
        range(config.num_stages, 0, -1),
    )
    room = shared_memory_bytes()
    for rows, width, blocks, stages in sizes:
        of_chunk = {} if blocks is None else {"blocks_per_chunk": blocks}
        smaller = dataclasses.replace(config, block_t=rows, num_stages=stages, **{columns: width}, **of_chunk)
        if smaller.shared_bytes(rank, item, drops=drops) <= room:
            return smaller
    return smaller


def _halves(size: int, least: int = 16) -> list[int]:
    """The size and its halves, down to a tensor-core step."""
    return [size] + [size >> halved for halved in range(1, size.bit_length()) if size >> halved >= least]


def mosaic_gemm_config(
    num_rows: int, num_in: int, num_out: int, rank: int, tile: int, *, transposed: bool
) -> MosaicGemmConfig | None:
    """Returns tiles that divide the shape and fit into shared memory, best measured first; None: there are none.

    Args:
        num_in: contracted features; num_out: columns of the result.
        transposed: the product with W^T of the backward pass.
    """
    tile_m = row_block(tile, 128)
    for walk in _walks(num_in, num_out, transposed):
        for tile_n in (128, 64):
            config = fit(dataclasses.replace(walk, tile_m=tile_m, tile_n=tile_n), rank)
            fits = config.divides(num_rows, num_out, num_in)
            if fits and tile_m >= 64 and config.stages >= 2:
                return config
    return None


def _walks(num_in: int, num_out: int, transposed: bool) -> tuple[MosaicGemmConfig, ...]:
    """How warpgroups share a block and in which order blocks are visited: on an H200 worth up to 4 %."""
    shared_rows = MosaicGemmConfig()
    shared_columns = MosaicGemmConfig(split_n=False, along_n=False)
    if transposed:
        deep = MosaicGemmConfig(along_n=False, band=16)
        return (deep if num_in >= 8192 else shared_rows, shared_columns)
    return (shared_columns, shared_rows) if num_out >= 2048 else (shared_rows, shared_columns)


def fit[C: (MosaicGemmConfig, DropDownConfig, DropDaConfig, WideDsdbConfig)](config: C, rank: int) -> C:
    """Takes pipeline stages away until a block fits into shared memory; one that still does not has a single stage."""
    while config.stages > 1 and config.smem_bytes(rank) > SMEM_BYTES:
        config = dataclasses.replace(config, stages=config.stages - 1)
    return config


def _divisor(size: int, limit: int) -> int:
    """Returns the largest power of two that divides `size`, up to `limit`."""
    return min(size & -size, limit)


def _split(programs: int, steps: int, wanted: int = NUM_SMS) -> int:
    """Splits a loop of `steps` in two until there are enough programs."""
    split = 1
    while programs * split < wanted * 3 // 4 and steps % (2 * split) == 0 and steps // (2 * split) >= 4:
        split *= 2
    return split
