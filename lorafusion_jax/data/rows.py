"""Rows of a source, with their places for messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorafusion_jax.errors import DataError, LoraFusionError, first_few
from lorafusion_jax.objective.protocol import CellType

FLAGS = {"true": True, "1": True, "false": False, "0": False}
SHOWN_TEXT = 40  # characters of a cell
SHOWN = 5  # rows that a message names before it counts the rest


class RowsError(DataError):
    """Some rows of a source cannot be used.

    Attributes:
        rows: their numbers, where they are rows at all.
        count: how many they are.
    """

    rows: tuple[int, ...] = ()
    count: int = 0


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A value of a table that Python cannot hold. Only a column that is used needs its values."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RawSource:
    """A source that is read and hashed but not parsed, which is enough for a cache lookup.

    Attributes:
        name: the source as the job file spells it.
        kind: jsonl, json, csv, parquet, hub or source.
        content: bytes of the file, or rows of a hub or a source; None for a large one, which is read in blocks.
        digest: SHA-256 of the content.
        path: of a file.
        table: a large data set of a hub or a source: it gives its rows again and again.
    """

    name: str
    kind: str
    content: bytes | list[dict] | None
    digest: str
    path: Path | None = None
    table: Iterable[dict] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of one source, or a block of them.

    Attributes:
        values: one dictionary per row.
        lines: line of each row, from 1 (JSONL only).
        numbers: number of each row in the source (None: all rows in order).
        problems: lines that are not rows. The parser of the good rows raises them together with its own errors.
        first: number of the first row in the source.
        untyped: every cell is a text (CSV); see `typed_row`.
    """

    source: str
    values: list[dict]
    lines: tuple[int, ...] | None = None
    problems: tuple[LoraFusionError, ...] = ()
    numbers: tuple[int, ...] | None = None
    first: int = 0
    untyped: bool = False

    def at(self, numbers: Sequence[int]) -> Rows:
        """Returns some rows, which keep their places; a row may occur several times."""
        return Rows(
            source=self.source,
            values=[self.values[number] for number in numbers],
            lines=None if self.lines is None else tuple(self.lines[number] for number in numbers),
            numbers=tuple(self.number(number) for number in numbers),
            untyped=self.untyped,
        )

    def locate(self, row: int) -> str:
        """Names the place of a row: `line 17` in JSONL, `row 16` elsewhere."""
        return f"line {self.lines[row]}" if self.lines is not None else f"row {self.number(row)}"

    def places(self, rows: Sequence[int]) -> str:
        """Names the first rows and counts the rest: `data.jsonl, lines 3, 5, 9, 12, 20 and 2 more`."""
        word = "line" if self.lines is not None else "row"
        numbers = [self.lines[row] if self.lines is not None else self.number(row) for row in rows]
        return f"{self.source}, {word}{'s' if len(rows) > 1 else ''} {first_few(numbers, SHOWN)}"

    def refuse(self, code: str, message: str, bad: Sequence[tuple[int, str]], *, fix: str) -> RowsError:
        """Returns an error about some rows: `bad` has their numbers, and why each is wrong."""
        row, why = bad[0]
        where = self.places([row for row, _ in bad])
        error = RowsError(code, message, where=where, why=f"{self.locate(row)}: {why}", fix=fix)
        error.rows, error.count = tuple(self.number(row) for row, _ in bad), len(bad)
        return error

    def types_of_texts(self, types: Mapping[str, CellType]) -> dict[str, CellType]:
        """Returns which columns' texts may hold something else: in a file with types, messages as JSON alone."""
        return {name: kind for name, kind in types.items() if self.untyped or kind == "messages"}

    def number(self, row: int) -> int:
        """Number of a row in the source."""
        return self.first + row if self.numbers is None else self.numbers[row]


def typed_row(row: Mapping[str, Any], types: Mapping[str, CellType]) -> dict[str, Any]:
    """Returns a row with the flags, numbers, lists and messages that the texts of some columns hold.

    Empty cells of flags, numbers and lists are absent.

    Raises:
        ValueError: a cell cannot be read so.

    >>> typed_row({"label": "True", "margin": "0.5", "note": "1"}, {"label": "flag", "margin": "number"})
    {'label': True, 'margin': 0.5, 'note': '1'}
    """
    return {
        key: _read_cell(key, value, types[key]) if key in types and isinstance(value, str) else value
        for key, value in row.items()
        if types.get(key, "messages") == "messages" or not isinstance(value, str) or value.strip()
    }


def _read_cell(name: str, text: str, kind: CellType) -> Any:
    if kind == "messages":
        return messages_or_text(text)
    try:
        if kind == "flag":
            return FLAGS[text.strip().lower()]
        if kind == "list" and text.strip().startswith("["):
            return json.loads(text)
        return int(text) if text.strip().lstrip("+-").isdigit() else float(text)
    except (KeyError, ValueError, RecursionError):
        expected = {"flag": "true or false", "number": "a number", "list": "a number or a JSON list of numbers"}[kind]
        raise ValueError(f"its {name} is {text[:SHOWN_TEXT]!r}, not {expected}") from None


def messages_or_text(text: str) -> list | str:
    """Returns the messages that a text holds as JSON, or the only one in a list; another text as it is."""
    try:
        value = json.loads(text) if text.lstrip()[:1] in ("[", "{") else None
    except (ValueError, RecursionError):
        return text
    messages = value if isinstance(value, list) else [value]
    keys = [item.keys() for item in messages if isinstance(item, dict)]
    if len(keys) < len(messages) or not all({"role", "from"} & of_one for of_one in keys):
        return text
    return messages if any({"content", "value", "tool_calls"} & of_one for of_one in keys) else text


def type_name(value: object) -> str:
    """Returns the name of a JSON value's type for messages."""
    if isinstance(value, Unreadable):
        return f"a value that cannot be read ({value.why})"
    names = {dict: "an object", list: "a list", str: "a text", int: "a number", float: "a number", bool: "true/false"}
    return names.get(type(value), "nothing" if value is None else type(value).__name__)
