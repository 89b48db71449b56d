"""Tables over row tiles: which adapter owns a tile, and sums over the tiles of one adapter.

T packed tokens · A adapters · R padded rank
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_GROUP = 16  # adapters whose sums the compiler makes in one read of the partial sums: one reduction each, merged


def rows_per_tile(num_rows: int, tile_adapter: jax.Array) -> int:
    """Returns the height of a tile; raises ValueError when the tiles do not divide the rows."""
    num_tiles = tile_adapter.shape[0]
    if tile_adapter.ndim != 1 or num_tiles == 0 or num_rows % num_tiles:
        raise ValueError(
            f"tile_adapter has shape {tile_adapter.shape}, but {num_rows} rows must split into that many equal tiles"
        )
    return num_rows // num_tiles


def row_adapter(tile_adapter: jax.Array, tile: int) -> jax.Array:
    """Spreads the tile table over rows: int32 [T]."""
    return spread(tile_adapter, tile)


def spread(table: jax.Array, times: int) -> jax.Array:
    """Repeats every entry; `jnp.repeat` makes four small kernels of it on a GPU, this joins its user's."""
    return jnp.broadcast_to(table[:, None], (table.shape[0], times)).reshape(-1)


def per_tile(values: jax.Array, tile_adapter: jax.Array) -> jax.Array:
    """Gathers per-adapter values for each tile; tiles of -1 read adapter 0 and must be selected away later."""
    return jnp.take(values, jnp.maximum(tile_adapter, 0), axis=0, mode="clip")


def select_tiles(values: jax.Array, tile_adapter: jax.Array) -> jax.Array:
    """Zeroes the tiles of -1 by selection: whatever they held, also NaN, is gone."""
    has_adapter = (tile_adapter >= 0).reshape((-1,) + (1,) * (values.ndim - 1))
    return jnp.where(has_adapter, values, jnp.zeros((), values.dtype))


def sum_tiles(partials: jax.Array, tile_adapter: jax.Array, num_adapters: int) -> jax.Array:
    """Adds up per-tile partial sums [tiles, ...] into [A, ...], in a fixed order.

    Selected, never multiplied: a NaN of one adapter stays in its own sum.
    """

    def of_adapter(adapter: jax.Array | int) -> jax.Array:
        is_adapters = (tile_adapter == adapter).reshape((-1,) + (1,) * (partials.ndim - 1))
        return jnp.sum(jnp.where(is_adapters, partials, jnp.zeros((), partials.dtype)), axis=0)

    def of_group(first: jax.Array | int) -> jax.Array:
        return jnp.stack([of_adapter(first + i) for i in range(min(_GROUP, num_adapters))])

    if num_adapters <= _GROUP:
        return of_group(0)
    sums = jax.lax.map(of_group, jnp.arange(0, num_adapters, _GROUP, dtype=jnp.int32))
    return sums.reshape(-1, *partials.shape[1:])[:num_adapters]  # the last group may reach beyond the adapters
