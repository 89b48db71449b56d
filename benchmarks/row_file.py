"""The command line of scripts that make rows one after another within a budget of time."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def write_within_budget(
    name: str, description: str, budget_s: float, make_rows: Callable[[bool], Iterator[dict[str, Any]]]
) -> int:
    """Appends rows to OUT/NAME.jsonl and prints them; nothing new starts after the budget.

    Args:
        make_rows: rows, of tiny shapes if its argument is True.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=budget_s, help="seconds; nothing new starts after them")
    parser.add_argument("--small", action="store_true", help="tiny shapes, for a CPU")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    stop = time.monotonic() + args.budget
    with (args.out / f"{name}.jsonl").open("a") as file:
        for row in make_rows(args.small):
            line = json.dumps(row)
            print(line, flush=True)
            file.write(line + "\n")
            file.flush()
            if time.monotonic() > stop:
                break
    return 0
