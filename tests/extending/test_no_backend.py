"""Checks and plans trace code of other packages on shapes, and start no device for it."""

from __future__ import annotations

import subprocess
import sys

import small_jobs

SOURCE = """
import jax
import jax.numpy as jnp
import numpy as np
import optax

from lorafusion_jax.extend import AdapterKind, Leaf, Objective, Optimizer, Schedule

SIGNED = AdapterKind(
    leaves=(
        Leaf(name="fall", axes=("K", "R"), init=lambda draw, shape: draw(int(np.prod(shape))).reshape(shape)),
        Leaf(name="climb", axes=("R", "N"), init=lambda draw, shape: np.zeros(shape, np.float32)),
        Leaf(name="loud", axes=("N",), init=lambda draw, shape: np.zeros(shape, np.float32)),
    ),
    low_rank=lambda its, sizes: (its["fall"], its["climb"]),
    column_scale=lambda kernel, its, sizes: 1 + its["loud"] * (kernel * kernel).sum(0) ** 0.5,
)
SQUARED = Objective(loss=lambda sample, options: (jnp.sum(sample.nll**2) / sample.tokens[0], {}))
SLOW = Optimizer(build=lambda lr, weight_decay, numbers: optax.sgd(lr), states_per_weight=0)
STEPS = Schedule(build=lambda lr, ratio, steps: lambda step: jnp.where(step < steps // 2, lr, lr * ratio))
"""
POINTS = {"adapter_kinds": "SIGNED", "objectives": "SQUARED", "optimizers": "SLOW", "schedules": "STEPS"}
CODE = """
import sys
from lorafusion_jax.cli.main import run
codes = [run([command, sys.argv[1]]) for command in ("check", "plan")]
from jax._src import xla_bridge
assert (codes, list(xla_bridge._backends)) == ([0, 0], []), (codes, xla_bridge._backends)
"""


def test_code_of_others_is_traced_without_a_device(install, tmp_path, tiny_base):
    points = {f"lorafusion_jax.{group}": {name.lower(): name} for group, name in POINTS.items()}
    install("toy_traced", SOURCE, points)
    rows = small_jobs.write_rows(tmp_path, "law", 6)
    adapter = {"name": "law", "data": {"train": rows}, "objective": {"name": "squared"}}
    lora, optim = {"kind": "signed", "rank": 3}, {"name": "slow", "schedule": "steps", "lr": 0.1}
    job = small_jobs.write_job(tmp_path, tiny_base, [adapter | {"lora": lora, "optim": optim}])
    done = subprocess.run([sys.executable, "-c", CODE, str(job)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
