"""Reads rows block by block that something gives again and again: a data set of a hub, or a source of a package."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator

from lorafusion_jax.data import row_blocks
from lorafusion_jax.data.rows import Rows
from lorafusion_jax.errors import DataError


def read_table(table: Iterable[dict]) -> tuple[list[dict] | None, str]:
    """Returns the rows, None if they are large, and their SHA-256 as one JSON list."""
    digest, size = hashlib.sha256(), 0
    rows: list[dict] | None = []
    for number, row in enumerate(table):
        size += _add(digest, number, row)
        if rows is not None and size <= row_blocks.BLOCK_BYTES:
            rows.append(row)
        else:
            rows = None
    digest.update(b"]" if size else b"[]")
    return rows, digest.hexdigest()


def table_blocks(name: str, table: Iterable[dict], expected: str | None = None) -> Iterator[Rows]:
    """Yields the rows of a large set.

    Args:
        expected: digest of the rows as they were read first.

    Raises:
        DataError: data.changed, after the last block.
    """
    digest, values = hashlib.sha256(), []
    first, size = 0, 0
    for number, row in enumerate(table):
        values.append(row)
        size += _add(digest, number, row)
        if size >= row_blocks.BLOCK_BYTES:
            yield Rows(source=name, values=values, first=first)
            first, size, values = first + len(values), 0, []
    if values:
        yield Rows(source=name, values=values, first=first)
    digest.update(b"]")
    if expected not in (None, digest.hexdigest()):
        raise DataError(
            "data.changed",
            f"{name} gave other rows when it was read again.",
            where=name,
            why="large sets are read twice, and a run that is resumed reads them again",
            fix="a source that always gives the same rows in the same order",
        )


def _add(digest, number: int, row: dict) -> int:
    """Adds a row to the digest. Returns the bytes of its text."""
    text = json.dumps(row, sort_keys=True, default=str).encode()
    digest.update((", " if number else "[").encode() + text)
    return len(text)
