"""Arithmetic on sizes, shared by everything that cuts arrays into blocks. Imports nothing."""

from __future__ import annotations


def round_up(size: int, multiple: int) -> int:
    """Returns the smallest multiple that is not below `size`.

    Example:
        >>> round_up(130, 64)
        192
    """
    return -(-size // multiple) * multiple


def power_of_two(size: int) -> int:
    """Returns the smallest power of two that is not below `size`.

    Example:
        >>> power_of_two(20), power_of_two(32)
        (32, 32)
    """
    return 1 << (size - 1).bit_length()


def row_block(tile: int, limit: int) -> int:
    """Returns the largest power of two that divides a tile's rows, up to `limit`.

    Example:
        >>> row_block(96, 64)
        32
    """
    return min(tile & -tile, limit)


def split_loop(programs: int, steps: int, *, wanted: int) -> int:
    """Splits a loop of `steps` in two until there are about `wanted` programs; each keeps at least four steps.

    Example:
        >>> split_loop(32, 64, wanted=132)
        4
    """
    split = 1
    while programs * split < wanted * 3 // 4 and steps % (2 * split) == 0 and steps // (2 * split) >= 4:
        split *= 2
    return split
