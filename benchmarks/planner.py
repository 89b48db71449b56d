"""Compares plans with bounds, the exact solver, a reference solver and other orders of work, in tables and plots.

    python -m benchmarks.planner --out benchmarks/results/planner_2026-11-24    # everything, ten minutes on two cores
    python -m benchmarks.planner bubbles batch_sizes --out FOLDER               # some parts

Writes <part>.csv, plots, and the conditions of the run.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np

from benchmarks.exact_solver import solve_exactly
from benchmarks.harness import command_line
from benchmarks.measured_code import code, commit
from scheduling import (
    AdapterJob,
    Plan,
    Timeline,
    batch_by_batch,
    default_cost_model,
    formula_bound,
    forward_then_backward,
    make_plan,
    one_after_another,
    one_forward_one_backward,
    plan_statistics,
    simulate,
    timeline_html,
    tuned,
)
from scheduling.packing.greedy import greedy
from scheduling.packing.problem import make_problem
from scheduling.pipeline import Program
from scheduling.types import Limits

Order = Callable[[Plan], Program]

HERE = Path(__file__).parent
LIMITS = {"capacity_tokens": 6144, "num_stages": 4}
CAPACITIES = (2048, 2560, 3072, 3584, 4096, 4608, 5120, 5632, 6144, 7168, 8192)
FOUR_SIZES = (3072, 4096, 6144, 8192)
TARGET = {8: 1.045, 16: 1.018}
LENGTHS = {"xsum": (540, 380), "cnn": (950, 430), "wiki": (1900, 900)}  # mean and spread of tokens


def workload(size: int, name: str) -> list[AdapterJob]:
    adapters = json.loads((HERE / "data" / "scheduling_workloads.json").read_text())["lengths"][f"g{size}"][name]
    return [
        AdapterJob(f"{name}-{i}", [n for batch in batches for n in batch], size) for i, batches in enumerate(adapters)
    ]


def workloads() -> list[dict]:
    """The shared workloads at the default effort, against the reference solver."""
    reference = json.loads((HERE / "data" / "scheduling_reference.json").read_text())["rows"]
    rows = []
    for other in reference:
        jobs = workload(other["global_batch"], other["workload"])
        walls, cpus = [], []
        for _ in range(15):
            cpu = time.process_time()
            walls.append(_time_call(make_plan, jobs, time_limit_s=0, **LIMITS)[1])
            cpus.append(time.process_time() - cpu)
        first = make_plan(jobs, time_limit_s=0, **LIMITS)
        plan, seconds = _time_call(make_plan, jobs, **LIMITS)
        figures = plan_statistics(plan, _costs(4))
        rows.append(
            {
                "global_batch": other["global_batch"],
                "workload": other["workload"],
                "bound": formula_bound(jobs, **LIMITS),
                "tight_bound": plan.lower_bound,
                "slots": plan.num_slots,
                "noops": plan.num_noops,
                "first_plan_slots": first.num_slots,
                "reference_slots": other["slots"],
                "density": round(plan.density, 4),
                "reference_density": other["density"],
                "first_plan_ms": round(1e3 * min(walls), 1),
                "first_plan_cpu_ms": round(1e3 * min(cpus), 1),
                "seconds": round(seconds, 3),
                "reference_seconds": other["seconds"],
                "bubble_share": round(figures.bubble_share, 4),
            }
        )
    for size in TARGET:
        mine = [row for row in rows if row["global_batch"] == size]
        total = {
            key: sum(row[key] for row in mine) for key in ("bound", "slots", "first_plan_slots", "reference_slots")
        }
        ratios = {key: total[key] / total["bound"] for key in total}
        print(f"g{size}: {ratios['slots']:.4f} of the bound (target {TARGET[size]}), {ratios}")
    return rows


def heldout() -> list[dict]:
    """Other seeds, capacities and depths, and unequal jobs, with a fixed number of search evaluations."""
    rows = []
    for size in TARGET:
        for stages in (1, 2, 4, 8):
            for capacity in (4096, 6144, 8192):
                for name in ("xsum", "cnn", "wiki", "mix", "het", "unequal"):
                    jobs = _drawn(name, size, [2026, size, stages, capacity, sum(map(ord, name))])
                    limits = {"capacity_tokens": capacity, "num_stages": stages}
                    plan = make_plan(jobs, search_evaluations=20_000, **limits)
                    rows.append(
                        {"global_batch": size, "workload": name, **limits}
                        | {"bound": formula_bound(jobs, **limits), "tight_bound": plan.lower_bound}
                        | {
                            "slots": plan.num_slots,
                            "first_plan_slots": make_plan(jobs, time_limit_s=0, **limits).num_slots,
                        }
                        | {"batch_by_batch_slots": batch_by_batch(jobs, **limits).num_slots}
                    )
    for key in ("global_batch", "num_stages", "capacity_tokens", "workload"):
        for size in TARGET:
            for value in dict.fromkeys(row[key] for row in rows if row["global_batch"] == size):
                mine = [row for row in rows if row["global_batch"] == size and row[key] == value]
                slots, bound, tight = (sum(row[name] for row in mine) for name in ("slots", "bound", "tight_bound"))
                print(
                    f"g{size} {key}={value}: {slots / bound:.4f} of the bound, {slots / tight:.4f} of the tight bound"
                )
    return rows


def growth() -> list[dict]:
    """Greedy plans from a thousand to a million samples, each in its own process to measure memory."""
    rows = []
    for adapters, batches in ((4, 4), (8, 20), (64, 25), (64, 250)):
        command = [sys.executable, "-m", "benchmarks.planner", "--out", ".", "--grow", str(adapters), str(batches)]
        row = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
        print(row)
        rows.append(row)
    return rows


def _grow(adapters: int, batches: int) -> None:
    jobs = [
        AdapterJob(f"a{i}", _lengths(np.random.default_rng([7, i]), list(LENGTHS)[i % 3], 64 * batches), 64)
        for i in range(adapters)
    ]
    samples = sum(job.num_samples for job in jobs)
    walls, cpus = [], []
    for _ in range(max(2, min(5, 20_000 // samples))):  # the first run warms up
        cpu = time.process_time()
        walls.append(_time_call(make_plan, jobs, time_limit_s=0, **LIMITS)[1])
        cpus.append(time.process_time() - cpu)
    plan, default_s = _time_call(make_plan, jobs, **LIMITS)
    row = {
        "samples": samples,
        "adapters": adapters,
        "batches": batches,
        "first_plan_s": round(min(walls), 3),
        "us_per_sample": round(1e6 * min(walls) / samples, 1),
        "cpu_us_per_sample": round(1e6 * min(cpus) / samples, 1),
        "seconds": round(default_s, 3),
        "slots": plan.num_slots,
        "gap": round(plan.gap, 5),
        "memory_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 3),
    }
    print(json.dumps(row))


def exact() -> list[dict]:
    """200 random instances of at most 40 samples against the exact solver (20 s per question)."""
    rows = []
    for seed in range(200):
        jobs, limits = _small(seed)
        problem = make_problem(jobs, limits)
        keywords = {name: getattr(limits, name) for name in ("capacity_tokens", "num_stages", "data_parallel")}
        plan = make_plan(jobs, search_evaluations=20_000, **keywords)
        best = make_plan(jobs, time_limit_s=0, **keywords)
        answer = solve_exactly(problem, incumbent=greedy(problem), bound=plan.lower_bound, time_limit_s=20.0)
        rows.append(
            {"seed": seed, "samples": sum(job.num_samples for job in jobs), "adapters": len(jobs), **keywords}
            | {"bound": plan.lower_bound, "slots": plan.num_slots, "first_plan_slots": best.num_slots}
            | {"exact_slots": len(answer.filling), "proven": answer.proven}
        )
    known = [row for row in rows if row["proven"] or row["slots"] == row["bound"]]
    optimal = sum(row["slots"] <= row["exact_slots"] for row in known)
    worst = max(row["slots"] - row["exact_slots"] for row in rows)
    print(f"optimal in {optimal} of {len(known)} decided instances ({len(rows)} in all), at most {worst} slot off")
    return rows


def bubbles() -> list[dict]:
    """Predicted idle time of 4 stages, for ours and other orders of the same work (70B on H100 rates).

    Other orders use our capacity, and their own best capacity. `bubble_share` excludes fill and drain, `idle_share`
    includes them.
    """
    rows = []
    for name in ("xsum", "cnn", "wiki", "mix", "het"):
        jobs = workload(16, name)
        alone, turns = one_after_another(jobs, **LIMITS), batch_by_batch(jobs, **LIMITS)
        orders = {
            "ours": (make_plan(jobs, **LIMITS), None),
            "batch by batch, no flush": (turns, None),
            "batch by batch, no flush, own capacity": (fastest(batch_by_batch, jobs), None),
            "one adapter at a time, no flush": (alone, None),
            "one adapter at a time, 1F1B with flush": (alone, flushed),
            "one adapter at a time, 1F1B with flush, own capacity": (
                fastest(one_after_another, jobs, flushed), flushed
            ),
            "one adapter at a time, GPipe": (alone, forward_then_backward),
        }  # fmt: skip
        rows += [{"workload": name, "order": order} | idle(*plan) for order, plan in orders.items()]
    for order in dict.fromkeys(row["order"] for row in rows):
        shares = [row["idle_share"] for row in rows if row["order"] == order]
        print(f"{order}: idle {statistics.mean(shares):.3f} on average, at most {max(shares):.3f}")
    return rows


def idle(plan: Plan, order: Order | None) -> dict:
    predicted = simulated(plan, order)
    return {
        "capacity_tokens": plan.capacity_tokens,
        "density": round(plan.density, 4),
        "bubble_share": round(predicted.bubble_share, 4),
        "fill_drain_share": round(predicted.fill_drain_s / predicted.duration_s, 4),
        "idle_share": round(statistics.mean(predicted.idle_share), 4),
        "seconds": round(predicted.duration_s, 2),
    }


def simulated(plan: Plan, order: Order | None) -> Timeline:
    return simulate(plan, _costs(4), program=order(plan)) if order else simulate(plan, _costs(4))


def flushed(plan: Plan) -> Program:
    return one_forward_one_backward(plan, flush=True)


def fastest(make: Callable[..., Plan], jobs: list[AdapterJob], order: Order | None = None) -> Plan:
    """The plan with the best capacity for this order: the shortest predicted time."""
    longest = max(max(job.sample_tokens) for job in jobs)
    plans = [make(jobs, capacity_tokens=size, num_stages=4) for size in CAPACITIES if size >= longest]
    return min(plans, key=lambda plan: simulated(plan, order).duration_s)


def batch_sizes() -> list[dict]:
    """Density of microbatches by global batch on one stage: joint, and one adapter after another.

    Each uses the capacity with the shortest predicted time (8B on H200 rates).
    """
    costs = default_cost_model("h200", num_stages=1, parameters=8e9, num_layers=32, hidden_size=4096)
    rows = []
    for name in ("xsum", "cnn", "wiki", "mix", "het"):
        for size in (8, 16, 32, 64):
            jobs = _drawn(name, size, [2026, size, sum(map(ord, name))])
            plans = {
                "together": make_plan(jobs, capacity_tokens=8192, num_stages=1, search_evaluations=20_000),
                "one_after_another": tuned(
                    one_after_another, jobs, capacities=CAPACITIES, cost_model=costs, num_stages=1
                ),
            }
            rows.append({"workload": name, "global_batch": size})
            for order, plan in plans.items():
                rows[-1][f"{order}_capacity"] = plan.capacity_tokens
                rows[-1][f"{order}_density"] = round(plan.density, 4)
    return rows


def sizes() -> list[dict]:
    """Useful tokens/s of one adapter by global batch: the fastest size of microbatch, and four sizes.

    Predicted for 8B with default rates of an H200; the four adapters of `mix`, one after another.
    """
    costs = default_cost_model("h200", num_stages=1, parameters=8e9, num_layers=32, hidden_size=4096)
    limits = {"num_stages": 1, "search_evaluations": 20_000}
    rows = []
    for size in (8, 16, 32, 64):
        seconds, tokens = {"one_size": 0.0, "four_sizes": 0.0}, 0
        for job in _drawn("mix", size, [2026, size, 0]):
            one = tuned(make_plan, [job], capacities=CAPACITIES, cost_model=costs, **limits)
            several = make_plan([job], capacity_tokens=FOUR_SIZES, cost_model=costs, **limits)
            for name, plan in (("one_size", one), ("four_sizes", several)):
                seconds[name] += simulate(plan, costs).duration_s
            tokens += sum(job.sample_tokens)
        rows.append({"global_batch": size} | {name: round(tokens / took, 1) for name, took in seconds.items()})
    return rows


def timeline() -> str:
    """Writes the page of the screenshot `timeline.png`."""
    jobs = [
        replace(job, name=name) for job, name in zip(workload(16, "het"), ("news", "chat", "wiki", "law"), strict=True)
    ]
    plan, alone = make_plan(jobs, **LIMITS), one_after_another(jobs, **LIMITS)
    ours = replace(simulate(plan, _costs(4)), title="together (predicted: H100 rates, 70B in 4 stages)")
    other = simulate(alone, _costs(4), program=one_forward_one_backward(alone, flush=True))
    note = f"What limits this plan: {plan_statistics(plan, _costs(4)).hint}"
    return timeline_html(ours, note=note, compare=replace(other, title="one adapter after another"))


def _costs(stages: int):
    return default_cost_model("h100", num_stages=stages, parameters=70e9, num_layers=80, hidden_size=8192)


def _time_call(function, *args, **kwargs):
    started = time.perf_counter()
    return function(*args, **kwargs), time.perf_counter() - started


def _lengths(random: np.random.Generator, name: str, count: int) -> np.ndarray:
    mean, spread = LENGTHS[name]
    variance = np.log(1 + (spread / mean) ** 2)
    return np.exp(random.normal(np.log(mean) - variance / 2, np.sqrt(variance), count)).clip(32, 4096).astype(int)


def _drawn(name: str, size: int, seed: list[int]) -> list[AdapterJob]:
    random = np.random.default_rng(seed)
    if name == "unequal":  # different lengths, batch sizes, numbers of batches and epochs per adapter
        return [
            AdapterJob(f"a{i}", _lengths(random, kind, int(random.integers(20, 200))), size * 2**power, epochs=epochs)
            for i, (kind, power, epochs) in enumerate((("xsum", 1, 2), ("cnn", 0, 1), ("wiki", 0, 1), ("xsum", 0, 3)))
        ]
    jobs = []
    for index in range(4):
        kinds = {"mix": list(LENGTHS), "het": [list(LENGTHS)[index % 3]]}.get(name, [name])
        drawn = [_lengths(random, kind, 10 * size) for kind in kinds]
        chosen = np.choose(random.integers(0, len(drawn), 10 * size), drawn)
        jobs.append(AdapterJob(f"a{index}", chosen, size))
    return jobs


def _small(seed: int) -> tuple[list[AdapterJob], Limits]:
    random = np.random.default_rng([40, seed])
    count, capacity = int(random.integers(1, 5)), int(random.choice([1024, 2048, 4096]))
    sizes = np.maximum(1, random.multinomial(int(random.integers(8, 41)) - count, [1 / count] * count))
    jobs = [
        AdapterJob(
            f"a{index}",
            random.lognormal(np.log(random.uniform(0.1, 0.45) * capacity), 0.6, size).clip(16, capacity).astype(int),
            int(random.integers(1, 9)),
        )
        for index, size in enumerate(sizes)
    ]
    stages, replicas = int(random.choice([1, 2, 4])), int(random.choice([1, 1, 1, 2]))
    return jobs, Limits(capacity_tokens=capacity, num_stages=stages, data_parallel=replicas)


def _conditions(part: str, seconds: float, folder: Path) -> None:
    path = folder / "conditions.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    known[part] = {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cores": os.cpu_count(),
        "load_average_at_end": [round(load, 1) for load in os.getloadavg()],
        "seconds": round(seconds),
        "commit": commit(),
        "code": {"scheduling": code()["scheduling"]},
    }
    path.write_text(json.dumps(known, indent=1) + "\n")


PARTS = {part.__name__: part for part in (workloads, heldout, growth, exact, bubbles, batch_sizes, sizes, timeline)}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default all: {' '.join(PARTS)}")
    parser.add_argument("--grow", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.grow:
        return _grow(*options.grow)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; parts: {' '.join(PARTS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    for part in options.parts or PARTS:
        print(f"== {part}")
        table, seconds = _time_call(PARTS[part])
        if isinstance(table, str):
            (options.out / f"{part}.html").write_text(table)
        else:
            write(part, table, options.out)
        _conditions(part, seconds, options.out)
    return None


def write(part: str, rows: list[dict], folder: Path) -> None:
    """The table and its plot."""
    with (folder / f"{part}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    from benchmarks.planner_plots import draw

    draw(part, rows, folder)


if __name__ == "__main__":
    main()
