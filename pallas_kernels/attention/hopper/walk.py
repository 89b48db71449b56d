"""The order of a multiprocessor's work: items of (block, head), from a table of blocks (see `blocks`)."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.hopper.config import div, rem


class Item(NamedTuple):
    """An item of work: a key head, a block of its rows, and the block's range of tiles."""

    number: Any  # number of earlier items of the multiprocessor
    block: Any
    head: Any
    begin: Any  # first tile
    num: Any  # number of tiles
    step: Any  # number of earlier tiles in the stream


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """The work of one multiprocessor: items of (block, head), longest blocks first, one from each stratum.

    The direction alternates between strata, so that a multiprocessor with the longest item gets the shortest one next.
    """

    blocks: int
    heads: int
    sms: int
    repeats: int  # repetitions of the block's tiles in one item

    @property
    def items(self) -> int:
        return self.blocks * self.heads

    def __call__(self, table_g, visit):
        """Calls visit(item) for each item. Returns the number of items and of tiles."""
        strata = -(-self.items // self.sms)
        count = jnp.where(self._position(strata - 1) < self.items, strata, strata - 1)

        def visit_item(number, carry):
            step, block, head, begin, num = carry
            following = self._load(table_g, number + 1)  # prefetch, to hide the latency of the load
            visit(Item(number, block, head, begin, num, step))
            return step + num * self.repeats, *following

        step, *_ = lax.fori_loop(0, count, visit_item, (jnp.int32(0), *self._load(table_g, jnp.int32(0))))
        return count, step

    def _position(self, stratum):
        sm = lax.axis_index("sm")
        return stratum * self.sms + jnp.where(rem(jnp.int32(stratum), 2) == 0, sm, self.sms - 1 - sm)

    def _load(self, table_g, stratum):
        position = jnp.minimum(self._position(stratum), self.items - 1)
        row = div(position, self.heads)
        block, begin, num = (table_g[row, column] for column in range(3))
        return block, position - row * self.heads, begin, num
