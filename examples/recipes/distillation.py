"""Distillation: a small adapter learns the distributions of a larger one, which was trained before.

`python examples/recipes/distillation.py` takes minutes on a CPU and prints how close the student is to its teacher.
"""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import lorafusion_jax as lf
from lorafusion_jax.log_file import read_rows

EXAMPLES = Path(__file__).parents[1]


def main(steps: int = 24) -> list[float]:
    """Returns exp(-divergence) of each step: 1 is a student that predicts as its teacher does."""
    folder = Path(tempfile.mkdtemp())
    teacher = {"name": "teacher", "lora": {"rank": 16}, "optim": {"lr": 5e-3}}
    lf.train(job_of(teacher, steps), folder / "teacher", progress=False)
    learned_by = {"name": "distill", "reference": str(lf.Run(folder / "teacher").adapter("teacher"))}
    student = {"name": "student", "lora": {"rank": 4}, "optim": {"lr": 5e-3}, "objective": learned_by}
    run = lf.train(job_of(student, steps), folder / "student", progress=False)
    print(f"lorafusion report {run.folder}    shows curves")
    return [math.exp(-row["loss"]) for row in read_rows(run.folder / "metrics.jsonl") if row["kind"] == "step"]


def job_of(adapter: dict[str, Any], steps: int) -> dict[str, Any]:
    """A job of one adapter on reference cards."""
    return {
        "base": {"model": str(EXAMPLES / "base"), "dtype": "float32"},
        "data": {"max_length": 256, "train": str(EXAMPLES / "data" / "cards.jsonl")},
        "batch": {"capacity_tokens": 1024, "tile_tokens": 32, "global_samples": 8},
        "train": {"block_layers": 1, "max_steps": steps},
        "adapters": [adapter],
    }


if __name__ == "__main__":
    for step, closeness in enumerate(main(*map(int, sys.argv[1:])), 1):
        print(f"{step:4} {closeness:6.3f} {'█' * round(50 * closeness)}")
