"""Shared parts of the passes over queries: forward, and the gradient of queries.

An item of work is a key head and 64 (or 128) rows of queries, with all query heads of the group. It is split into units
of 64 rows of one head. In each round the two compute warpgroups process one unit each and share the stream of (K, V)
tiles, from the start of the first query's document to the diagonal. All units use the same tiles and the same mask. The
third warpgroup streams the tiles and prefetches the rows of the next units.

T packed rows · H query heads · K key heads · G = H / K · C head width
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.hopper.common import broadcast, tile, tile_mask, wait_for_room
from pallas_kernels.attention.hopper.config import TILE, WARPGROUPS, AttentionConfig, Units, rem, rows
from pallas_kernels.attention.hopper.launch import Static, static_of
from pallas_kernels.attention.hopper.walk import Item


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QueryRefs:
    """References of both passes: device memory (_g), shared memory (_s), and barriers.

    A ring has a barrier that its copies pass, and one that its readers pass when a slot can be filled again.
    """

    q_g: Any  # [T, H, C]
    k_g: Any  # [T, K, C], as is v
    v_g: Any
    first_g: Any  # int32 [T], first row of a row's document
    table_g: Any  # items of work
    q_s: Any  # [places, WARPGROUPS, 64, C]: queries of a unit, then its result
    k_s: Any  # [stages, 64, C], as is v
    v_s: Any
    unit_bar: Any  # the rows of a unit have arrived
    unit_free: Any  # they can be overwritten
    k_bar: Any
    v_bar: Any
    free_bar: Any  # both warpgroups have read a (K, V) tile
    spare_s: Any  # [WARPGROUPS, 64, 64] or None, see `common.multiply`


def key_tiles(static: Static) -> dict[str, Any]:
    """Scratch memory for the stream of (K, V) tiles."""
    return {name: tile(static.stages, TILE, static.width, dtype=static.dtype) for name in ("k_s", "v_s")}


def unit_barriers(static: Static) -> dict[str, Any]:
    """Barriers of a unit's rows: two arrays have arrived; they can be overwritten."""
    many = static.config.places * WARPGROUPS
    return {
        "unit_bar": plgpu.Barrier(num_arrivals=2, num_barriers=many),
        "unit_free": plgpu.Barrier(num_barriers=many),
    }


def key_barriers(static: Static) -> dict[str, Any]:
    """Barriers of (K, V) tiles: arrived; read by both. Also shared memory for left operands, if they need it."""
    stages = static.stages
    return {
        "k_bar": plgpu.Barrier(num_barriers=stages),
        "v_bar": plgpu.Barrier(num_barriers=stages),
        "free_bar": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        "spare_s": tile(WARPGROUPS, TILE, TILE, dtype=static.dtype) if static.config.through_smem else None,
    }


class Unit(NamedTuple):
    """64 rows of one query head, the work of a warpgroup in one round of an item."""

    item: Item
    turn: Any  # index of the round in the item
    wg: Any
    number: Any  # number of earlier rounds
    slot: Any  # of its rows
    barrier: Any  # index of that slot's barriers
    rows: Any
    head: Any  # query head

    @property
    def query0(self):
        return self.rows.start

    def step(self, tile_number):
        """Number of earlier tiles in the stream."""
        return self.item.step + self.turn * self.item.num + tile_number


class Mask(NamedTuple):
    """Causal mask of a unit: queries attend to keys from the first row of their document to themselves."""

    query0: Any
    first: jax.Array  # [64] in registers
    last_first: Any  # largest of them

    def __call__(self, x: jax.Array, key0, hidden: float) -> jax.Array:
        """Sets masked scores to `hidden`; tiles without masked scores stay unchanged."""

        def rule(query, key):
            return (key <= query) & (key >= broadcast(self.first, x.shape, 0))

        def masked(x):
            visible = tile_mask(self.query0, key0, x.shape, rule)
            return jnp.where(visible, x, jnp.full_like(x, hidden))

        return lax.cond((key0 >= self.query0) | (key0 < self.last_first), masked, lambda x: x, x)


def query_static(q_THC, k_TKC, *, config: AttentionConfig, **rest) -> Static:
    """Static parameters of a kernel with these items."""
    units = Units(group=q_THC.shape[1] // k_TKC.shape[1])
    return static_of(q_THC, k_TKC, rows=units.queries, repeats=units.rounds, config=config, **rest)


def stream_units[R: QueryRefs](static: Static, refs: R, fetch_rows: Callable[[Static, R, Unit], None]):
    """Streams the rows of all units, and tiles of keys and values. Returns the number of rounds and of tiles."""

    def stream_item(item: Item):
        @pl.loop(0, static.units.rounds)
        def _(turn):
            # Rows first: a warpgroup waits for its own once, and then for one tile of keys after another.
            for wg in range(WARPGROUPS):
                unit = _unit(static, item, turn, wg)
                fetch_rows(static, refs, unit)

            @pl.loop(0, item.num)
            def _(tile_number):
                _fetch_tile(static, refs, unit, tile_number)  # equal for all units of the round

    items, steps = static.walk(refs.table_g, stream_item)
    return items * static.units.rounds, steps


def compute_units[R: QueryRefs](static: Static, refs: R, wg, compute_unit: Callable[[Static, R, Unit], None]) -> None:
    """Calls compute_unit(static, refs, unit) for every unit of this warpgroup."""

    def compute_item(item: Item):
        def compute_round(turn, _):
            compute_unit(static, refs, _unit(static, item, turn, wg))

        lax.fori_loop(0, static.units.rounds, compute_round, None)

    static.walk(refs.table_g, compute_item)


def _unit(static: Static, item: Item, turn, wg) -> Unit:
    number = item.number * static.units.rounds + turn
    slot = rem(number, static.config.places)
    barrier = slot * WARPGROUPS + wg
    unit_rows, head = static.units.rows_and_head(item.head, item.block, turn * WARPGROUPS + wg)
    return Unit(item, turn, wg, number, slot, barrier, unit_rows, head)


def _fetch_tile(static: Static, refs: QueryRefs, unit: Unit, tile_number) -> None:
    """Starts the copies of a (K, V) tile once both warpgroups have read the tile before it in its slot."""
    step = unit.step(tile_number)
    slot = rem(step, static.stages)
    keys = rows((unit.item.begin + tile_number) * TILE), unit.item.head
    wait_for_room(refs.free_bar, step, static.stages)
    # A barrier each: the scores need K only, while V still travels.
    plgpu.copy_gmem_to_smem(refs.k_g.at[keys], refs.k_s.at[slot], refs.k_bar.at[slot])
    plgpu.copy_gmem_to_smem(refs.v_g.at[keys], refs.v_s.at[slot], refs.v_bar.at[slot])
