"""Shared parts of the Hopper attention kernels: tiles in shared memory, barrier rings, masks, register operands.

T packed rows · H query heads · K key heads · G = H / K · C head width
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

TILE = 64  # rows of one warpgroup: the height of a wgmma
WARPGROUPS = 2  # compute warpgroups; a third one streams tiles into shared memory
LOG2E = math.log2(math.e)
WGMMA = plgpu.Layout.WGMMA
BY_ROW, BY_COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Ring depths of the three kernels, and their register allocation."""

    forward_stages: int = 4
    dq_stages: int = 2
    dkv_stages: int = 2
    places: int = 2  # units of work with their own rows in shared memory
    compute_registers: int = 240
    memory_registers: int = 24
    through_smem: bool = False  # left operands of products go through shared memory; interpret mode needs it


def tile(*shape: int, dtype: Any):
    """Shared-memory tile of rows of C values, in the layout of TMA and wgmma."""
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


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

    def place(self, head, block, unit):
        """Rows and query head of a unit of the block."""
        member = div(unit, self.height) if self.height > 1 else unit
        part = unit - member * self.height
        return rows(block * self.queries + part * TILE), head * self.group + member


def tile_mask(row0, column0, shape: tuple[int, int], rule):
    """Evaluates rule(row, column) on a tile with the corner (row0, column0)."""
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA) + row0
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA) + column0
    return rule(row, column)


def broadcast(x: jax.Array, shape: tuple[int, int], axis: int) -> jax.Array:
    """Broadcasts a vector along `axis` to a tile."""
    return lax.broadcast_in_dim(x, shape, [axis])


def multiply(acc, lhs: jax.Array, rhs, spare_s, wg) -> None:
    """acc += lhs rhs, with lhs from registers or through this warpgroup's `spare_s` in shared memory."""
    if spare_s is None:
        plgpu.wgmma(acc, lhs, rhs)
        return
    spare_s[wg] = lhs
    plgpu.commit_smem()
    plgpu.wgmma(acc, spare_s.at[wg], rhs)
    plgpu.wgmma_wait(0)


def wait_for_room(barriers, step, depth: int, lane: int = 0, lanes: int = 1) -> None:
    """Waits until place `step` of a ring of `depth` places (or of several parallel rings) can be refilled."""

    @pl.when(step >= depth)
    def _():
        plgpu.barrier_wait(barriers.at[rem(step, depth) * lanes + lane])


def drain_ring(barriers, steps, depth: int, lanes: int = 1) -> None:
    """Waits for the readers of all places of a ring."""

    @pl.loop(jnp.maximum(steps - depth, 0), steps)
    def _(step):
        for lane in range(lanes):
            plgpu.barrier_wait(barriers.at[rem(step, depth) * lanes + lane])


def div(x, by: int):
    return lax.div(x, jnp.asarray(by, x.dtype))


def rem(x, by: int):
    return lax.rem(x, jnp.asarray(by, x.dtype))


def rows(start, size: int = TILE):
    return pl.ds(start, size)
