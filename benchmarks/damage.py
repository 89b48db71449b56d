"""Is every flipped bit and every cut file of a run folder noticed by `lorafusion verify`?

    python -m benchmarks.damage RUN [FOLDER …] --flips 1000 --cuts 100 --out benchmarks/results/damage_cpu_DATE

spoils one file after the other, in this process, and ends with 1 if anything was missed. A FOLDER is that of an
exported adapter.
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.conditions import conditions
from benchmarks.csv_rows import write_rows
from lorafusion_jax.checkpoint.verify_folder import verify_folder

HARMLESS = ("run.lock",)  # says who trains a run; the lock itself is the system's


class Attempt(NamedTuple):
    """One file with other content than was written."""

    file: Path
    what: str
    noticed: bool
    named: bool


def attempts(folder: Path, flips: int, cuts: int, seed: int = 0) -> Iterator[Attempt]:
    """Spoils one file after the other, each put back before the next; every file gets its share."""
    draw = random.Random(seed)
    files = [file for file in sorted(folder.rglob("*")) if _counts(file, folder)]
    draw.shuffle(files)
    for number in range(flips + cuts):
        file = files[number % len(files)]
        content = file.read_bytes()
        if number < flips:
            place, bit = draw.randrange(len(content)), draw.randrange(8)
            spoilt, what = bytearray(content), f"bit {bit} of byte {place}"
            spoilt[place] ^= 1 << bit
        else:
            length = draw.randrange(len(content))
            spoilt, what = content[:length], f"cut to {length} of {len(content)} bytes"
        file.write_bytes(spoilt)
        try:
            damage = [text for verdict in verify_folder(folder) for text in verdict.damage]
        finally:
            file.write_bytes(content)
        yield Attempt(file, what, bool(damage), any(file.name in text for text in damage))


def _counts(file: Path, folder: Path) -> bool:
    links = any(parent.is_symlink() for parent in file.relative_to(folder).parents if (folder / parent).is_symlink())
    return file.is_file() and not links and "latest" not in file.parts and file.stat().st_size > 0


def harmless(attempt: Attempt, folder: Path) -> bool:
    """Whether nothing depends on what was spoilt: run.lock, or events that lost whole rows from their end."""
    if attempt.file.name in HARMLESS:
        return True
    lines = attempt.file.read_bytes().splitlines(keepends=True) if attempt.file.name == "events.jsonl" else []
    ends = [sum(map(len, lines[:count])) for count in range(len(lines))]
    return any(attempt.what.startswith(f"cut to {end} of") for end in ends)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--cuts", type=int, default=100)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    counts: collections.Counter[tuple[str, str, str, str]] = collections.Counter()
    for folder in arguments.folders:
        kind = "run" if (folder / "plan.json").exists() else "exported adapter"
        for attempt in attempts(folder, arguments.flips, arguments.cuts):
            good = attempt.noticed and attempt.named
            result = "named" if good else "harmless" if harmless(attempt, folder) else "MISSED"
            part = attempt.file.relative_to(folder).parts[0] if kind == "run" else attempt.file.name
            counts[kind, part, "flip" if attempt.what.startswith("bit") else "cut", result] += 1
            if result == "MISSED":
                print(f"missed: {attempt.file}: {attempt.what}", flush=True)
    rows = [
        dict(zip(("folder", "file", "damage", "result"), key, strict=True)) | {"count": counts[key]}
        for key in sorted(counts)
    ]
    for row in rows:
        print(" ".join(f"{value!s:18}" for value in row.values()))
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        write_rows(arguments.out / "damage.csv", [row | conditions() for row in rows])
    return int(any(row["result"] == "MISSED" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
