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
        own: rows that a program writes; other: rows of a tile that it walks over.
    """

    own: int = 64
    other: int = 64
    num_warps: int = 4
    num_stages: int = 2

    def shared_bytes(self, width: int, item: int = 2) -> int:
        """Shared memory of a program at most: two tiles of its own, two under way, and the weights of both passes."""
        under_way = max(1, self.num_stages)
        return item * (2 * width * (self.own + under_way * self.other) + 2 * self.own * self.other)


SIZES = (
    AttentionConfig(own=64, other=64, num_stages=2),
    AttentionConfig(own=64, other=32, num_stages=2),
    AttentionConfig(own=32, other=32, num_stages=2),
    AttentionConfig(own=32, other=32, num_stages=1),
    AttentionConfig(own=16, other=16, num_stages=1),
)
ROWS = max(max(config.own, config.other) for config in SIZES)  # T is a multiple of it


def attention_config(width: int, item: int = 2) -> AttentionConfig:
    """The largest blocks that fit."""
    room = shared_memory_bytes()
    return next((config for config in SIZES if config.shared_bytes(width, item) <= room), SIZES[-1])
