"""Subset sums of sample lengths as one big integer: bit n is set if some subset has n tokens."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache

from scheduling.packing.problem import bits

EXACT = 18  # samples searched exactly; 2^18 subsets reach practically any sum


def fullest(tokens: tuple[int, ...], mask: int, room: int) -> tuple[int, int]:
    """Finds the subset of the masked samples that fills `room` best; prefers long samples among equals.

    Returns:
        (mask of the subset, its tokens).
    """
    pending = bits(mask & low_bits(bisect_right(tokens, room)))
    chosen, taken = 0, 0
    while len(pending) > EXACT and tokens[pending[-1]] * 4 <= room - taken:
        bit = pending.pop()  # many samples: take long ones first, then search exactly
        chosen, taken = chosen | 1 << bit, taken + tokens[bit]
        room_left = room - taken
        while pending and tokens[pending[-1]] > room_left:
            pending.pop()
    more, best = _exact([(bit, tokens[bit]) for bit in _spread(pending)], room - taken)
    return chosen | more, taken + best


def first_fit(tokens: tuple[int, ...], mask: int, room: int) -> tuple[int, int]:
    """Takes the longest masked sample that still fits, again and again.

    Returns:
        (mask of the subset, its tokens).
    """
    chosen, taken = 0, 0
    while fitting := mask & low_bits(bisect_right(tokens, room - taken)):
        bit = fitting.bit_length() - 1
        chosen, taken, mask = chosen | 1 << bit, taken + tokens[bit], mask ^ 1 << bit
    return chosen, taken


def _spread(pending: list[int]) -> list[int]:
    """At most EXACT samples, evenly spaced from short to long, including the longest."""
    if len(pending) <= EXACT:
        return pending
    step = (len(pending) - 1) / (EXACT - 1)
    return [pending[round(i * step)] for i in range(EXACT)]


def _exact(pending: list[tuple[int, int]], room: int) -> tuple[int, int]:
    reach = [1]
    for _, length in pending:
        reach.append(reach[-1] | reach[-1] << length)
    best = (reach[-1] & low_bits(room + 1)).bit_length() - 1
    chosen, left = 0, best
    for index in range(len(pending) - 1, -1, -1):
        bit, length = pending[index]
        if length <= left and reach[index] >> (left - length) & 1:
            chosen |= 1 << bit
            left -= length
    return chosen, best


@lru_cache(maxsize=4096)
def low_bits(count: int) -> int:
    return (1 << count) - 1
