"""Is every flipped bit and every cut file of a run folder noticed by `lorafusion verify`, and by `lorafusion resume`?

    python -m campaigns.damage RUN [FOLDER …] --flips 1000 --cuts 100 --out benchmarks/results/damage_cpu_DATE
    python -m campaigns.damage RUN --flips 0 --cuts 0 --resumes 50 --out benchmarks/results/damage_cpu_DATE

spoils one file after the other, in this process, and ends with 1 if anything was missed. RUN is a finished run, a
FOLDER that of an exported adapter. Of `--resumes` a copy of the run is spoilt and resumed: it is refused by a message
that names the file, or the newest adapters are what they were.
"""

from __future__ import annotations

import argparse
import collections
import io
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

from benchmarks.conditions import conditions
from benchmarks.csv_rows import write_rows
from lorafusion_jax.checkpoint.verify_folder import verify_folder
from lorafusion_jax.cli.main import run as lorafusion

HARMLESS = ("run.lock",)  # says who trains a run; the lock itself is the system's


class Attempt(NamedTuple):
    """One file with other content than was written."""

    file: Path
    what: str
    noticed: bool
    named: bool


def spoilt_files(folder: Path, flips: int, cuts: int, seed: int = 0) -> Iterator[tuple[Path, str]]:
    """Spoils one file after the other, each put back before the next; every file gets its share."""
    draw = random.Random(seed)
    files = [file for file in sorted(folder.rglob("*")) if _counts(file, folder)]
    draw.shuffle(files)
    for number in range(flips + cuts):
        file = files[number % len(files)]
        content = file.read_bytes()
        if number < flips:
            offset, bit = draw.randrange(len(content)), draw.randrange(8)
            spoilt, what = bytearray(content), f"bit {bit} of byte {offset}"
            spoilt[offset] ^= 1 << bit
        else:
            length = draw.randrange(len(content))
            spoilt, what = content[:length], f"cut to {length} of {len(content)} bytes"
        file.write_bytes(spoilt)
        try:
            yield file, what
        finally:
            file.write_bytes(content)


def attempts(folder: Path, flips: int, cuts: int, seed: int = 0) -> Iterator[Attempt]:
    """Looks for the damage of each spoilt file."""
    for file, what in spoilt_files(folder, flips, cuts, seed):
        damage = [text for verdict in verify_folder(folder) for text in verdict.damage]
        yield Attempt(file, what, bool(damage), any(file.name in text for text in damage))


def resumes(run: Path, count: int, work: Path) -> Iterator[tuple[Attempt, str]]:
    """Resumes a copy of a run with each of `count` spoilt files; what came of it, MISSED if it was silently another."""
    expected = newest_adapters(run)
    for file, what in spoilt_files(run, count - count // 5, count // 5, seed=1):
        copy, output = work / "run", io.StringIO()
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(run, copy, symlinks=True)
        try:
            with redirect_stdout(output), redirect_stderr(output):
                code = lorafusion(["resume", str(copy)])
        except Exception as problem:  # a traceback is what must not be
            yield Attempt(file, what, noticed=False, named=False), f"MISSED: {type(problem).__name__}: {problem}"
            continue
        same, named = newest_adapters(copy) == expected, file.name in output.getvalue()
        if code == 0 and same:
            result = "named, same adapters" if named else "same adapters"
        else:
            result = "refused by name" if code == 2 and named and "error[" in output.getvalue() else "MISSED"
        yield Attempt(file, what, named, named), result


def newest_adapters(run: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(run)): file.read_bytes()
        for file in run.glob("adapters/*/latest/adapter_model.safetensors")
    }


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
    parser.add_argument("--resumes", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if missing := [str(folder) for folder in arguments.folders if not folder.is_dir()]:
        parser.error(f"there is no folder {', '.join(missing)}")
    counts: collections.Counter[tuple[str, str, str, str]] = collections.Counter()
    for folder in arguments.folders if arguments.flips + arguments.cuts else ():
        kind = "run" if (folder / "plan.json").exists() else "exported adapter"
        for attempt in attempts(folder, arguments.flips, arguments.cuts):
            good = attempt.noticed and attempt.named
            result = "named" if good else "harmless" if harmless(attempt, folder) else "MISSED"
            part = attempt.file.relative_to(folder).parts[0] if kind == "run" else attempt.file.name
            counts[kind, part, "flip" if attempt.what.startswith("bit") else "cut", result] += 1
            if result == "MISSED":
                print(f"missed: {attempt.file}: {attempt.what}", flush=True)
    with tempfile.TemporaryDirectory() as work:
        for attempt, result in resumes(arguments.folders[0], arguments.resumes, Path(work)):
            part = attempt.file.relative_to(arguments.folders[0]).parts[0]
            counts["resumed run", part, "flip" if attempt.what.startswith("bit") else "cut", result] += 1
            print(f"{result}: {attempt.file}: {attempt.what}", flush=True)
    rows = [
        dict(zip(("folder", "file", "damage", "result"), key, strict=True)) | {"count": counts[key]}
        for key in sorted(counts)
    ]
    for row in rows:
        print(" ".join(f"{value!s:18}" for value in row.values()))
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        name = "damage.csv" if arguments.flips + arguments.cuts else "resumed.csv"
        write_rows(arguments.out / name, [row | conditions() for row in rows])
    return int(any(str(row["result"]).startswith("MISSED") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
