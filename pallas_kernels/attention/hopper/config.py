"""Plain numbers of the Hopper attention kernels: ring depths, and the division of queries into units.

They do without the kernels' language, which takes a quarter of a second to import and which most processes never use.
G = H / K query heads of a key head
"""

from __future__ import annotations

import dataclasses

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

TILE = 64  # rows of one warpgroup: the height of a wgmma
WARPGROUPS = 2  # compute warpgroups; a third one streams tiles into shared memory


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Ring depths of the three kernels, and their register allocation."""

    forward_stages: int = 4
    dq_stages: int = 2
    dkv_stages: int = 2
    places: int = 2  # slots for the rows of a unit of work: the next unit's are loaded while one computes
    compute_registers: int = 240
    memory_registers: int = 24
    through_smem: bool = False  # left operands of products go through shared memory; interpret mode needs it
    apart: bool = False  # dK and dV by a launch each, which fits into 168 registers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Division of the queries of one key head and one block of rows into units: 64 rows of one query head.

    A block has an even number of units, so that both warpgroups have one in every round. It has 64 rows for an even
    group of heads, else 128.
    """

    group: int

    @property
    def height(self) -> int:
        """Number of units per head."""
        return 1 + self.group % 2

    @property
    def queries(self) -> int:
        """Number of rows of a block."""
        return self.height * TILE

    @property
    def rounds(self) -> int:
        return self.group * self.height // WARPGROUPS

    def rows_and_head(self, head, block, unit):
        """Rows and query head of a unit of the block."""
        member = div(unit, self.height) if self.height > 1 else unit
        part = unit - member * self.height
        return rows(block * self.queries + part * TILE), head * self.group + member


def div(x, by: int):
    return lax.div(x, jnp.asarray(by, x.dtype))


def rem(x, by: int):
    return lax.rem(x, jnp.asarray(by, x.dtype))


def rows(start, size: int = TILE):
    return pl.ds(start, size)
