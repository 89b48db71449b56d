"""Measures the online scheduler against its targets, on 1 to 64 GPUs, on its own traces and on held-out ones.

    python -m benchmarks.online                       # all missing runs, on two cores, at low priority
    python -m benchmarks.online small --seeds 1       # a part, see PARTS

Every finished run is a row of rows.csv and is not repeated; delete a row to run it again. `report` writes the tables
from the rows.
"""

from __future__ import annotations

import argparse
import cProfile
import csv
import gc
import os
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import date
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.online_rates import compare_rates
from benchmarks.online_traces import HELD_OUT, held_out_trace
from scheduling.online import (
    TRACES,
    CheckedPolicy,
    ClusterResult,
    ClusterState,
    Job,
    JobState,
    Ours,
    Rates,
    Settings,
    TraceShape,
    Worker,
    generate_trace,
    simulate_cluster,
)
from scheduling.online.state import after

RESULTS = Path(__file__).parent / "results" / "online_2026-11-29"
PARTS = ("small", "held-out", "large", "queue", "throughput", "ideas", "claims", "rates", "speed")
OTHERS = ("elastic-srtf", "srtf", "backfill")
WITHOUT = {
    "without grouping": {"grouping": False},
    "without elasticity": {"elasticity": False},
    "without order": {"short_first": False},
}
FIELDS = (
    "part", "trace", "seed", "load", "jobs", "gpus", "memory_gib", "policy", "jct_mean_s", "jct_p50_s", "jct_p95_s",
    "jct_p99_s", "makespan_s", "tokens_per_s", "steady_tokens_per_s", "utilisation", "overall_utilisation", "density",
    "slowdown_p99", "slowdown_max", "bounds_broken", "fairness", "worst_user", "preemptions", "refusals", "cpu_s",
)  # fmt: skip
EVEN = TraceShape(spread=0.5)  # similar sizes, so that no single job decides the makespan
SMALL_BASES = {"llama-3.1-8b": 0.5, "qwen2.5-14b": 0.3, "qwen2.5-32b": 0.2}  # what one GPU holds


class Task(NamedTuple):
    """Runs of several policies on one trace."""

    part: str
    trace: str
    seed: int
    load: float
    policies: tuple[str, ...]
    jobs: int
    gpus: int
    base: str = ""  # a single base for all jobs, which arrive at the start
    memory_gib: float = 140.0


def tasks(part: str, seeds: int) -> list[Task]:
    """Tasks of a part."""
    everybody = ("ours", *OTHERS)
    if part == "small":
        cases = product((1.0, 0.7, 1.2), range(seeds), (1, 2, 4, 8), TRACES)
        return [Task(part, trace, seed, load, everybody, 150, gpus) for load, seed, gpus, trace in cases]
    if part == "held-out":
        cases = product(range(seeds), (1, 2, 4, 8, 64), HELD_OUT)
        return [
            Task(part, trace, seed, 1.0, everybody, 600 if gpus == 64 else 150, gpus) for seed, gpus, trace in cases
        ]
    if part == "large":
        others = (*everybody, "fifo", "tlora", "packing", "mlora")
        return [Task(part, trace, 0, 1.0, others, 2000, 64) for trace in TRACES]
    if part == "queue":
        cases = product((125, 250, 500, 1000), range(seeds), TRACES)
        return [Task(part, trace, seed, 1.0, ("ours", "backfill", "fifo"), jobs, 64) for jobs, seed, trace in cases]
    if part == "ideas":
        return [
            Task(part, trace, 0, 1.0, ("ours", *WITHOUT), 500 if gpus == 64 else 150, gpus)
            for gpus in (1, 8, 64)
            for trace in TRACES
        ]
    if part == "throughput":
        bases = ("llama-3.1-8b", "qwen2.5-32b", "llama-3.1-70b")
        cases = product((80.0, 140.0), bases, range(seeds))
        return [
            Task(part, "even", seed, 1.0, (*everybody, "fifo"), 150, 32, base, memory) for memory, base, seed in cases
        ]
    if part == "claims":
        policies = ("ours", "elastic-srtf", "fifo", "tlora", "mlora")
        clusters = product(range(seeds), ((1, 140.0), (8, 140.0), (8, 80.0)), HELD_OUT)
        return [
            Task(part, trace, seed, 1.0, policies, 80, gpus, memory_gib=memory)
            for seed, (gpus, memory), trace in clusters
        ]
    return []


def run(task: Task, done: frozenset[tuple]) -> list[dict]:
    """Runs the missing rows of one task."""
    left = [policy for policy in task.policies if key(task._asdict() | {"policy": label(task, policy)}) not in done]
    if not left:
        return []
    hosts = range(max(1, task.gpus // 8))
    workers = [Worker(f"host{host}", min(8, task.gpus), task.memory_gib) for host in hosts]
    rates, rows = Rates(), []
    jobs = jobs_of(task, workers, rates)
    for policy in left:
        began = time.process_time()
        chosen = policy
        if policy in WITHOUT:
            chosen = CheckedPolicy(Ours(rates, Settings(**WITHOUT[policy]), policy), rates)
        result = simulate_cluster(jobs, workers, policy=chosen, rates=rates)
        accounts = result.accounts
        rows.append(
            task._asdict()
            | result.summary()
            | {
                "policy": label(task, policy),
                "density": accounts.useful_s / accounts.busy_s,
                "steady_tokens_per_s": steady_tokens_per_s(result),
                "cpu_s": time.process_time() - began,
            }
        )
    return rows


def jobs_of(task: Task, workers: Sequence[Worker], rates: Rates) -> list[Job]:
    if task.trace in HELD_OUT:
        return held_out_trace(task.trace, jobs=task.jobs, workers=workers, load=task.load, seed=task.seed, rates=rates)
    bases = {task.base: 1.0} if task.base else SMALL_BASES if task.gpus < 8 else None
    return generate_trace(
        EVEN if task.trace == "even" else task.trace,
        jobs=task.jobs,
        workers=workers,
        load=task.load,
        seed=task.seed,
        rates=rates,
        bases=bases,
        users=5 if task.gpus < 8 else 8 if task.gpus == 8 else 20,
        at_start=bool(task.base),
    )


def steady_tokens_per_s(result: ClusterResult) -> float:
    """Tokens per second until half of the tokens are trained: no last jobs leave GPUs idle."""
    total, done = sum(job.tokens for job in result.jobs), 0.0
    of = {job.name: job.tokens / job.steps for job in result.jobs}
    for span in sorted(result.spans, key=lambda span: span.end_s):
        done += span.steps * of[span.job]
        if done >= total / 2:
            return done / span.end_s
    return 0.0


def label(task: Task, policy: str) -> str:
    return f"{policy}, {task.base}" if task.base else policy


def key(row: dict) -> tuple:
    numbers = (float(row[name]) for name in ("load", "gpus", "memory_gib"))
    return (*(str(row[name]) for name in ("part", "trace", "seed", "jobs", "policy")), *numbers)


def read_rows() -> list[dict]:
    return read_csv("rows.csv")


def read_csv(name: str) -> list[dict]:
    path = RESULTS / name
    return list(csv.DictReader(path.open())) if path.exists() else []


def add_rows(rows: Sequence[dict]) -> None:
    path = RESULTS / "rows.csv"
    new = not path.exists()
    with path.open("a", newline="") as file:
        table = csv.DictWriter(file, FIELDS, extrasaction="ignore", lineterminator="\n")
        if new:
            table.writeheader()
        for row in rows:
            table.writerow({name: f"{v:.6g}" if isinstance(v := row[name], float) else v for name in FIELDS})
            print(
                " ".join(f"{name}={row[name]}" for name in ("part", "trace", "seed", "load", "gpus", "policy")),
                flush=True,
            )


# --- the speed of a decision


def time_decision(hosts: int = 160, jobs: int = 1000, repeats: int = 25) -> dict:
    """Times decisions of the policy on a full cluster to which as many jobs come again."""
    rates, workers = Rates(), {name: Worker(name, 8) for name in (f"host{host:03d}" for host in range(hosts))}
    drawn = generate_trace("steady", jobs=2 * jobs, workers=[*workers.values()], rates=rates, at_start=True, seed=4)
    policy = Ours(rates)
    state = ClusterState(time_s=0.0, workers=workers, jobs={job.name: JobState(job) for job in drawn[:jobs]})
    for _ in range(3):
        groups = after(state, policy.decide(state, 0.0))
        group_of = {name: group.name for group in groups.values() for name in group.members}
        states = {name: JobState(state.job, group=group_of.get(name)) for name, state in state.jobs.items()}
        state = replace(state, jobs=states, groups=groups)
    state = replace(state, jobs=dict(state.jobs) | {job.name: JobState(job) for job in drawn[jobs:]})
    policy.decide(state, 0.0)  # fills the caches, as the decisions before would have
    cold = [Ours(Rates()) for _ in range(2)]
    running = sum(state.group is not None for state in state.jobs.values())
    return {
        "gpus": 8 * hosts,
        "running": running,
        "waiting": len(state.jobs) - running,
        "warm_calls": calls_of(lambda: policy.decide(state, 0.0)),
        "cold_calls": calls_of(lambda: cold[0].decide(state, 0.0)),
        "warm_ms": round(1e3 * min(cpu_s(lambda: policy.decide(state, 0.0)) for _ in range(repeats)), 1),
        "cold_s": round(cpu_s(lambda: cold[1].decide(state, 0.0)), 2),
        "addition_ns": round(min(cpu_s(additions) for _ in range(5)) * 1e3, 1),
    }


def calls_of(function: Callable[[], object]) -> int:
    """Function calls of Python: work that does not depend on the machine, nor on the garbage of whoever ran before."""
    profile = cProfile.Profile()
    collects = gc.isenabled()
    gc.disable()  # a collection calls finalizers and jax's callback
    try:
        profile.runcall(function)
    finally:
        if collects:
            gc.enable()
    return sum(entry.callcount for entry in profile.getstats())


def cpu_s(function: Callable[[], object]) -> float:
    began = time.process_time()
    function()
    return time.process_time() - began


def additions(count: int = 1_000_000) -> int:
    """How fast Python is on this core: a million additions in a loop."""
    total = 0
    for number in range(count):
        total += number
    return total


def main() -> None:
    """Runs the missing rows of the requested parts, then reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[*PARTS, "report"])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="policies")
    parser.add_argument("--loads", nargs="*", type=float, help="loads")
    parser.add_argument("--gpus", nargs="*", type=int, help="sizes of clusters")
    parser.add_argument("--cores", type=int, default=2)
    asked = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "conditions.txt").write_text(
        f"{date.today()} · Python {platform.python_version()} · numpy {np.__version__} · {platform.machine()}, "
        f"{os.cpu_count()} cores shared with other work; simulated H200s, default rates of scheduling.rates\n"
    )
    if "rates" in asked.parts:
        write_csv("rates.csv", [*compare_rates(), *compare_rates(unseen=True)])
    if "speed" in asked.parts:
        write_csv("decision.csv", [time_decision()])
    wanted = [task for part in asked.parts for task in tasks(part, asked.seeds)]
    if asked.only:
        wanted = [task._replace(policies=tuple(p for p in task.policies if p in asked.only)) for task in wanted]
    if asked.loads:
        wanted = [task for task in wanted if task.load in asked.loads]
    if asked.gpus:
        wanted = [task for task in wanted if task.gpus in asked.gpus]
    done = frozenset(key(row) for row in read_rows())
    with ProcessPoolExecutor(asked.cores, initializer=os.nice, initargs=(10,)) as pool:
        for rows in pool.map(run, wanted, [done] * len(wanted)):
            add_rows(rows)
    if "report" in asked.parts:
        report()


def write_csv(name: str, rows: Sequence[dict]) -> None:
    with (RESULTS / name).open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def report() -> None:
    """Writes tables as Markdown, and plots if matplotlib is installed."""
    from benchmarks.online_report import write_report

    write_report(RESULTS)


if __name__ == "__main__":
    main()
