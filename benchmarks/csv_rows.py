"""Rows of a benchmark as CSV, whole or one by one as they come."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


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
