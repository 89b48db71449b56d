"""What scripts of rows share: their command line, a row as soon as it is there, and a limit of time."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any


def command_line(description: str | None) -> argparse.ArgumentParser:
    """A parser of the folder of the rows, `--out`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the rows")
    return parser


def add_row(file: Path, row: Mapping[str, Any]) -> None:
    """Prints a row and appends it to a file, so that a run that is cut short loses nothing; makes the file's folder."""
    line = json.dumps(row)
    print(line, flush=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as stream:
        stream.write(line + "\n")


def write_within_budget(
    name: str, description: str, budget_s: float, make_rows: Callable[[bool], Iterator[dict[str, Any]]]
) -> int:
    """Adds rows to OUT/NAME.jsonl; nothing new starts after the budget.

    Args:
        make_rows: rows, of tiny shapes if its argument is True.
    """
    parser = command_line(description)
    parser.add_argument("--budget", type=float, default=budget_s, help="seconds; nothing new starts after them")
    parser.add_argument("--small", action="store_true", help="tiny shapes, for a CPU")
    args = parser.parse_args()
    stop = time.monotonic() + args.budget
    for row in make_rows(args.small):
        add_row(args.out / f"{name}.jsonl", row)
        if time.monotonic() > stop:
            break
    return 0
