"""Plants small faults one by one and runs the nearest tests: which faults does no test notice?

    python -m benchmarks.mutants                      # all of benchmarks/data/mutants.csv
    python -m benchmarks.mutants --processes 16       # as many at a time
    python -m benchmarks.mutants --only bounds --seconds 600
    python -m benchmarks.mutants --out FOLDER         # those that FOLDER/mutants.csv does not have; it keeps its rows

Works on copies of the repository. Libraries are imported once, and each mutant runs in a fork, so it costs little more
than its tests. Before its first mutant a file of tests has to pass. Rows name the commit that was tried. Exits with 1
if a mutant survives without a reason or the code no longer holds its text.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.csv_rows import append_row
from benchmarks.measured_code import code, commit

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "benchmarks" / "data" / "mutants.csv"
COPIED = (
    "scheduling", "pallas_kernels", "lorafusion_jax", "tests", "benchmarks", "examples", "docs",
)  # fmt: skip
LIBRARIES = ("numpy", "hypothesis", "pytest", "jax", "flax", "optax", "chex", "pydantic", "yaml", "safetensors")
LIMIT_S = 600.0  # of one mutant; a test that never ends has noticed it
SKIPPED = shutil.ignore_patterns("__pycache__", "results", "tables")


class Mutant(NamedTuple):
    """A small fault: a change of one place of the code.

    Args:
        file: path in the repository.
        old, new: text, which the file holds once, and what takes its place.
        tests: file that must fail.
        equivalent: why no test can or should fail; empty if one must.
    """

    file: str
    old: str
    new: str
    tests: str
    equivalent: str = ""


def read_mutants() -> list[Mutant]:
    with TABLE.open(newline="", encoding="utf-8") as stream:
        return [Mutant(**row) for row in csv.DictReader(stream)]


def main() -> int:
    options = arguments()
    file = None if options.out is None else options.out / "mutants.csv"
    chosen = [mutant for mutant in read_mutants() if options.only in mutant.file + mutant.old]
    chosen = [mutant for mutant in chosen if (mutant.file, mutant.old, mutant.new) not in tried_before(file)]
    if options.sample is not None:
        chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for library in LIBRARIES:
        __import__(library)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
    state = {"commit": commit() or " ".join(code().values()), "date": datetime.now(UTC).date().isoformat()}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in try_all(chosen, Path(folder), options.processes, time.monotonic() + options.seconds):
            rows.append(row | state)
            if file is not None:
                append_row(file, rows[-1])
            old, new = row["old"].strip()[:60], row["new"].strip()[:40]
            print(f"{row['result']:9} {row['file']}: {old!r} → {new!r}", flush=True)
    counts = Counter(row["result"] for row in rows)
    print(f"{len(rows)} of {len(chosen)} tried: " + ", ".join(f"{number} {what}" for what, number in counts.items()))
    return int(any(row["result"] in ("survived", "gone", "broken") for row in rows))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutants whose file or text contains this")
    parser.add_argument("--sample", type=int, help="so many of them, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further mutant after that")
    parser.add_argument("--processes", type=int, default=1, help="mutants at a time")
    parser.add_argument("--out", type=Path, help="folder for mutants.csv")
    return parser.parse_args()


def try_all(chosen: Sequence[Mutant], folder: Path, processes: int, end: float) -> Iterator[dict[str, Any]]:
    """Yields the row of each mutant as it is known. A file of tests runs without a mutant first."""
    waiting: dict[str, list[Mutant]] = {}
    for mutant in chosen:
        waiting.setdefault(mutant.tests, []).append(mutant)
    workers = min(processes, len(chosen)) or 1
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        checks: dict[Future, str] = {pool.submit(passes, tests, folder, end): tests for tests in waiting}
        pending: set[Future] = set(checks)
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                if future in checks:
                    passed = future.result()
                    pending |= {pool.submit(tried, mutant, folder, passed, end) for mutant in waiting[checks[future]]}
                elif (row := future.result()) is not None:
                    yield row


@cache
def copied(folder: Path) -> Path:
    """Copies the repository, once for each process."""
    copy = folder / str(os.getpid())
    for name in COPIED:
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, copy / name, ignore=SKIPPED)
    shutil.copyfile(ROOT / "pyproject.toml", copy / "pyproject.toml")
    (copy / "benchmarks" / "results").symlink_to(ROOT / "benchmarks" / "results")  # tests read published rows
    return copy


def tried(mutant: Mutant, folder: Path, passed: bool, end: float) -> dict[str, Any] | None:
    """Returns the row of a mutant, or None if the time is over."""
    began = time.monotonic()
    if began > end:
        return None
    result = result_of(mutant, copied(folder), passed)
    return {"result": result, **mutant._asdict(), "seconds": round(time.monotonic() - began, 1)}


def result_of(mutant: Mutant, copy: Path, passed: bool) -> str:
    """Returns killed, survived, equivalent (survives, for a reason), gone, or broken (its tests fail without it)."""
    file = copy / mutant.file
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    if text.count(mutant.old) != 1 or not (copy / mutant.tests).exists():
        return "gone"
    if not passed:
        return "broken"
    file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        if fails(mutant.tests, copy):
            return "killed"
        return "equivalent" if mutant.equivalent else "survived"
    finally:
        file.write_text(text, encoding="utf-8")


def passes(tests: str, folder: Path, end: float) -> bool:
    """Whether the tests pass on the code as it is."""
    return time.monotonic() > end or not fails(tests, copied(folder))


def fails(tests: str, copy: Path) -> bool:
    """Runs a file of tests in a fork; True if one fails, or if they do not end."""
    child = os.fork()
    if child == 0:
        result = 99
        try:
            os.setsid()
            result = run(tests, copy)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(result)
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) != 0
        time.sleep(0.1)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def run(tests: str, copy: Path) -> int:
    """The copy's packages come before those of this checkout; no byte code outlives a mutant."""
    import pytest

    log = os.open(copy / "last.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for name in [name for name in sys.modules if name.partition(".")[0] in COPIED]:
        del sys.modules[name]
    os.chdir(copy)
    sys.path[:] = [str(copy), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
    sys.dont_write_bytecode = True
    loaded = "ignore::pytest.PytestAssertRewriteWarning"  # libraries are imported before pytest starts
    folder = f"--basetemp={copy / 'tmp'}"
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-W", loaded, folder, tests]))


def tried_before(file: Path | None) -> set[tuple[str, str, str]]:
    """File, text and change of each mutant that has a row."""
    if file is None or not file.exists():
        return set()
    with file.open(newline="", encoding="utf-8") as stream:
        return {(row["file"], row["old"], row["new"]) for row in csv.DictReader(stream)}


if __name__ == "__main__":
    sys.exit(main())
