"""What the Hopper kernels of attention share: tiles in shared memory, barriers, the mask, register operands.

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
WARPGROUPS = 2  # that multiply; a third one streams tiles into shared memory
SMEM_BYTES = 232448 - 1024  # what a block may ask for on Hopper, less barriers
LOG2E = math.log2(math.e)
WGMMA = plgpu.Layout.WGMMA
BY_ROW, BY_COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Tile sizes and depths of the three kernels."""

    forward_keys: int = 128  # keys of a step
    forward_stages: int = 2
    dq_keys: int = 64
    dq_stages: int = 2
    dq_places: int = 2  # rounds whose queries fit into shared memory
    dkv_stages: int = 4
    heads_fastest: bool = False  # blocks that start together share rows (else a head)
    compute_registers: int = 240
    memory_registers: int = 24
    branch: bool = True  # leave the mask out of steps that need none
    through_smem: bool = False  # left operands of products out of registers; interpret mode needs it


def tile(*shape: int, dtype: Any):
    """Rows of C values in shared memory as TMA writes and wgmma reads them."""
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


def kernel(body, out_type, *, heads: int, blocks: int, scratch, config: AttentionConfig):
    """A grid of heads x blocks, each of two warpgroups that multiply and one that streams."""
    names, grid = ("head", "block"), (heads, blocks)
    if config.heads_fastest:
        names, grid = names[::-1], grid[::-1]
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=grid,
        grid_names=names,
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )


def scores_seen(row0, column0, shape: tuple[int, int], seen):
    """seen(row, column) over a tile whose corner is (row0, column0)."""
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA) + row0
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA) + column0
    return seen(row, column)


def across(x: jax.Array, shape: tuple[int, int], axis: int) -> jax.Array:
    """A vector that runs along `axis`, over a tile."""
    return lax.broadcast_in_dim(x, shape, [axis])


def maybe(needed, config: AttentionConfig, function, x):
    """function(x) where `needed`, else x; without branches function(x), which must then change nothing."""
    return lax.cond(needed, function, lambda x: x, x) if config.branch else function(x)


def multiply(acc, lhs: jax.Array, rhs, spare) -> None:
    """acc += lhs rhs with lhs from registers, or by way of `spare` in shared memory."""
    if spare is None:
        plgpu.wgmma(acc, lhs, rhs)
        return
    spare[...] = lhs
    plgpu.commit_smem()
    plgpu.wgmma(acc, spare, rhs)
    plgpu.wgmma_wait(0)


def observe(barriers, completed, depth: int) -> None:
    """Waits for the completions that a ring of barriers has left when nothing is streamed any more."""

    @pl.loop(jnp.maximum(completed - depth, 0), completed)
    def _(step):
        plgpu.barrier_wait(barriers.at[rem(step, depth)])


def div(x, by: int):
    return lax.div(x, jnp.asarray(by, x.dtype))


def ceil_div(x, by: int):
    return div(x + (by - 1), by)


def rem(x, by: int):
    return lax.rem(x, jnp.asarray(by, x.dtype))


def rows(start, size: int = TILE):
    return pl.ds(start, size)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """How the queries of one key head and one block of rows are shared out: 64 rows of one query head at a time.

    A block has an even number of units, so that both warpgroups have one in every round: 64 rows for an even group of
    heads, else 128.
    """

    group: int
    keys: int

    @property
    def height(self) -> int:
        """Units of one head."""
        return 1 + self.group % 2

    @property
    def queries(self) -> int:
        """Rows of a block."""
        return self.height * TILE

    @property
    def rounds(self) -> int:
        return self.group * self.height // WARPGROUPS

    def place(self, head, block, unit):
        """Rows and query head of a unit of this block."""
        member = div(unit, self.height) if self.height > 1 else unit
        part = unit - member * self.height
        return rows(block * self.queries + part * TILE), head * self.group + member

    def tiles(self, block, first_g):
        """First tile of keys that the block sees, and how many."""
        row0 = block * self.queries
        begin = div(first_g[row0], self.keys)
        return begin, ceil_div(row0 + self.queries, self.keys) - begin
