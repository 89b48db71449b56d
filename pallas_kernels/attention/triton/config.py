"""Blocks of the Triton attention kernels, by what fits into the device's shared memory.

C head width
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.device import shared_memory_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Blocks of one kernel.

    Attributes:
        block_rows: rows that a program writes.
        tile_rows: rows of a tile that it walks over.
    """

    block_rows: int = 64
    tile_rows: int = 64
    num_warps: int = 4
    num_stages: int = 2

    def shared_bytes(self, width: int, item: int = 2) -> int:
        """Shared memory of a program at most: two tiles of its block, two in flight, and the weights of both passes."""
        in_flight = max(1, self.num_stages)
        return item * (
            2 * width * (self.block_rows + in_flight * self.tile_rows) + 2 * self.block_rows * self.tile_rows
        )


SIZES = (
    AttentionConfig(block_rows=64, tile_rows=64, num_stages=2),
    AttentionConfig(block_rows=64, tile_rows=32, num_stages=2),
    AttentionConfig(block_rows=32, tile_rows=32, num_stages=2),
    AttentionConfig(block_rows=32, tile_rows=32, num_stages=1),
    AttentionConfig(block_rows=16, tile_rows=16, num_stages=1),
)
ROWS = max(max(config.block_rows, config.tile_rows) for config in SIZES)  # T is a multiple of it


def attention_config(width: int, item: int = 2) -> AttentionConfig:
    """The largest blocks that fit."""
    room = shared_memory_bytes()
    return next((config for config in SIZES if config.shared_bytes(width, item) <= room), SIZES[-1])
