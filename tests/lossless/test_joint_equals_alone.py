"""The main promise: joint training equals separate training."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from more_cases import nightly
from small_jobs import write_job, write_rows

from lorafusion_jax.config import load_config
from lorafusion_jax.peft.folder import read_adapter
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.training import RunFolder, train

# float32 on one device: the only differences allowed are orders of float32 sums (about 1e-7 each) that the optimizer
# carries along for a few steps. Adam divides by the root of the second moment, so they grow by a small factor.
TOLERANCE = 1e-5

ADAPTERS = {
    "med": {  # with the others, on all linears
        "lora": {"rank": 7, "alpha": 7, "dropout": 0.3, "rslora": True, "targets": ["q_proj", "k_proj", "up_proj"]},
        "optim": {"lr": 3e-3, "weight_decay": 0.1},
        "batch": {"global_samples": 5},
        "seed": 2,
        "epochs": 2,
    },
    "chat": {
        "lora": {"rank": 16, "alpha": 16, "dropout": 0.0, "targets": ["q_proj", "v_proj", "down_proj"]},
        "optim": {"name": "adafactor", "lr": 1e-2, "clip": 0.5, "schedule": "linear"},
        "batch": {"global_samples": 2},
        "seed": 3,
    },
    "code": {
        "lora": {"rank": 2, "alpha": 4, "dropout": 0.05, "targets": ["o_proj", "gate_proj"]},
        "optim": {"name": "lion", "lr": 1e-4, "schedule": "constant"},
        "batch": {"global_samples": 8},
        "seed": 4,
    },
}

PAIR = ("chat", "code")
LARGE = {"batch": {"capacity_tokens": 512, "tile_tokens": 32}, "train": {"remat": "nothing"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A finished run."""

    folder: Path
    weights: dict[str, dict]  # of each adapter

    def losses(self, name: str) -> list[float]:
        rows = read_rows(self.folder / "metrics.jsonl")
        return [row["loss"] for row in rows if row["kind"] == "step" and row["adapter"] == name]


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_base) -> Callable[..., Done]:
    """run(names, **sections) → the run of these adapters, trained once for all tests."""
    folder, done = tmp_path_factory.mktemp("runs"), {}

    def trained(names, **sections) -> Done:
        key = str((*names, sections))
        if key not in done:
            entries = [
                {"name": name, "data": {"train": write_rows(folder, name, 14)}, **ADAPTERS[name]} for name in names
            ]
            out = folder / f"run-{len(done)}"
            assert train(load_config(write_job(folder, tiny_base, entries, **sections)), out).exit_code == 0
            weights = {name: read_adapter(RunFolder(out).latest(name))[1] for name in names}
            done[key] = Done(folder=out, weights=weights)
        return done[key]

    return trained


def worst_difference(a: dict, b: dict) -> float:
    """Largest ‖x - y‖ / ‖y‖ of all tensors, A and B apart: initial values of A are larger than all that is learned."""
    assert a.keys() == b.keys()
    pairs = [pair for key in a for pair in zip(a[key], b[key], strict=True)]
    return max(float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in pairs)


@pytest.mark.parametrize(
    ("name", "sections"),
    [("chat", LARGE), *(nightly(name, {}) for name in ADAPTERS), *(nightly(name, LARGE) for name in ("med", "code"))],
)
def test_joint_equals_separate_training(run, name, sections):
    """Whoever shares a microbatch, and whatever backward computes again."""
    joint, alone = run(ADAPTERS), run([name], **sections)
    assert worst_difference(joint.weights[name], alone.weights[name]) < TOLERANCE
    learnt = max(float(np.abs(b).max()) for _, b in joint.weights[name].values())
    assert learnt > 1e-4, "it learned nothing, so this says nothing"
    np.testing.assert_allclose(joint.losses(name), alone.losses(name), rtol=TOLERANCE)  # those that are reported


@pytest.mark.nightly
def test_packing_does_not_change_the_result(run):
    small, large = run(ADAPTERS), run(PAIR, **LARGE)
    for name in PAIR:
        assert worst_difference(small.weights[name], large.weights[name]) < TOLERANCE
        np.testing.assert_allclose(small.losses(name), large.losses(name), rtol=TOLERANCE)


def test_the_plan_is_executed_exactly(run):
    folder = run(ADAPTERS).folder
    plan = RunFolder(folder).read_plan()
    rows = read_rows(folder / "metrics.jsonl")
    steps = {
        name: [row["step"] for row in rows if row["kind"] == "step" and row["adapter"] == name] for name in ADAPTERS
    }
    assert steps == {job.name: list(range(1, job.num_batches + 1)) for job in plan.jobs}
    assert json.loads((folder / "run.json").read_text())["plan"] == plan.digest
