"""Does every run that is killed resume bitwise, wherever it was killed?

    python -m campaigns.kills --work FOLDER --out benchmarks/results/kills_cpu_DATE

trains a tiny job once without disturbance, then again and again: killed at random instants (`--random`), asked to stop
by SIGTERM or SIGINT (`--signals`), or killed just before each rename, fsync, unlink and their like of a whole run
(`--calls`). Each is resumed to its end and compared: exported weights and all losses bitwise, no hidden file left.
`--calls` counts calls of all libraries: a C compiler builds disk_calls.c for it, and this process starts anew with it.

Processes are forked from one that has imported everything and has not started a device. A row is written after every
attempt, and attempts that have a row are not made again: a cut script goes on where it was.
"""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint  # noqa: F401  imported here once for all attempts
from campaigns import tiny_run
from campaigns.disk_calls import preload, watched
from campaigns.forked import Child
from campaigns.reliability_table import is_good

import lorafusion_jax.training  # noqa: F401
from benchmarks.conditions import conditions
from benchmarks.csv_rows import append_row
from lorafusion_jax.cli.main import run as lorafusion
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.signals import FIRST, FIRST_WHILE_TRAINING

LATEST = 1.1  # random instants come up to so much later than a whole run takes; those after its end are drawn again
TRIES = 6  # resumes that one attempt may take
NAMES = ("ask", "cards")
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def killed_at_call(call: int, work: Callable[[], int], count: Path | None = None) -> Callable[[], int]:
    """The same work in a process that is killed just before one of its calls that change a folder; 0: not at all."""

    def wrapped() -> int:
        with watched("", at=call) as seen:
            code = work()
        if count is not None:
            count.write_text(str(len(seen.calls)))
        return code

    return wrapped


def outcome(run: Path) -> tuple[dict[str, bytes], list[tuple]]:
    """All that a run comes to: weights of every exported folder, links to the newest, and losses of every step."""
    weights = {
        str(file.relative_to(run)): file.read_bytes() for file in sorted(run.glob("adapters/*/step-*/*.safetensors"))
    }
    weights |= {str(link.relative_to(run)): os.readlink(link).encode() for link in run.glob("adapters/*/latest")}
    rows = [row for row in read_rows(run / "metrics.jsonl") if row["kind"] == "step"]
    return weights, sorted((row["adapter"], row["step"], row["loss"], row["grad_norm"]) for row in rows)


def leftovers(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob(".*")]


class Bench:
    """The reference run and what attempts are compared with."""

    def __init__(self, work: Path, out: Path):
        self.work, self.file = work.resolve(), out / "kills.csv"
        self.made: Counter[str] = Counter()
        if self.file.exists():
            with self.file.open(encoding="utf-8") as stream:
                self.made.update(row["kind"] for row in csv.DictReader(stream))
        self.job = self._write_job()
        self.whole = self.work / "whole"
        for _ in range(2):  # the second time its programs are compiled
            shutil.rmtree(self.whole, ignore_errors=True)
            began = time.monotonic()
            self._run_to_end(lambda: lorafusion(["train", str(self.job), "--out", str(self.whole)]))
            self.seconds = time.monotonic() - began
        self.reference = outcome(self.whole)
        print(f"one run: {self.seconds:.1f} s", flush=True)

    def random_kills(self, kind: str, number: signal.Signals, count: int) -> Iterator[dict[str, Any]]:
        """A signal at instants between the start and the end of a whole run."""
        for attempt in range(self.made[kind], count):
            draw = random.Random(f"{kind} {attempt}")
            acknowledged_s = None
            while True:
                run, instant = self._new_run(), draw.uniform(0, LATEST * self.seconds)
                child = Child(run.with_suffix(".log"), lambda run=run: lorafusion(self._train(run)))
                time.sleep(max(0.0, child.began + instant - time.monotonic()))
                if not child.has_ended():
                    break
                child.wait()
            os.kill(child.pid, number)
            if number in SIGNALS:
                acknowledged_s = child.wait_for(FIRST, FIRST_WHILE_TRAINING)
            yield self._resume(kind, instant, run, child, acknowledged_s)

    def call_kills(self, share: int) -> Iterator[dict[str, Any]]:
        """Kills just before each call of a whole run, or each n-th."""
        run = self._new_run()
        calls = self._count(lambda: lorafusion(self._train(run)))
        for call in range(1 + share * self.made["call"], calls + 1, share):
            run = self._new_run()
            child = Child(run.with_suffix(".log"), killed_at_call(call, lambda run=run: lorafusion(self._train(run))))
            yield self._resume("call", call, run, child, None)

    def _resume(
        self, kind: str, instant: float, run: Path, child: Child, acknowledged_s: float | None
    ) -> dict[str, Any]:
        """Resumes a disturbed run to its end and compares it."""
        code, log = child.wait(), run.with_suffix(".resumed")
        saves, text, ends = len(list(run.glob("state/[0-9]*"))), child.log.read_text(errors="replace"), []
        while len(ends) < TRIES and (not ends or ends[-1] != 0):
            resume = ["resume", str(run)] if (run / "plan.json").exists() else self._train(run)
            ends.append(Child(log, lambda resume=resume: lorafusion(resume)).wait())
            text += log.read_text(errors="replace")
        return self._row(
            kind,
            instant=round(instant, 3),
            code=code,
            acknowledged_s="" if acknowledged_s is None else acknowledged_s,
            saves=saves,
            traceback="Traceback" in text,
            resumed=ends[-1],
            bitwise=outcome(run) == self.reference,
            leftovers=" ".join(leftovers(run)),
        )

    def _row(self, kind: str, **values: Any) -> dict[str, Any]:
        row = {"kind": kind, **values}
        append_row(self.file, row)
        print(row, flush=True)
        return row

    def _count(self, work: Callable[[], int]) -> int:
        count = self.work / "calls"
        self._run_to_end(killed_at_call(0, work, count))
        return int(count.read_text())

    def _run_to_end(self, work: Callable[[], int]) -> None:
        child = Child(self.work / "whole.log", work)
        if child.wait() != 0:
            raise RuntimeError(child.log.read_text(errors="replace")[-2000:])

    def _new_run(self) -> Path:
        run = self.work / "run"
        shutil.rmtree(run, ignore_errors=True)
        return run

    def _train(self, run: Path) -> list[str]:
        return ["train", str(self.job), "--out", str(run)]

    def _write_job(self) -> Path:
        """Two adapters, four steps each, three checkpoints of which one is kept."""
        base = self.work / "base"
        if not base.exists():
            self._run_to_end(lambda: int(not tiny_run.write_base(base)))
        adapters = [
            {"name": name, "data": {"train": tiny_run.write_rows(self.work, name)}, "seed": seed}
            for seed, name in enumerate(NAMES)
        ]
        lora = {"rank": 4, "dropout": 0.1, "targets": ["down_proj"]}
        return tiny_run.write_job(self.work, base, adapters, lora=lora, save={"every_steps": 3, "keep": 1})


def main() -> int:
    parser = tiny_run.arguments_of_a_run(__doc__, work="folder for runs; they are removed")
    parser.add_argument("--random", type=int, default=200)
    parser.add_argument("--signals", type=int, default=200)
    parser.add_argument("--calls", type=int, default=1, metavar="N", help="before every n-th call of a run; 0: none")
    parser.add_argument("--limit-s", type=float, default=10**9)
    arguments = parser.parse_args()
    if arguments.calls:
        preload(arguments.work.resolve() / "disk_calls.so", "campaigns.kills")
    for folder in (arguments.work, arguments.out):
        folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(arguments.work / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    end, bench = time.monotonic() + arguments.limit_s, Bench(arguments.work, arguments.out)
    kinds = [bench.random_kills("SIGKILL", signal.SIGKILL, arguments.random)]
    kinds += [bench.random_kills(number.name, number, arguments.signals // 2) for number in SIGNALS]
    kinds += [bench.call_kills(arguments.calls)] if arguments.calls else []
    rows: list[dict[str, Any]] = []
    while kinds and time.monotonic() < end:  # in turn, so that a limit of time leaves some of each
        kind = kinds.pop(0)
        row = next(kind, None)
        if row is not None:
            rows.append(row)
            kinds.append(kind)
    bad = [row for row in rows if not is_good(row)]
    print(f"{len(rows)} attempts, {len(bad)} bad")
    # Only now: it starts a device, and a process with one cannot be forked.
    (arguments.out / "conditions.json").write_text(json.dumps(conditions(), indent=1) + "\n", encoding="utf-8")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
