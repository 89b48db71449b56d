"""Does every run that is killed resume bitwise, wherever it was killed?

    python -m benchmarks.kills --work FOLDER --out benchmarks/results/kills_cpu_DATE --random 200 --calls --signals 200

trains a small job once without disturbance, then again and again: killed at random instants (`--random`), just before
each rename, fsync, unlink and their like of a whole run (`--calls`), or asked to stop by SIGTERM or SIGINT
(`--signals`). Each is resumed to its end and compared: exported weights and all losses bitwise, no hidden file left.
Processes are forked from one that has imported everything and has not started a device. A row is written after every
attempt.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint  # noqa: F401  imported here once for all attempts

import lorafusion_jax.training  # noqa: F401
from benchmarks.conditions import conditions
from benchmarks.csv_rows import append_row
from benchmarks.kills_rows import is_good
from lorafusion_jax.cli.main import run as lorafusion
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.signals import stop_signals

CALLS = ("rename", "replace", "fsync", "unlink", "remove", "rmdir", "mkdir", "symlink", "link")
INSTANTS = 0.8  # of the time of a whole run: later ones mostly come after the end
TRIES = 6  # resumes that one attempt may take
ACKNOWLEDGED = ("a second signal stops at once", "interrupted", "stopped")  # the last two: it had ended before


def write_job(folder: Path) -> Path:
    """Two adapters of the tiny base of the examples, a few steps each, a checkpoint after every second one."""
    from lorafusion_jax.examples import examples_directory

    examples = examples_directory()
    adapters = [
        {"name": name, "data": {"train": str(examples / "data" / f"{name}.jsonl")}, "seed": seed}
        for seed, name in enumerate(("ask", "cards"))
    ]
    job = {
        "base": {"model": str(examples / "base"), "dtype": "float32"},
        "data": {"max_length": 64},
        "batch": {"capacity_tokens": 256, "tile_tokens": 32, "global_samples": 2},
        "lora": {"rank": 4, "targets": ["q_proj", "down_proj"]},
        "train": {"max_steps": 4, "plan_seconds": 0.1, "log_every_s": 0},
        "save": {"every_steps": 2},
        "adapters": adapters,
    }
    path = folder / "jobs.yaml"
    path.write_text(json.dumps(job))
    return path


class Child:
    """A forked process that runs one command."""

    def __init__(self, log: Path, work: Callable[[], int]):
        self.log = log
        self.began = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(stream, 1)
                os.dup2(stream, 2)
                code = work()
            finally:
                sys.stdout.flush()
                os._exit(code)

    def wait(self, limit_s: float = 600) -> int:
        """Exit code; a signal's number is negative."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        return -1000  # hung


def command(*arguments: str) -> int:
    """The command line in a process of its own."""
    with stop_signals() as signals:
        signals.watch()
        code = lorafusion(list(arguments))
        signals.ending = True
        return code


def train_or_resume(job: Path, run: Path) -> list[str]:
    return ["resume", str(run)] if (run / "plan.json").exists() else ["train", str(job), "--out", str(run)]


def dying_at(call: int, work: Callable[[], int], count: Path | None = None) -> Callable[[], int]:
    """The same work in a process that is killed just before one of its calls that change a folder."""

    def wrapped() -> int:
        seen = 0

        def watch(name: str) -> Any:
            original = getattr(os, name)

            def called(*arguments: Any, **named: Any) -> Any:
                nonlocal seen
                seen += 1
                if seen == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*arguments, **named)

            return called

        for name in CALLS:
            setattr(os, name, watch(name))
        code = work()
        if count is not None:
            count.write_text(str(seen))
        return code

    return wrapped


def outcome(run: Path) -> tuple[dict[str, bytes], list[tuple]]:
    """All that a run comes to: weights of every exported folder and losses of every step."""
    weights = {
        str(file.relative_to(run)): file.read_bytes() for file in sorted(run.glob("adapters/*/step-*/*.safetensors"))
    }
    rows = [row for row in read_rows(run / "metrics.jsonl") if row["kind"] == "step"]
    return weights, sorted((row["adapter"], row["step"], row["loss"], row["grad_norm"]) for row in rows)


def leftovers(run: Path) -> list[str]:
    return [str(path.relative_to(run)) for path in run.rglob(".*")]


class Bench:
    """The reference run and what attempts are compared with."""

    def __init__(self, work: Path, out: Path):
        self.work, self.file = work, out / "kills.csv"
        work.mkdir(parents=True, exist_ok=True)
        out.mkdir(parents=True, exist_ok=True)
        self.job = write_job(work)
        whole, count = work / "whole", work / "calls"
        shutil.rmtree(whole, ignore_errors=True)
        first = Child(work / "whole.log", lambda: command("train", str(self.job), "--out", str(whole)))
        assert first.wait() == 0, first.log.read_text()[-2000:]
        shutil.rmtree(whole)  # once more, now that its programs are compiled
        again = Child(
            work / "whole.log",
            dying_at(0, lambda: command("train", str(self.job), "--out", str(whole)), count),
        )
        assert again.wait() == 0
        self.seconds, self.calls = time.monotonic() - again.began, int(count.read_text())
        self.reference = outcome(whole)
        print(f"one run: {self.seconds:.1f} s, {self.calls} calls", flush=True)

    def attempt(self, kind: str, instant: float, begin: Callable[[Path, Path], Child]) -> dict[str, Any]:
        """One disturbed run, resumed to its end."""
        run, log = self.work / "run", self.work / "run.log"
        shutil.rmtree(run, ignore_errors=True)
        child = begin(run, log)
        code, text, ends = child.wait(), log.read_text(errors="replace"), []
        while len(ends) < TRIES and (not ends or ends[-1] != 0):
            ends.append(Child(self.work / "resume.log", lambda: command(*train_or_resume(self.job, run))).wait())
        row = {
            "kind": kind,
            "instant": round(instant, 3),
            "code": code,
            "acknowledged": any(said in text for said in ACKNOWLEDGED),
            "traceback": "Traceback" in text or "Traceback" in (self.work / "resume.log").read_text(errors="replace"),
            "resumed": ends[-1],
            "bitwise": outcome(run) == self.reference,
            "leftovers": " ".join(leftovers(run)),
        }
        append_row(self.file, row)
        print(row, flush=True)
        return row

    def random_kills(self, count: int, draw: random.Random, numbers: dict[str, int]) -> Iterator[dict[str, Any]]:
        """Signals at instants between the start and the end of a whole run."""
        for number in range(count):
            kind = list(numbers)[number % len(numbers)]
            instant = draw.uniform(0, INSTANTS * self.seconds)

            def begin(run: Path, log: Path, kind: str = kind, instant: float = instant) -> Child:
                child = Child(log, lambda: command("train", str(self.job), "--out", str(run)))
                time.sleep(max(0.0, child.began + instant - time.monotonic()))
                os.kill(child.pid, numbers[kind])
                return child

            yield self.attempt(kind, instant, begin)

    def call_kills(self, calls: list[int]) -> Iterator[dict[str, Any]]:
        """Kills just before each of these calls."""
        for call in calls:

            def begin(run: Path, log: Path, call: int = call) -> Child:
                return Child(log, dying_at(call, lambda: command("train", str(self.job), "--out", str(run))))

            yield self.attempt("call", call, begin)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for runs; they are removed")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--signals", type=int, default=0)
    parser.add_argument("--calls", type=int, nargs="?", const=10**9, default=0, help="at most so many, evenly spread")
    parser.add_argument("--limit-s", type=float, default=10**9)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", str(arguments.work / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    end = time.monotonic() + arguments.limit_s
    bench, draw = Bench(arguments.work, arguments.out), random.Random(arguments.seed)
    every = max(1, -(-bench.calls // arguments.calls)) if arguments.calls else 1
    kinds = [
        bench.random_kills(arguments.random, draw, {"SIGKILL": signal.SIGKILL}),
        bench.random_kills(arguments.signals, draw, {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}),
        bench.call_kills(list(range(1, bench.calls + 1, every)) if arguments.calls else []),
    ]
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
