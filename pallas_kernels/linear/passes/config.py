"""Tile sizes of the passes over x and dY, and the heuristics where nothing was measured.

The passes are bound by memory: they want about one program per multiprocessor, 64-row blocks and deep pipelines. The
numbers follow from the H200.

T packed tokens · K in features · N out features · R padded rank
"""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Literal

from pallas_kernels.device import shared_memory_bytes
from pallas_kernels.dropout import WORDS
from pallas_kernels.policy import HOPPER_SMS
from pallas_kernels.sizes import row_block, split_loop


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DownConfig:
    block_t: int = 64
    block_k: int = 128
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 4

    def shared_bytes(self, rank: int, item: int, *, drops: bool) -> int:
        """Shared memory of a program at most: tiles of x and A under way, and with dropout of words and masked x."""
        operands = self.num_stages * self.block_k * (self.block_t + rank)
        masked = self.block_t * (self.num_stages * 4 * WORDS + item * self.block_k) if drops else 0
        return item * operands + masked


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DaConfig:
    block_t: int = 64
    blocks_per_chunk: int = 16
    block_k: int = 128
    num_warps: int = 4
    num_stages: int = 4

    def shared_bytes(self, rank: int, item: int, *, drops: bool) -> int:
        """Shared memory of a program at most: tiles of x and dS under way, and with dropout of words and masked x."""
        operands = max(1, self.num_stages - 1) * self.block_t * (self.block_k + rank)
        masked = self.block_t * (self.num_stages * 4 * WORDS + item * self.block_k) if drops else 0
        return item * operands + masked + 64  # a few words besides


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DsdbConfig:
    block_t: int = 64
    blocks_per_chunk: int = 2
    block_n: int = 128
    split_n: int = 4
    num_warps: int = 4
    num_stages: int = 3

    @property
    def chunk(self) -> int:
        """Rows of a chunk; they must belong to one adapter."""
        return self.block_t * self.blocks_per_chunk

    def shared_bytes(self, rank: int, item: int, *, drops: bool = False) -> int:
        """Shared memory of a program at most: tiles of dY and B under way, S of a chunk, and dB as it is written."""
        under_way = self.num_stages if item == 2 else max(1, self.num_stages - 1)  # float32 waits in registers
        operands = under_way * self.block_n * (self.chunk + rank)
        return item * (operands + self.chunk * rank) + 4 * self.block_n * rank


type ExtraKind = Literal["down", "up", "sums"]  # S and dS; parts of y and dx; dA and dB


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExtraConfig:
    """Of the three products with extra ranks.

    Attributes:
        block_t, block_m: rows and features of a tile; ranks: of a program; split: programs that share the features of
            a row; sum_rows, blocks_per_chunk: rows of a tile where rows are summed, and tiles of a chunk.
    """

    block_t: int = 128
    block_m: int = 128
    ranks: int = 128
    split: int = 1
    sum_rows: int = 64
    blocks_per_chunk: int = 16
    num_warps: int = 8
    num_stages: int = 3


def extra_config(
    num_rows: int, num_features: int, rank: int, tile: int, *, kind: ExtraKind, masked: bool
) -> ExtraConfig:
    """Tiles of one of the products.

    Args:
        masked: whether x or dx has a dropout mask. Only "down" depends on it: it takes half the rows and warps then.
            "sums" always has 4 warps, which made masked sums up to 1.6 times as fast as 8, and "up" always 8
            (`benchmarks/results/ranks_h200_2026-11-24`).
    """
    ranks = min(rank & -rank, 128)
    if kind == "down":
        rows, warps = (64, 4) if masked else (128, 8)
        block_t, block_m = row_block(tile, rows), row_block(num_features, 64)
        programs = num_rows // row_block(tile, 128) * (rank // ranks)  # of 128 rows: more parts write more partial sums
        split = split_loop(programs, num_features // block_m, wanted=2 * HOPPER_SMS)
        return ExtraConfig(block_t=block_t, block_m=block_m, ranks=ranks, split=split, num_warps=warps)
    block_t, block_m = row_block(tile, 128), row_block(num_features, 128)
    if kind == "up":
        return ExtraConfig(block_t=block_t, block_m=block_m)
    sum_rows = min(block_t, 64)
    size = max(1, min(num_rows // 8, 512 if num_features <= 2048 else 1024) // sum_rows)
    return ExtraConfig(block_m=block_m, ranks=ranks, sum_rows=sum_rows, blocks_per_chunk=size, num_warps=4)


def down_config(num_rows: int, num_in: int, rank: int, tile: int) -> DownConfig:
    block_t = row_block(tile, 64)
    narrow = rank <= 32 and num_in <= 8192
    block_k = row_block(num_in, 64 if narrow or rank > 64 else 128)
    split = split_loop(num_rows // block_t, num_in // block_k, wanted=(4 if narrow else 2) * HOPPER_SMS)
    return DownConfig(block_t=block_t, block_k=block_k, split_k=split, num_stages=4 if narrow else 3)


def dsdb_config(num_rows: int, num_out: int, rank: int, tile: int) -> DsdbConfig:
    block_t = row_block(tile, 64)
    block_n = row_block(num_out, 64 if rank <= 32 or rank > 64 else 128)
    size = 1 if rank > 64 else 2
    while tile % (block_t * size):  # a chunk must lie inside a tile
        size //= 2
    split = split_loop(num_rows // (block_t * size), num_out // block_n, wanted=2 * HOPPER_SMS)
    stages = 4 if rank <= 32 else 3 if size <= 2 else 2
    return DsdbConfig(block_t=block_t, blocks_per_chunk=size, block_n=block_n, split_n=split, num_stages=stages)


def da_config(num_rows: int, num_in: int, rank: int, tile: int) -> DaConfig:
    block_t = row_block(tile, 64)
    block_k = row_block(num_in, 128 if rank <= 64 else 64)
    size = max(1, min(num_rows // 8, 1024) // block_t)
    return DaConfig(block_t=block_t, blocks_per_chunk=size, block_k=block_k, num_stages=4 if rank <= 32 else 3)


def fit_pass[C: (DownConfig, DsdbConfig, DaConfig)](config: C, rank: int, item: int = 2, *, drops: bool) -> C:
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
    room, smaller = shared_memory_bytes(), config
    for rows, width, blocks, stages in sizes:
        of_chunk = {} if blocks is None else {"blocks_per_chunk": blocks}
        smaller = dataclasses.replace(config, block_t=rows, num_stages=stages, **{columns: width}, **of_chunk)
        if smaller.shared_bytes(rank, item, drops=drops) <= room:
            return smaller
    return smaller


def _halves(size: int, least: int = 16) -> list[int]:
    """The size and its halves, down to a tensor-core step."""
    return [size] + [size >> shift for shift in range(1, size.bit_length()) if size >> shift >= least]
