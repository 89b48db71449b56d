"""Figures of docs/pages/reliability.md, from the newest rows of damage.py, kills.py and sick_adapters.py.

python -m benchmarks.reliability_table    # prints the table
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.kills_rows import is_good

RESULTS = Path(__file__).parent / "results"
_DATED = re.compile(r"\d{4}-\d{2}-\d{2}[a-z]?$")


def table() -> str:
    """The table in Markdown."""
    return "\n".join(["| what | attempts | result |", "|---|---|---|", *_damage(), *_kills(), *_sick()]) + "\n"


def _rows(name: str) -> list[dict[str, str]]:
    """All rows of the newest folder of a benchmark; none where it was never run."""
    folders = sorted(folder for folder in RESULTS.glob(f"{name}_cpu_*") if _DATED.search(folder.name))
    found: list[dict[str, str]] = []
    for file in sorted(folders[-1].glob("*.csv")) if folders else ():
        with file.open(encoding="utf-8") as stream:
            found += csv.DictReader(stream)
    return found


def _damage() -> Iterator[str]:
    counts: Counter[tuple[str, str, str]] = Counter()
    for row in _rows("damage"):
        counts[row["folder"], row["damage"], row["result"]] += int(row["count"])
    kinds = {"flip": "single-bit flips", "cut": "cut files"}
    for folder, damage in sorted({key[:2] for key in counts}, reverse=True):
        named, harmless, missed = (counts[folder, damage, result] for result in ("named", "harmless", "MISSED"))
        total = named + harmless + missed
        result = f"{named:,} named, {harmless} harmless, {missed} missed"
        yield f"| {kinds[damage]}, {folder} folder | {total:,} | {result} |"


def _kills() -> Iterator[str]:
    names = {
        "SIGKILL": "SIGKILL at random instants",
        "call": "SIGKILL before a rename, fsync, unlink, mkdir or link",
        "SIGTERM": "SIGTERM at random instants",
        "SIGINT": "SIGINT at random instants",
    }
    rows = _rows("kills")
    for kind, text in names.items():
        own = [row for row in rows if row["kind"] == kind and not _came_too_late(row)]
        if own:
            good = sum(is_good(row) for row in own)
            yield f"| {text} | {len(own):,} | {good:,} resumed bitwise, nothing left over |"


def _came_too_late(row: dict[str, str]) -> bool:
    """Whether the run had ended before it was killed."""
    return row["kind"] in ("SIGKILL", "call") and row["code"] == "0"


def _sick() -> Iterator[str]:
    counts = Counter((row["mesh"], row["others"]) for row in _rows("sick_adapters"))
    for mesh in sorted({mesh for mesh, _ in counts}):
        total = counts[mesh, "bitwise"] + counts[mesh, "DIFFER"]
        yield f"| one sick adapter of three, {mesh} | {total:,} | {counts[mesh, 'bitwise']:,} with the others bitwise |"


if __name__ == "__main__":
    print(table())
