"""What grouping can win at most: for every job the best partners and mesh of many random ones, nothing ever stops.

    python benchmarks/online_partners.py    # one minute; writes partners.csv next to the rows of online.py

The gain is isolated GPU-seconds of work that groups do per GPU-second. There are no starts, no changes and no last jobs
that leave GPUs idle, so a policy that keeps the bounds of slowdown hardly wins more.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.online import EVEN, KIND, RESULTS  # noqa: E402
from scheduling.online import Job, Rates, Worker, generate_trace  # noqa: E402

BASES = ("llama-3.1-8b", "qwen2.5-32b", "llama-3.1-70b")
JOBS = 300
TRIES = 160  # sets of partners for every job
MOST_MEMBERS = 6
MESHES = (1, 2, 4, 8)


def gain_of_partners(base: str, *, bounded: bool, seed: int = 0) -> float:
    """Divides the jobs into groups, each job with the partners that gain most, and returns the gain over all jobs."""
    rates, rng = Rates(), np.random.default_rng(seed)
    workers = [Worker("host0", 8)]
    left = generate_trace(EVEN, jobs=JOBS, workers=workers, seed=seed, rates=rates, bases={base: 1.0}, at_start=True)
    isolated_s = grouped_s = 0.0
    while left:
        first, *left = left
        best, members = 1.0, [first]
        for _ in range(TRIES):
            count = min(len(left), int(rng.integers(1, MOST_MEMBERS)))
            some = [first, *(left[place] for place in rng.choice(len(left), count, replace=False))]
            gain = max(work_rate(some, gpus, rates, bounded) for gpus in MESHES)
            if gain > best:
                best, members = gain, some
        names = {job.name for job in members}
        left = [job for job in left if job.name not in names]
        work_s = sum(rates.best_isolated_rate(job, KIND).gpu_s(job.steps) for job in members)
        isolated_s, grouped_s = isolated_s + work_s, grouped_s + work_s / best
    return isolated_s / grouped_s


def work_rate(members: Sequence[Job], gpus: int, rates: Rates, bounded: bool) -> float:
    """Isolated GPU-seconds of work that a group does per GPU-second; 0 if it does not fit."""
    rate = rates.group(members, KIND, gpus)
    if rate is None or (bounded and not rate.within_bounds):
        return 0.0
    each = (
        rates.best_isolated_rate(job, KIND).gpu_s(steps) for job, steps in zip(members, rate.steps_per_s, strict=True)
    )
    return sum(each) / gpus


def main() -> None:
    with (RESULTS / "partners.csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("base", "gain", "gain_without_bounds"))
        for base in BASES:
            table.writerow((base, *(f"{gain_of_partners(base, bounded=bounded):.3f}" for bounded in (True, False))))
            file.flush()


if __name__ == "__main__":
    main()
