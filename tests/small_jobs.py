"""Job files for the tiny base and rows to train on."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

WORDS = (
    "adapter",
    "base",
    "batch",
    "bias",
    "cache",
    "file",
    "graph",
    "kernel",
    "layer",
    "loss",
    "mask",
    "model",
    "norm",
    "plan",
    "rank",
    "row",
    "scale",
    "shard",
    "slot",
    "tile",
)


def write_rows(folder: Path, name: str, count: int, seed: int = 0, longest: int = 24) -> str:
    """Writes prompt/completion rows of different lengths; returns the file's name."""
    draw = random.Random(f"{name}-{seed}")
    rows = [
        {
            "prompt": " ".join(draw.choices(WORDS, k=draw.randint(1, longest))),
            "completion": " " + " ".join(draw.choices(WORDS, k=draw.randint(1, longest))),
        }
        for _ in range(count)
    ]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"{name}.jsonl"


# Compiling is most of what a test costs: one layer a program, and a linear of attention and one of the MLP.
QUICK = {
    "base": {"dtype": "float32"},
    "data": {"max_length": 64},
    "batch": {"capacity_tokens": 128, "tile_tokens": 16},
    "train": {"log_every_s": 0, "plan_seconds": 0.1, "block_layers": 1},
    "lora": {"targets": ["q_proj", "down_proj"]},
}


def write_job(folder: Path, base: Path, adapters: list[dict], **sections) -> Path:
    """Writes a job file; sections are keyword arguments and change `QUICK` key by key. JSON is YAML."""
    job = {"adapters": adapters}
    for name in QUICK | sections:
        changes = sections.get(name, {})
        job[name] = QUICK.get(name, {}) | changes if isinstance(changes, dict) else changes
    job["base"] = {"model": str(base)} | job["base"]
    path = folder / "jobs.yaml"
    path.write_text(json.dumps(job))
    return path


def two_adapters(rows: dict[str, str], names: Sequence[str] = ("law", "med")) -> list[dict]:
    """Adapters of different ranks with dropout, on files of rows by name; they learn fast."""
    return [
        {
            "name": name,
            "data": {"train": rows[name], "eval": rows[name]},
            "batch": {"global_samples": 4},
            "lora": {"rank": 2 + 2 * (name == "med"), "dropout": 0.1},
            "optim": {"lr": 0.02, "schedule": "constant"},
        }
        for name in names
    ]


def store_base_as(kind: str, job: Path) -> Path:
    """Sets `base.quantize` of a job file."""
    settings = json.loads(job.read_text())
    settings["base"]["quantize"] = kind
    job.write_text(json.dumps(settings))
    return job


def exported(run: Path, name: str) -> dict[str, np.ndarray]:
    """Tensors of an adapter's newest export."""
    return load_file(run / "adapters" / name / "latest" / "adapter_model.safetensors")


def largest_difference(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    """Of any tensor, relative to its largest number."""
    assert ours.keys() == theirs.keys()
    return max(float(np.abs(ours[key] - theirs[key]).max() / np.abs(theirs[key]).max()) for key in theirs)
