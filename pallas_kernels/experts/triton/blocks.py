"""How the products of experts are cut. Imports no Pallas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pallas_kernels.device import shared_memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """How the frozen product is cut: most columns of a program, contracted features of a step, and Triton's numbers."""

    columns: int = 256
    depth: int = 64
    num_warps: int = 8
    num_stages: int = 3

    def shared_bytes(self, tile: int, item: int) -> int:
        """Shared memory of a program."""
        return self.num_stages * self.depth * (tile + self.columns) * item


# Fastest first, on an H200. Low-rank terms in a tile of 256 columns leave room for one program at a time.
CUTS = (Blocks(), Blocks(columns=128), Blocks(columns=128, num_stages=2), Blocks(columns=128, depth=32, num_stages=2))
# Of 8-bit floats: as many bytes in a step.
FP8_CUTS = (Blocks(depth=128), Blocks(columns=128, depth=128), Blocks(columns=128, depth=128, num_stages=2))


def fastest_blocks(tile: int, item: int, cuts: Sequence[Blocks] = CUTS) -> Blocks:
    """The first of the cuts that fits into the device's shared memory.

    >>> fastest_blocks(128, 2).columns
    256
    """
    return next((blocks for blocks in cuts if blocks.shared_bytes(tile, item) <= shared_memory_bytes()), cuts[-1])
