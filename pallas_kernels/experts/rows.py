"""Rows sorted by (expert, adapter). Every run of rows of one expert and one adapter fills whole tiles.

So a tile never mixes experts or adapters, and a NaN of one adapter stays in its own tiles. The order is stable: where a
row goes depends on the rows before it only, and all moves of rows are gathers, without atomic sums.

T rows · k experts of a row · E experts · A adapters · M sorted rows with padding
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.experts.sizes import most_tiles, tile_rows


class ExpertRows(NamedTuple):
    """Where copies of rows are.

    Attributes:
        source: int32 [M], copy t · k + j in each place; -1: padding.
        place: int32 [T, k], place of each copy.
        tile_expert: int32 [tiles]; -1: no rows.
        tile_adapter: int32 [tiles]; -1: rows of no adapter, or none.
        first_tile: int32 [E · (A + 1) + 1], first tile of each run in order, and the end of the last one. A run has the
            rows of an expert and an adapter, and the last run of an expert those of no adapter.
    """

    source: Int[Array, " M"]
    place: Int[Array, "T k"]
    tile_expert: Int[Array, " tiles"]
    tile_adapter: Int[Array, " tiles"]
    first_tile: Int[Array, " runs"]

    @property
    def tile(self) -> int:
        """Rows of a tile."""
        return len(self.source) // len(self.tile_expert)


def sort_rows(
    expert: Int[Array, "T k"], adapter: Int[Array, " T"], *, experts: int, adapters: int, tile: int | None = None
) -> ExpertRows:
    """Sorts the copies of all rows by expert, then by adapter, then by row.

    Args:
        expert: the experts of each row, different from each other.
        adapter: of each row; -1: none.
        experts: E.
        adapters: A.
        tile: rows of a tile (None: `tile_rows`).

    >>> rows = sort_rows(jnp.array([[1, 0], [0, 2]]), jnp.array([0, 0]), experts=3, adapters=1, tile=2)
    >>> rows.source.tolist(), rows.tile_expert.tolist()
    ([1, 2, 0, -1, 3, -1, -1, -1], [0, 1, 2, -1])
    """
    num_rows, active = expert.shape
    tile = tile_rows(num_rows, active, experts, adapters) if tile is None else tile
    runs = experts * (adapters + 1)
    of_adapter = jnp.where((adapter >= 0) & (adapter < adapters), adapter, adapters)
    run = (expert * (adapters + 1) + of_adapter[:, None]).reshape(-1).astype(jnp.int32)
    order = jnp.argsort(run, stable=True).astype(jnp.int32)
    stop = jnp.searchsorted(run[order], jnp.arange(runs, dtype=jnp.int32), side="right").astype(jnp.int32)
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), stop[:-1]])
    tiles_of = -(-(stop - first) // tile)
    stop_tile = jnp.cumsum(tiles_of, dtype=jnp.int32)
    first_tile = stop_tile - tiles_of
    tiles = most_tiles(num_rows, active, experts, adapters, tile)
    tile_run = jnp.searchsorted(stop_tile, jnp.arange(tiles, dtype=jnp.int32), side="right").astype(jnp.int32)
    used, tile_run = tile_run < runs, jnp.minimum(tile_run, runs - 1)
    number = (jnp.arange(tiles, dtype=jnp.int32) - first_tile[tile_run])[:, None] * tile + jnp.arange(tile)
    inside = used[:, None] & (number < (stop - first)[tile_run][:, None])
    at = jnp.where(inside, first[tile_run][:, None] + number, 0)
    rank = jnp.argsort(order).astype(jnp.int32)  # of each copy in the sorted order
    tile_adapter = tile_run % (adapters + 1)
    return ExpertRows(
        source=jnp.where(inside, order[at], -1).reshape(-1),
        place=(first_tile[run] * tile + rank - first[run]).reshape(num_rows, active),
        tile_expert=jnp.where(used, tile_run // (adapters + 1), -1),
        tile_adapter=jnp.where(used & (tile_adapter < adapters), tile_adapter, -1),
        first_tile=jnp.concatenate([jnp.zeros(1, jnp.int32), stop_tile]),
    )


@jax.custom_vjp
def spread_rows(x: Float[Array, "T ..."], rows: ExpertRows) -> Float[Array, "M ..."]:
    """Copies every row to the places of its experts; padding is zero."""
    return _spread(x, rows)


@jax.custom_vjp
def collect_rows(y: Float[Array, "M ..."], rows: ExpertRows) -> Float[Array, "T ..."]:
    """Sums the copies of every row, in the order of its experts. The transpose of `spread_rows`."""
    return _collect(y, rows)


def spread_copies(x: Float[Array, "T k"], rows: ExpertRows) -> Float[Array, " M"]:
    """Moves a number of each copy to its place; padding is zero."""
    return _spread_copies(x, rows)


def _spread(x: Array, rows: ExpertRows) -> Array:
    active = rows.place.shape[1]
    real = (rows.source >= 0).reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.where(real, x[jnp.maximum(rows.source, 0) // active], jnp.zeros((), x.dtype))


def _collect(y: Array, rows: ExpertRows) -> Array:
    total = y[rows.place[:, 0]].astype(jnp.float32)
    for j in range(1, rows.place.shape[1]):
        total = total + y[rows.place[:, j]]
    return total.astype(y.dtype)


spread_rows.defvjp(lambda x, rows: (_spread(x, rows), rows), lambda rows, dy: (_collect(dy, rows), None))
collect_rows.defvjp(lambda y, rows: (_collect(y, rows), rows), lambda rows, dx: (_spread(dx, rows), None))


@jax.custom_vjp
def _spread_copies(x: Array, rows: ExpertRows) -> Array:
    return jnp.where(rows.source >= 0, x.reshape(-1)[jnp.maximum(rows.source, 0)], jnp.zeros((), x.dtype))


_spread_copies.defvjp(lambda x, rows: (_spread_copies(x, rows), rows), lambda rows, dy: (dy[rows.place], None))
