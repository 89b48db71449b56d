"""Rows sorted by expert, and within an expert by adapter. The rows of an expert fill whole tiles.

A tile has one expert, so the frozen product pads rows for experts only. It may have rows of several adapters: the
segments of a tile say which. The order is stable, and all moves of rows are gathers, without atomic sums.

T rows · k experts of a row · E experts · A adapters · M sorted rows with padding
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.experts.sizes import most_segments, most_tiles, tile_rows


class ExpertRows(NamedTuple):
    """Where copies of rows are.

    A run has the rows of an expert and an adapter: run e · (A + 1) + p. The last run of an expert has its rows of no
    adapter. A segment is the part of an adapter's run that lies in one tile.

    Attributes:
        source: int32 [M], copy t · k + j in each place; -1: padding.
        position: int32 [T, k], place of each copy.
        tile_expert: int32 [tiles]; -1: no rows.
        run_start, run_stop: int32 [E · (A + 1)], first row of each run, and the one after its last.
        segment_tile, segment_run: int32 [segments], in the order of rows; a run of -1: no segment.
        tile_segment: int32 [tiles + 1], first segment of each tile, and the end of the last one.
    """

    source: Int[Array, " M"]
    position: Int[Array, "T k"]
    tile_expert: Int[Array, " tiles"]
    run_start: Int[Array, " runs"]
    run_stop: Int[Array, " runs"]
    segment_tile: Int[Array, " segments"]
    segment_run: Int[Array, " segments"]
    tile_segment: Int[Array, " tiles_1"]

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

    >>> rows = sort_rows(jnp.array([[1, 0], [0, 2]]), jnp.array([1, 0]), experts=3, adapters=2, tile=2)
    >>> rows.source.tolist(), rows.tile_expert.tolist()
    ([2, 1, 0, -1, 3, -1], [0, 1, 2])
    """
    num_rows, active = expert.shape
    tile = tile_rows(num_rows, active, experts) if tile is None else tile
    tiles = most_tiles(num_rows, active, experts, tile)
    numbers = lambda count: jnp.arange(count, dtype=jnp.int32)  # noqa: E731
    of_adapter = jnp.where((adapter >= 0) & (adapter < adapters), adapter, adapters)
    run = (expert * (adapters + 1) + of_adapter[:, None]).reshape(-1).astype(jnp.int32)
    order = jnp.argsort(run, stable=True).astype(jnp.int32)
    rank = jnp.zeros_like(order).at[order].set(numbers(len(order)), unique_indices=True)  # in the sorted order
    stop = jnp.searchsorted(run[order], numbers(experts * (adapters + 1)), side="right").astype(jnp.int32)
    expert_stop = stop[adapters :: adapters + 1]
    expert_first = _shifted(expert_stop)
    stop_tile = jnp.cumsum(-(-(expert_stop - expert_first) // tile), dtype=jnp.int32)
    padding = _shifted(stop_tile) * tile - expert_first  # rows of padding before each expert
    tile_expert = _owner(stop_tile, tiles)
    owner = jnp.repeat(jnp.minimum(tile_expert, experts - 1), tile, total_repeat_length=tiles * tile)
    copy = numbers(tiles * tile) - padding[owner]
    real = jnp.repeat(tile_expert < experts, tile, total_repeat_length=tiles * tile) & (copy < expert_stop[owner])
    moved = jnp.repeat(padding, adapters + 1, total_repeat_length=len(stop))
    run_start, run_stop = _shifted(stop) + moved, stop + moved
    segment_tile, segment_run = _segments(
        run_start, run_stop, adapters, tile, most_segments(len(run), adapters, experts, tiles)
    )
    return ExpertRows(
        source=jnp.where(real, order[jnp.where(real, copy, 0)], -1),
        position=rank.reshape(num_rows, active) + padding[expert],
        tile_expert=jnp.where(tile_expert < experts, tile_expert, -1),
        run_start=run_start,
        run_stop=run_stop,
        segment_tile=segment_tile,
        segment_run=segment_run,
        tile_segment=jnp.searchsorted(segment_tile, numbers(tiles + 1), method="compare_all").astype(jnp.int32),
    )


def _segments(run_start: Array, run_stop: Array, adapters: int, tile: int, segments: int) -> tuple[Array, Array]:
    """Tile and run of each segment; those that are not needed are at the end, after all tiles."""
    first_tile = run_start // tile
    of_adapter = jnp.arange(len(run_start)) % (adapters + 1) < adapters
    parts = jnp.where(of_adapter & (run_stop > run_start), (run_stop - 1) // tile - first_tile + 1, 0)
    stop = jnp.cumsum(parts, dtype=jnp.int32)
    run = _owner(stop, segments)
    has_run, at = run < len(parts), jnp.minimum(run, len(parts) - 1)
    number = jnp.arange(segments, dtype=jnp.int32) - (stop - parts)[at]
    beyond = jnp.iinfo(jnp.int32).max
    return jnp.where(has_run, first_tile[at] + number, beyond), jnp.where(has_run, run, -1)


def _shifted(stop: Array) -> Array:
    """Where each part starts, from where it stops."""
    return jnp.concatenate([jnp.zeros(1, stop.dtype), stop[:-1]])


def _owner(stop: Array, count: int) -> Array:
    """Which part has each of the numbers below `count`; the number of parts: none."""
    numbers = jnp.arange(count, dtype=jnp.int32)
    return jnp.searchsorted(stop, numbers, side="right", method="compare_all").astype(jnp.int32)


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
    active = rows.position.shape[1]
    real = (rows.source >= 0).reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.where(real, x[jnp.maximum(rows.source, 0) // active], jnp.zeros((), x.dtype))


def _collect(y: Array, rows: ExpertRows) -> Array:
    total = y[rows.position[:, 0]].astype(jnp.float32)
    for j in range(1, rows.position.shape[1]):
        total = total + y[rows.position[:, j]]
    return total.astype(y.dtype)


spread_rows.defvjp(lambda x, rows: (_spread(x, rows), rows), lambda rows, dy: (_collect(dy, rows), None))
collect_rows.defvjp(lambda y, rows: (_collect(y, rows), rows), lambda rows, dx: (_spread(dx, rows), None))


@jax.custom_vjp
def _spread_copies(x: Array, rows: ExpertRows) -> Array:
    return jnp.where(rows.source >= 0, x.reshape(-1)[jnp.maximum(rows.source, 0)], jnp.zeros((), x.dtype))


_spread_copies.defvjp(lambda x, rows: (_spread_copies(x, rows), rows), lambda rows, dy: (dy[rows.position], None))
