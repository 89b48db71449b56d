"""Preferences: an adapter learns by DPO to answer without small talk.

`python examples/recipes/preferences.py` takes a minute on a CPU and prints how sure it is of the chosen answers.
"""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path

import lorafusion_jax as lf
from lorafusion_jax.log_file import read_rows

EXAMPLES = Path(__file__).parents[1]


def main(steps: int = 12) -> list[float]:
    """Returns the probability of the chosen answer of a pair, from the mean margin of its reward, of each step."""
    job = {
        "base": {"model": str(EXAMPLES / "base"), "dtype": "float32"},
        "data": {"max_length": 192},
        "batch": {"capacity_tokens": 1024, "tile_tokens": 32, "global_samples": 8},
        "train": {"block_layers": 1, "max_steps": steps},
        "lora": {"rank": 8, "targets": ["q_proj", "v_proj", "down_proj"]},
        "optim": {"lr": 5e-4, "schedule": "constant"},
        "objective": {"name": "dpo", "beta": 0.1},  # the reference is the base
        "adapters": [{"name": "brief", "data": {"train": str(EXAMPLES / "data" / "brief.jsonl"), "on_long": "drop"}}],
    }
    run = lf.train(job, Path(tempfile.mkdtemp()) / "run", progress=False)
    print(f"lorafusion report {run.folder}    shows curves")
    rows = [row for row in read_rows(run.folder / "metrics.jsonl") if row["kind"] == "step"]
    return [1 / (1 + math.exp(-row["rewards/margins"])) for row in rows]


if __name__ == "__main__":
    for step, share in enumerate(main(*map(int, sys.argv[1:])), 1):
        print(f"{step:4} {share:6.3f} {'█' * round(50 * share)}")
