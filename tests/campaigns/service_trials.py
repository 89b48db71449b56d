"""Pairs of jobs that a service trains together again and again while something strikes it, in shards side by side."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from campaigns.service_process import Server, orphans_of, specs
from campaigns.tiny_run import write_base
from safetensors.numpy import load_file

from benchmarks.csv_rows import append_row
from benchmarks.measured_code import write_measured
from lorafusion_jax.serve.client import Client, Job, ServiceError

type Jobs = list[tuple[str, str]]  # owner and id of each
type Strike = Callable[[Jobs, Counter[str]], str | None]  # what was hit, of what is left to do; None: nothing

LEASE_S = 4.0
EPOCHS = 60
FAULTS = ("losses", "doubles")
SWEEP_S = 30.0  # for files that are put aside, and for workers that end
SLACK_S = 45.0  # before the end: no more jobs are started


def add_options(parser: argparse.ArgumentParser, *, seconds: float, cores: str) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="folder of the services (default: a temporary one)")
    parser.add_argument("--shards", type=int, default=1, help=f"side by side; each takes about {cores}")
    parser.add_argument("--seconds", type=float, default=seconds)
    parser.add_argument("--shard", type=int, help="run this one only")


def run_shards(script: str, options: argparse.Namespace, run_shard: Callable[[argparse.Namespace], int]) -> int:
    """Runs the shard that is asked for, or each in a process of its own. Returns the exit code."""
    write_measured(options.out)
    if options.shard is not None:
        return run_shard(options)
    if options.work is None:
        options.work = Path(tempfile.mkdtemp(prefix="service-"))
    if not (options.work / "base").exists():
        write_base(options.work / "base")
    arguments = [sys.executable, "-m", f"campaigns.{script}", *sys.argv[1:], "--work", str(options.work)]
    shards = [subprocess.Popen([*arguments, "--shard", str(number)]) for number in range(options.shards)]
    failed = sum(shard.wait() != 0 for shard in shards)
    print(f"{options.shards - failed} of {options.shards} shards without a failure", flush=True)
    return int(bool(failed))


def train_while_struck(
    server: Server, options: argparse.Namespace, work: Path, todo: Counter[str], strike: Strike
) -> int:
    """Trains two jobs alone, and then together until nothing is left to do. Returns the exit code.

    Writes a row after each pair: what was hit, and whether both adapters are those of the undisturbed jobs.

    Args:
        todo: how often to hit each kind.
    """
    until, kinds = time.monotonic() + options.seconds, list(todo)
    file, hits, faults = options.out / f"shard-{options.shard:02}.csv", Counter[str](), Counter[str]()
    server.start()
    try:
        asked = list(specs(work, 2, epochs=EPOCHS))
        alone = []
        for number, (owner, spec) in enumerate(asked):
            job = Client(server.url, server.keys[owner]).submit(spec).wait(options.seconds, every_s=0.1)
            alone.append(load_file(job.adapter(work / f"alone-{number}") / "adapter_model.safetensors"))
        while todo.total() and time.monotonic() < until - SLACK_S:
            made = Counter[str]()
            jobs = [(owner, Client(server.url, server.keys[owner]).submit(spec).id) for owner, spec in asked]
            while any(state_of(server, *job) not in ("done", "failed") for job in jobs):
                if todo.total() and time.monotonic() < until - SLACK_S and (kind := strike(jobs, todo)) is not None:
                    made[kind] += 1
                    todo[kind] -= 1
                time.sleep(0.1)
            by_job = [faults_of(server, *job, weights, work) for job, weights in zip(jobs, alone, strict=True)]
            same = [not names for names in by_job]
            hits, faults = hits + made, faults + Counter(name for names in by_job for name in names)
            tries = sum(Job(Client(server.url, server.keys[owner]), job).show()["tries"] for owner, job in jobs)
            row = {"shard": options.shard, **{kind: made[kind] for kind in kinds}, "tries": tries}
            append_row(file, row | {"adapters": len(same), "same": sum(same)})
            print(row | {"same": sum(same), "of": len(same)}, flush=True)
        time.sleep(SWEEP_S)
    finally:
        with suppress(ProcessLookupError):
            server.end(signal.SIGTERM)
    deadline = time.monotonic() + SWEEP_S  # workers save and end
    while (orphans := orphans_of(server)) and time.monotonic() < deadline:
        time.sleep(0.1)
    counts = {name: faults[name] for name in FAULTS} | {"orphans": len(orphans)}
    print(f"shard {options.shard}: {dict(hits)}, {todo.total()} left, {counts} {orphans}", flush=True)
    append_row(options.out / "shards.csv", {"shard": options.shard, **{kind: hits[kind] for kind in kinds}, **counts})
    return int(any(counts.values()) or todo.total() > 0)


def share(count: int, options: argparse.Namespace) -> int:
    """Returns how many of all hits are a shard's."""
    return count // options.shards + (options.shard < count % options.shards)


def state_of(server: Server, owner: str, job: str) -> str:
    try:
        return Job(Client(server.url, server.keys[owner]), job).show()["state"]
    except (ServiceError, OSError):
        return "away"


def faults_of(server: Server, owner: str, name: str, weights: dict, work: Path) -> list[str]:
    """`losses`: a job is not done, or has other weights than the undisturbed one; `doubles`: not each step once."""
    job = Job(Client(server.url, server.keys[owner]), name)
    shown = job.show()
    if shown["state"] != "done":
        print(f"{name}: {shown['state']}, {shown['reason']}", flush=True)
        return ["losses"]
    adapter = load_file(job.adapter(work / name) / "adapter_model.safetensors")
    steps = [row["step"] for row in job.metrics() if row["kind"] == "step"]
    same = adapter.keys() == weights.keys() and all((adapter[key] == weights[key]).all() for key in weights)
    once = steps == list(range(1, shown["steps"] + 1))
    return [fault for fault, holds in zip(FAULTS, (same, once), strict=True) if not holds]
