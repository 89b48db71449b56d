"""Numbers of sorted rows. Imports nothing, because planning needs them."""

from __future__ import annotations

TILES = (16, 128)  # rows of a tile


def tile_rows(num_rows: int, active: int, experts: int) -> int:
    """Rows of a tile: about half of those that an expert has, so that little of it is padding.

    >>> tile_rows(8192, 8, 128), tile_rows(64, 2, 8)
    (128, 16)
    """
    rows = num_rows * active // (2 * experts)
    return min(max(1 << max(rows.bit_length() - 1, 0), TILES[0]), TILES[1])


def most_tiles(num_rows: int, active: int, experts: int, tile: int) -> int:
    """Tiles that are enough for any choice of experts.

    >>> most_tiles(3, 2, 4, 2)  # six copies of four experts: one, one, one and three rows
    5
    """
    copies = num_rows * active
    return (copies + min(experts, copies) * (tile - 1)) // tile


def most_segments(copies: int, adapters: int, experts: int, tiles: int) -> int:
    """Segments that are enough: every run of an adapter has one more than it has borders of tiles inside.

    >>> most_segments(copies=6, adapters=1, experts=4, tiles=5)
    9
    """
    return tiles + min(experts * adapters, copies) if adapters else 0


def sorted_rows(num_rows: int, active: int, experts: int) -> int:
    """M, the rows of the sorted arrays.

    >>> sorted_rows(8192, 8, 128)
    81792
    """
    tile = tile_rows(num_rows, active, experts)
    return tile * most_tiles(num_rows, active, experts, tile)
