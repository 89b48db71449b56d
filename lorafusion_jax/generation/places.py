"""The rows of a decoding pass: adapters in places, and the same number of rows for each place. Plain numbers.

Rows are sorted by adapter, so a layer multiplies the rows of each place by that place's A and B, read once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BASE = -1  # the adapter of rows that have none
PLACE_ROWS = 8  # a place costs as much as so many rows: A and B are read again


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Row r belongs to place r // rows.

    Attributes:
        adapters: index of the adapter of each place, `BASE` for rows without one; their number is a power of two.
        rows: of each place, a power of two.
    """

    adapters: tuple[int, ...]
    rows: int

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self.adapters) * self.rows

    def rows_of(self, adapter: int) -> list[int]:
        """The rows of an adapter, in order."""
        return [row for row in range(self.count) if self.adapters[row // self.rows] == adapter]


def make_places(sequences: Mapping[int, int]) -> Places:
    """Chooses places for some sequences of each adapter; an adapter of many gets several places.

    >>> make_places({0: 4, 1: 3, 2: 4})
    Places(adapters=(0, 1, 2, -1), rows=4)
    >>> make_places({0: 64} | {k: 1 for k in range(1, 16)}).rows
    8
    """

    def number(rows: int) -> int:
        return sum(-(-count // rows) for count in sequences.values())

    sizes = [1 << power for power in range(max(sequences.values()).bit_length() + 1)]
    rows = min(sizes, key=lambda size: (number(size) * (size + PLACE_ROWS), size))
    adapters = [adapter for adapter, count in sequences.items() for _ in range(-(-count // rows))]
    padding = [BASE] * (power_of_two(len(adapters)) - len(adapters))
    return Places(adapters=(*adapters, *padding), rows=rows)


def share_rows(requests: Mapping[int, int], most: int) -> dict[int, int]:
    """Shares at most about `most` rows among adapters by their numbers of requests, at least one each.

    >>> share_rows({0: 90, 1: 9, 2: 1}, 10)
    {0: 9, 1: 1, 2: 1}
    """
    total = sum(requests.values())
    if total <= most:
        return dict(requests)
    return {adapter: max(1, most * count // total) for adapter, count in requests.items()}


def power_of_two(number: int) -> int:
    """The smallest power of two from `number` on."""
    return 1 << max(number - 1, 0).bit_length()


def bucket(number: int, least: int) -> int:
    """The smallest of 2^n and 3 · 2^(n-1), from `least` on, that holds `number`, so that few shapes are compiled.

    >>> [bucket(number, 64) for number in (5, 65, 97, 200)]
    [64, 96, 128, 256]
    """
    size = max(power_of_two(number), least)
    return size * 3 // 4 if size > least and number <= size * 3 // 4 else size
