"""Tool use: an adapter asks, a function answers, and the adapter is rewarded for saying what it was told.

`python examples/recipes/tools.py` takes minutes on a CPU and prints the mean reward of each step.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import lorafusion_jax as lf
from lorafusion_jax.log_file import read_rows

EXAMPLES = Path(__file__).parents[1]


def main(steps: int = 30) -> list[float]:
    """Returns the mean reward of each step: the share of the last answer that is letters of the looked-up word."""
    functions = EXAMPLES / "rl" / "rewards.py"
    job = {
        "base": {"model": str(EXAMPLES / "base"), "dtype": "float32"},
        "data": {"max_length": 64},
        "batch": {"capacity_tokens": 1024, "tile_tokens": 32, "global_samples": 32},
        "train": {"block_layers": 1, "max_steps": steps},
        "lora": {"rank": 8, "targets": ["q_proj", "v_proj", "down_proj"]},
        "optim": {"lr": 5e-3, "schedule": "constant"},
        "objective": "grpo",
        "rollout": {
            "prompts": str(EXAMPLES / "rl" / "words.jsonl"),  # {"prompt": "Say the word of number 7.", "word": "…"}
            "tool": f"{functions}:tool",  # (row, answers so far) -> what the adapter reads next
            "turns": 2,  # an answer, the tool, and the answer that is rewarded
            "reward": f"{functions}:used",
            "group": 16,
            "max_tokens": 6,
            "tool_tokens": 12,
        },
        "epochs": 100,
        "adapters": [{"name": "tools"}],
    }
    run = lf.train(job, Path(tempfile.mkdtemp()) / "run", progress=False)
    print(f"lorafusion report {run.folder}    shows curves and answers")
    return [row["reward"] for row in read_rows(run.folder / "metrics.jsonl") if row["kind"] == "step"]


if __name__ == "__main__":
    for step, reward in enumerate(main(*map(int, sys.argv[1:])), 1):
        print(f"{step:4} {reward:6.3f} {'█' * round(50 * reward)}")
