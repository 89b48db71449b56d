"""Arithmetic: an adapter samples answers to sums, a function rewards them, and it trains on them.

`python examples/recipes/arithmetic.py` takes minutes on a CPU and prints the mean reward of each step.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import lorafusion_jax as lf
from lorafusion_jax.log_file import read_rows

EXAMPLES = Path(__file__).parents[1]


def main(steps: int = 40) -> list[float]:
    """Returns the mean reward of each step: 1 for the right number, at most a half for another one."""
    job = {
        "base": {"model": str(EXAMPLES / "base"), "dtype": "float32"},
        "data": {"max_length": 64},
        "batch": {"capacity_tokens": 1024, "tile_tokens": 32, "global_samples": 32},
        "train": {"block_layers": 1, "max_steps": steps},
        "lora": {"rank": 8, "targets": ["q_proj", "v_proj", "down_proj"]},
        "optim": {"lr": 5e-3, "schedule": "constant"},
        "objective": "grpo",
        "rollout": {
            "prompts": str(EXAMPLES / "rl" / "sums.jsonl"),  # {"prompt": "1 + 2 = ?", "answer": "3"}
            "reward": f"{EXAMPLES / 'rl' / 'rewards.py'}:arithmetic",
            "group": 16,  # answers to each sum: an advantage compares them with each other
            "max_tokens": 6,
        },
        "epochs": 100,
        "adapters": [{"name": "arithmetic"}],
    }
    run = lf.train(job, Path(tempfile.mkdtemp()) / "run", progress=False)
    print(f"lorafusion report {run.folder}    shows curves and answers")
    return [row["reward"] for row in read_rows(run.folder / "metrics.jsonl") if row["kind"] == "step"]


if __name__ == "__main__":
    for step, reward in enumerate(main(*map(int, sys.argv[1:])), 1):
        print(f"{step:4} {reward:6.3f} {'█' * round(50 * reward)}")
