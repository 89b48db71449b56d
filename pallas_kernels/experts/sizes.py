"""Numbers of sorted rows. Imports nothing, because planning needs them."""

from __future__ import annotations

TILES = (16, 128)  # rows of a tile


def tile_rows(num_rows: int, active: int, experts: int, adapters: int) -> int:
    """Rows of a tile: about half of those that an expert has of an adapter, so that little of it is padding.

    >>> tile_rows(8192, 8, 128, 4), tile_rows(64, 2, 8, 3)
    (64, 16)
    """
    wanted = num_rows * active // (2 * experts * max(adapters, 1))
    return min(max(1 << max(wanted.bit_length() - 1, 0), TILES[0]), TILES[1])


def most_tiles(num_rows: int, active: int, experts: int, adapters: int, tile: int) -> int:
    """Tiles that are enough for any choice of experts. Rows of no adapter have tiles of their own.

    >>> most_tiles(3, 2, 4, 1, 2)  # six copies, in six runs of one row each
    6
    """
    copies = num_rows * active
    return (copies + min(experts * (adapters + 1), copies) * (tile - 1)) // tile


def sorted_rows(num_rows: int, active: int, experts: int, adapters: int) -> int:
    """M, the rows of the sorted arrays.

    >>> sorted_rows(8192, 8, 128, 4)
    105792
    """
    tile = tile_rows(num_rows, active, experts, adapters)
    return tile * most_tiles(num_rows, active, experts, adapters, tile)
