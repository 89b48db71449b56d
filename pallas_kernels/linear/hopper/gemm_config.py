"""Tiles of the Hopper GEMM: how a product is cut, and which cut a shape gets where nothing was measured.

GEMM letters: M rows, C contracted features, N columns of the result.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.linear.hopper.tiling import fit
from pallas_kernels.sizes import row_block


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GemmConfig:
    tile_m: int = 128  # rows of one compute warpgroup
    tile_n: int = 128
    tile_k: int = 64
    stages: int = 4
    store_m: int = 64
    store_n: int = 32
    band: int = 8  # output tiles walked side by side, for reuse in L2
    along_n: bool = True  # direction inside a band
    split_n: bool = True  # the two warpgroups have the same rows and different columns; else the other way round

    def divides(self, rows: int, columns: int, depth: int) -> bool:
        """True if the blocks tile the product."""
        return not (rows % self.block_m or columns % self.block_n or depth % self.tile_k)

    @property
    def block_m(self) -> int:
        return self.tile_m * (1 if self.split_n else 2)

    @property
    def block_n(self) -> int:
        return self.tile_n * (2 if self.split_n else 1)

    def smem_bytes(self, rank: int) -> int:
        """Shared memory of a block with 2-byte operands."""
        operands = self.stages * self.tile_k * (self.block_m + self.block_n)
        low = 2 * rank * (self.tile_m + self.tile_n)
        store = 2 * 2 * min(self.store_m, self.tile_m) * min(self.store_n, self.tile_n)
        return 2 * (operands + low + store)


def gemm_config(
    num_rows: int, num_in: int, num_out: int, rank: int, tile: int, *, transposed: bool
) -> GemmConfig | None:
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


def _walks(num_in: int, num_out: int, transposed: bool) -> tuple[GemmConfig, ...]:
    """How warpgroups share a block and in which order blocks are visited: on an H200 worth up to 4 %."""
    shared_rows = GemmConfig()
    shared_columns = GemmConfig(split_n=False, along_n=False)
    if transposed:
        deep = GemmConfig(along_n=False, band=16)
        return (deep if num_in >= 8192 else shared_rows, shared_columns)
    return (shared_columns, shared_rows) if num_out >= 2048 else (shared_rows, shared_columns)
