"""Rows that `data.where` chooses. Adapters of one file share what was read of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path

from lorafusion_jax.config.data_sources import is_file
from lorafusion_jax.config.from_files import as_text
from lorafusion_jax.data.rows import RawSource, Rows
from lorafusion_jax.data.sources import open_source, row_blocks
from lorafusion_jax.errors import DataError, first_few

SHOWN = 5


class ChosenRows:
    """A source, and its rows by the values of some columns.

    Attributes:
        raw: the source.
    """

    def __init__(self, raw: RawSource, columns: tuple[str, ...]):
        self.raw, self._columns = raw, columns

    def of(self, where: Mapping[str, object]) -> Rows:
        """Returns the rows with these values.

        Raises:
            DataError: `data.where`, there are none.
        """
        values = tuple(str(as_text(where[column])) for column in self._columns)
        if values in self._by_values:
            return self._by_values[values]
        pairs = " and ".join(f"{column}: {value}" for column, value in zip(self._columns, values, strict=True))
        present = [", ".join(str(value) for value in other) for other in self._by_values]
        raise DataError(
            "data.where",
            f"no row of {self.raw.name} has {pairs}.",
            where=self.raw.name,
            why=f"there are {first_few(present, SHOWN)}" if present else f"no row has {' and '.join(self._columns)}",
            fix="data.where with values of the rows",
        )

    @cached_property
    def _by_values(self) -> dict[tuple[str, ...], Rows]:
        blocks = [*row_blocks(self.raw)]
        rows = _joined(blocks)
        numbers: dict[tuple[str, ...], list[int]] = {}
        for number, row in enumerate(rows.values):
            texts = [as_text(row.get(column)) for column in self._columns]
            if None not in texts:
                numbers.setdefault(tuple(map(str, texts)), []).append(number)
        return {
            texts: dataclasses.replace(rows.at(numbers_of), problems=rows.problems)
            for texts, numbers_of in numbers.items()
        }


def _joined(blocks: Sequence[Rows]) -> Rows:
    """Returns the rows of all blocks of a source."""
    lines = [line for block in blocks for line in block.lines or ()]
    return dataclasses.replace(
        blocks[0],
        values=[row for block in blocks for row in block.values],
        lines=tuple(lines) if blocks[0].lines is not None else None,
        problems=tuple(problem for block in blocks for problem in block.problems),
    )


def choose_rows(source: str, base_dir: Path, where: Mapping[str, object]) -> ChosenRows:
    """Opens a source whose rows are chosen. Raises what `open_source` does."""
    file, stamp = base_dir / source, ()
    if is_file(source) and file.is_file():
        stamp = (file.stat().st_size, file.stat().st_mtime_ns)
    return _open(source, base_dir, tuple(sorted(where)), stamp)


@lru_cache(maxsize=4)  # adapters of one file follow each other, and have held-out rows in another
def _open(source: str, base_dir: Path, columns: tuple[str, ...], stamp: tuple[int, ...]) -> ChosenRows:
    del stamp  # a file that was written again is read again
    return ChosenRows(open_source(source, base_dir), columns)
