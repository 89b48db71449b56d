"""Four tasks of reinforcement learning on the tiny base, over several seeds: how far each reward rises.

    python -m benchmarks.learning --out D --budget 1500        # a CPU: about three minutes of two cores a seed

Rows of learning.jsonl: task, seed, mean reward of the first and the last three steps. At the end a table with the mean
rise and its standard error.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lorafusion_jax as lf
from benchmarks.harness import write_within_budget
from lorafusion_jax.log_file import read_rows

JOB = Path(__file__).parent.parent / "examples" / "rl" / "rl.yaml"
TASKS, SEEDS, ENDS = ("spelling", "arithmetic", "form", "tool"), (0, 1, 2), 3


def main() -> int:
    return write_within_budget("learning", __doc__ or "", 1500.0, measure)


def measure(small: bool) -> Iterator[dict[str, Any]]:
    """Trains all tasks together, once for each seed."""
    rises: dict[str, list[float]] = {task: [] for task in TASKS}
    for seed in SEEDS[: 1 if small else None]:
        steps = ["train.max_steps=4"] if small else []
        job = lf.load_job(JOB, [*steps, *(f"adapters.{task}.seed={seed}" for task in TASKS)])
        with tempfile.TemporaryDirectory() as folder:
            run = lf.train(job, Path(folder) / "run", progress=False)
            rows = [row for row in read_rows(run.folder / "metrics.jsonl") if row["kind"] == "step"]
        for task in TASKS:
            rewards = [row["reward"] for row in rows if row["adapter"] == task]
            first, last = statistics.mean(rewards[:ENDS]), statistics.mean(rewards[-ENDS:])
            rises[task].append(last - first)
            yield {"task": task, "seed": seed, "first": round(first, 3), "last": round(last, 3), "steps": len(rewards)}
    print(json.dumps({task: _shown(values) for task, values in rises.items()}), flush=True)


def _shown(values: list[float]) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):.3f} ± {error:.3f}"


if __name__ == "__main__":
    raise SystemExit(main())
