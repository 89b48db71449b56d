"""What the Hopper kernels of attention share: tiles in shared memory, rings of barriers, the mask, register operands.

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
LOG2E = math.log2(math.e)
WGMMA = plgpu.Layout.WGMMA
BY_ROW, BY_COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Depths of the rings of the three kernels, and how registers are shared out."""

    forward_stages: int = 4
    dq_stages: int = 2
    dkv_stages: int = 2
    places: int = 2  # units of work whose own rows fit into shared memory
    compute_registers: int = 240
    memory_registers: int = 24
    through_smem: bool = False  # left operands of products out of registers; interpret mode needs it


def tile(*shape: int, dtype: Any):
    """Rows of C values in shared memory as TMA writes and wgmma reads them."""
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


def kernel(body, out_type, *, sms: int, scratch):
    """One block per multiprocessor: two warpgroups that multiply and one that streams."""
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(sms,),
        grid_names=("sm",),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """The work of one multiprocessor: items of (block, head), longest blocks first, in strata of one item for each.

    The direction alternates from stratum to stratum, so that who had the longest item gets the shortest next.
    """

    blocks: int
    heads: int
    sms: int
    repeats: int  # of the block's tiles in one item

    @property
    def items(self) -> int:
        return self.blocks * self.heads

    def __call__(self, table_g, visit):
        """Calls visit(number, block, head, begin, num, step) for each item, where `step` counts the tiles before it.

        Returns the number of items and of tiles.
        """
        strata = -(-self.items // self.sms)
        count = jnp.where(self._position(strata - 1) < self.items, strata, strata - 1)

        def one(number, carry):
            step, *item = carry
            following = self._load(table_g, number + 1)  # a load from memory has all this item's time to arrive
            visit(number, *item, step)
            return step + item[3] * self.repeats, *following

        step, *_ = lax.fori_loop(0, count, one, (jnp.int32(0), *self._load(table_g, jnp.int32(0))))
        return count, step

    def _position(self, stratum):
        sm = lax.axis_index("sm")
        return stratum * self.sms + jnp.where(rem(jnp.int32(stratum), 2) == 0, sm, self.sms - 1 - sm)

    def _load(self, table_g, stratum):
        position = jnp.minimum(self._position(stratum), self.items - 1)
        row = div(position, self.heads)
        block, begin, num = (table_g[row, column] for column in range(3))
        return block, position - row * self.heads, begin, num


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """How the queries of one key head and one block of rows are shared out: 64 rows of one query head at a time.

    A block has an even number of units, so that both warpgroups have one in every round: 64 rows for an even group of
    heads, else 128.
    """

    group: int

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


def seen_by(row0, column0, shape: tuple[int, int], rule):
    """rule(row, column) over a tile whose corner is (row0, column0)."""
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA) + row0
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA) + column0
    return rule(row, column)


def across(x: jax.Array, shape: tuple[int, int], axis: int) -> jax.Array:
    """A vector that runs along `axis`, over a tile."""
    return lax.broadcast_in_dim(x, shape, [axis])


def multiply(acc, lhs: jax.Array, rhs, spare) -> None:
    """acc += lhs rhs with lhs from registers, or by way of `spare` in shared memory."""
    if spare is None:
        plgpu.wgmma(acc, lhs, rhs)
        return
    spare[...] = lhs
    plgpu.commit_smem()
    plgpu.wgmma(acc, spare, rhs)
    plgpu.wgmma_wait(0)


def wait_for_room(barriers, step, depth: int, lane: int = 0, lanes: int = 1) -> None:
    """Before filling place `step` of a ring of `depth` places (of several, side by side): waits for its last users."""

    @pl.when(step >= depth)
    def _():
        plgpu.barrier_wait(barriers.at[rem(step, depth) * lanes + lane])


def wait_for_rest(barriers, steps, depth: int, lanes: int = 1) -> None:
    """Waits for the users of everything that is still in a ring."""

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
