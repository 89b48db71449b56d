"""A figure of a document: a text whose numbers are computed from rows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.csv_rows import read_rows

Row = dict[str, Any]
RESULTS = Path(__file__).parent / "results"
NUMBER = r"\d(?:[\d. ]*\d)?(?:e-\d+)?"


class Figure(NamedTuple):
    """A text of a document whose numbers come from rows.

    Args:
        document: path in the repository.
        text: as in the document, but for line breaks; `{}` stands for a number.
        values: the numbers, as they are shown.
    """

    document: str
    text: str
    values: Callable[[], Iterable[str]]


@cache
def rows(name: str) -> list[Row]:
    """The rows of a file of results, JSON lines or CSV."""
    file = RESULTS / name
    if file.suffix == ".csv":
        return read_rows(file)
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def pick(file: str, /, **fields: Any) -> Row:
    """The only row with these fields."""
    (row,) = (row for row in rows(file) if all(row.get(key) == value for key, value in fields.items()))
    return row


def pattern(figure: Figure) -> re.Pattern[str]:
    """Finds the text, with a group for each number, whatever its line breaks."""
    return re.compile(r"\s+".join(f"({NUMBER})".join(map(re.escape, word.split("{}"))) for word in figure.text.split()))


def replaced(match: re.Match[str], values: tuple[str, ...]) -> str:
    """Returns the matched text with other numbers."""
    shown, at = [], match.start()
    for number, value in enumerate(values, 1):
        shown += [match.string[at : match.start(number)], value]
        at = match.end(number)
    return "".join([*shown, match.string[at : match.end()]])


def of(values: Callable[..., list[str]], *given: Any, **named: Any) -> Callable[[], list[str]]:
    return lambda: values(*given, **named)
