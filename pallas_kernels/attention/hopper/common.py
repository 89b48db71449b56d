"""Shared parts of the Hopper attention kernels: tiles in shared memory, barrier rings, masks, register operands.

T packed rows · H query heads · K key heads · G = H / K · C head width
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.hopper.config import rem

LOG2E = math.log2(math.e)
WGMMA = plgpu.Layout.WGMMA
BY_ROW, BY_COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)


def tile(*shape: int, dtype: Any):
    """Shared-memory tile of rows of C values, in the layout of TMA and wgmma."""
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


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
    plgpu.commit_smem()  # all warps have written before the tensor cores read
    plgpu.wgmma(acc, spare_s.at[wg], rhs)
    plgpu.wgmma_wait(0)  # before the next product overwrites spare_s


def wait_for_room(barriers, step, depth: int, lane: int = 0, lanes: int = 1) -> None:
    """Waits until the slot of `step` in a ring of `depth` slots can be refilled: its readers have arrived.

    The first `depth` steps meet empty slots. Of `lanes` parallel rings, `lane` is this one's number.
    """

    @pl.when(step >= depth)
    def _():
        plgpu.barrier_wait(barriers.at[rem(step, depth) * lanes + lane])


def drain_ring(barriers, steps, depth: int, lanes: int = 1) -> None:
    """Waits for the readers of all slots of a ring, so that no arrival is left when the block ends."""

    @pl.loop(jnp.maximum(steps - depth, 0), steps)
    def _(step):
        for lane in range(lanes):
            plgpu.barrier_wait(barriers.at[rem(step, depth) * lanes + lane])
