"""Reads the rows of a data set of a hub block by block: the set itself maps its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator

from lorafusion_jax.data import row_blocks
from lorafusion_jax.data.row_files import without_nulls
from lorafusion_jax.data.rows import Rows


def read_table(table: Iterable[dict]) -> tuple[list[dict] | None, str]:
    """Returns the rows, None if they are large, and their SHA-256 as one JSON list."""
    digest, size = hashlib.sha256(), 0
    kept: list[dict] | None = []
    for number, row in enumerate(map(without_nulls, table)):
        text = _text(row)
        digest.update((", " if number else "[").encode() + text)
        size += len(text)
        if kept is not None and size <= row_blocks.BLOCK_BYTES:
            kept.append(row)
        else:
            kept = None
    digest.update(b"]" if size else b"[]")
    return kept, digest.hexdigest()


def table_blocks(name: str, table: Iterable[dict]) -> Iterator[Rows]:
    """Yields the rows of a large set."""
    values: list[dict] = []
    first, size = 0, 0
    for row in map(without_nulls, table):
        values.append(row)
        size += len(_text(row))
        if size >= row_blocks.BLOCK_BYTES:
            yield Rows(source=name, values=values, first=first)
            first, size, values = first + len(values), 0, []
    if values:
        yield Rows(source=name, values=values, first=first)


def _text(row: dict) -> bytes:
    return json.dumps(row, sort_keys=True, default=str).encode()
