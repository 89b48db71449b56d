"""Jobs with random settings, to compare joint with separate training."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from small_jobs import write_job, write_rows

from lorafusion_jax.config import load_config
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.prepare import Prepared, prepare
from lorafusion_jax.planning.training_plan import plan_training
from scheduling import Plan

NAMES = ("wine", "tea", "rye")
# Shapes that programs are compiled for: few, so that many sweeps share them.
SHAPES = (
    {"wine": (4, ["q_proj", "down_proj"]), "tea": (6, ["q_proj", "down_proj"]), "rye": (2, ["v_proj"])},
    {"wine": (3, ["gate_proj"]), "tea": (8, ["o_proj", "up_proj"]), "rye": (3, ["gate_proj"])},
)


def random_sweep(folder: Path, base: Path, seed: int, dtype: str = "float32") -> tuple[JobConfig, Prepared, Plan]:
    """A job of three adapters with random optimizers, rates, dropout, batches and data."""
    draw = random.Random(seed)
    shapes = SHAPES[seed % len(SHAPES)]
    entries = [_entry(draw, folder, name, *shapes[name], seed) for name in NAMES]
    job = write_job(folder, base, entries, batch={"capacity_tokens": 256, "tile_tokens": 16}, optim={"clip": 1.0})
    config = load_config(job, [f"base.dtype={dtype}"])
    prepared = prepare(config)
    return config, prepared, plan_training(config, prepared)


def _entry(draw: random.Random, folder: Path, name: str, rank: int, targets: Sequence[str], seed: int) -> dict:
    optimizer = draw.choice(("adamw", "adamw", "adamw", "sgd", "lion", "adafactor"))
    return {
        "name": name,
        "data": {"train": write_rows(folder, name, draw.randint(8, 16), seed, longest=12)},
        "lora": {
            "rank": rank,
            "alpha": draw.choice((4, 16, 32)),
            "rslora": draw.random() < 0.3,
            "dropout": draw.choice((0.0, 0.05, 0.3)),
            "targets": targets,
        },
        "optim": {
            "name": optimizer,
            "lr": draw.choice((1e-4, 1e-3, 3e-3, 1e-2)),
            "clip": draw.choice((0.1, 1.0)),
            "weight_decay": draw.choice((0.0, 0.1)),
            "schedule": draw.choice(("constant", "linear", "cosine")),
        },
        "batch": {"global_samples": draw.choice((1, 2, 3, 5, 8))},
        "seed": draw.randint(0, 99),
        "epochs": 2,
    }
