"""Rows of a benchmark: CSV, whole or one by one as they come; files of results; and tables in Markdown."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

Row = dict[str, Any]
RESULTS = Path(__file__).parent / "results"


def write_rows(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes all rows, under the keys of the first."""
    with file.open("w", newline="", encoding="utf-8") as stream:
        table = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def append_row(file: Path, row: Mapping[str, Any]) -> None:
    """Writes one more row: a run that is cut short loses nothing."""
    new = not file.exists()
    with file.open("a", newline="", encoding="utf-8") as stream:
        table = csv.DictWriter(stream, list(row), lineterminator="\n")
        if new:
            table.writeheader()
        table.writerow(row)


def read_rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


@cache
def rows(name: str) -> list[Row]:
    """The rows of a file of results, JSON lines or CSV."""
    file = RESULTS / name
    if file.suffix == ".csv":
        return read_rows(file)
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
