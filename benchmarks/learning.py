"""Four tasks of reinforcement learning on the tiny base, over several seeds: how far each reward rises.

    python -m benchmarks.learning --out D --budget 1500        # a CPU: about three minutes of two cores a seed

Rows of learning.jsonl: task, seed, mean reward of the first and the last three steps; at the end the mean rise of each
task over the seeds and its standard error. Seeds run side by side, each in a process, where there are cores for them.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import lorafusion_jax as lf
from benchmarks.conditions import conditions
from benchmarks.harness import write_within_budget
from lorafusion_jax.log_file import read_rows

JOB = Path(__file__).parent.parent / "examples" / "rl" / "rl.yaml"
TASKS, SEEDS, ENDS = ("spelling", "arithmetic", "form", "tool"), (0, 1, 2), 3
CORES = 4  # that a process uses


def main() -> int:
    return write_within_budget("learning", __doc__ or "", 1500.0, measure)


def measure(small: bool) -> Iterator[dict[str, Any]]:
    """Trains all tasks together, once for each seed; seeds side by side where there are cores for them."""
    seeds = SEEDS[: 1 if small else None]
    processes = min(len(seeds), max(1, (os.cpu_count() or 1) // CORES))
    rises: dict[str, list[float]] = {task: [] for task in TASKS}
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for row in chain.from_iterable(pool.map(partial(train, small=small), seeds)):
            rises[row["task"]].append(row["last"] - row["first"])
            yield row
    for task, values in rises.items():
        yield {"task": task, "seeds": len(values), "rise": _shown(values)} | conditions()


def train(seed: int, *, small: bool) -> list[dict[str, Any]]:
    """Trains all tasks with one seed. Returns a row of each."""
    steps = ["train.max_steps=4"] if small else []
    job = lf.load_job(JOB, [*steps, *(f"adapters.{task}.seed={seed}" for task in TASKS)])
    with tempfile.TemporaryDirectory() as folder:
        run = lf.train(job, Path(folder) / "run", progress=False)
        steps_of = [row for row in read_rows(run.folder / "metrics.jsonl") if row["kind"] == "step"]
    rows = []
    for task in TASKS:
        rewards = [row["reward"] for row in steps_of if row["adapter"] == task]
        first, last = (round(statistics.mean(part), 3) for part in (rewards[:ENDS], rewards[-ENDS:]))
        rows.append({"task": task, "seed": seed, "first": first, "last": last, "steps": len(rewards)})
    return rows


def _shown(values: list[float]) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):.3f} ± {error:.3f}"


if __name__ == "__main__":
    raise SystemExit(main())
