"""Sampled blocks of large files: enough to notice another, a truncated or an exchanged file, in little time.

Every stretch of `SPACING` bytes of an array has one block of `BLOCK` bytes, so every array has at least one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

BLOCK, SPACING = 16 * 1024, 64 * 10**6  # bytes of a sample; bytes of an array per sample


def sample_offsets(name: str, start: int, stop: int) -> Iterator[int]:
    """Yields the offsets of the samples of an array: pseudorandom within each stretch, the same in every process.

    >>> list(sample_offsets("short", 0, BLOCK)), len(list(sample_offsets("long", 0, 3 * SPACING)))
    ([0], 3)

    Args:
        name: of the array; draws the offsets.
        start, stop: its byte range.
    """
    for first in range(start, stop, SPACING):
        free = max(min(first + SPACING, stop) - first - BLOCK, 0)
        draw = int.from_bytes(hashlib.sha256(f"{name} {first}".encode()).digest()[:8], "little")
        yield first + draw % (free + 1)
