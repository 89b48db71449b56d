"""The product's promise: an adapter trained with others is the adapter trained alone."""

from __future__ import annotations

import json

import numpy as np

from lorafusion_jax.checkpoint.peft import read_adapter
from lorafusion_jax.config import load_config
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.training import RunFolder, train

# float32 on one device: the only differences allowed are orders of float32 sums (about 1e-7 each) that the optimizer
# carries along for a few steps. Adam divides by the root of the second moment, so they grow by a small factor.
TOLERANCE = 1e-5

ADAPTERS = {
    "law": {
        "lora": {"rank": 4, "alpha": 8, "dropout": 0.1},
        "optim": {"lr": 1e-3},
        "batch": {"global_samples": 3},
        "seed": 1,
    },
    "med": {
        "lora": {"rank": 7, "alpha": 7, "dropout": 0.3, "rslora": True},
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
        "lora": {"rank": 2, "alpha": 4, "dropout": 0.05},
        "optim": {"name": "lion", "lr": 1e-4, "schedule": "constant"},
        "batch": {"global_samples": 8},
        "seed": 4,
    },
}


def run(names, write_job, write_rows, out, **sections) -> dict[str, dict]:
    entries = [{"name": name, "data": {"train": write_rows(name, 14)}, **ADAPTERS[name]} for name in names]
    result = train(load_config(write_job(entries, **sections)), out)
    assert result.exit_code == 0
    return {name: read_adapter(RunFolder(out).latest(name))[1] for name in names}


def relative_difference(a: dict, b: dict) -> float:
    assert a.keys() == b.keys()
    difference = sum(float(np.sum((x - y) ** 2)) for key in a for x, y in zip(a[key], b[key], strict=True))
    size = sum(float(np.sum(y**2)) for key in a for y in b[key])
    return (difference / size) ** 0.5


def test_joint_is_alone(write_job, write_rows, tmp_path):
    joint = run(ADAPTERS, write_job, write_rows, tmp_path / "joint")
    for name in ADAPTERS:
        alone = run([name], write_job, write_rows, tmp_path / name)
        assert relative_difference(joint[name], alone[name]) < TOLERANCE, name
        trained = [float(np.abs(b).max()) for _, b in joint[name].values()]
        assert max(trained) > 1e-4, f"{name} learned nothing, so the comparison says nothing"


def test_packing_does_not_change_the_result(write_job, write_rows, tmp_path):
    names = ["law", "med"]
    small = run(names, write_job, write_rows, tmp_path / "small", batch={"capacity_tokens": 128, "tile_tokens": 16})
    large = run(names, write_job, write_rows, tmp_path / "large", batch={"capacity_tokens": 512, "tile_tokens": 32})
    repeated = run(names, write_job, write_rows, tmp_path / "one", train={"block_layers": 1, "keep": "nothing"})
    for name in names:
        assert relative_difference(small[name], large[name]) < TOLERANCE
        assert relative_difference(small[name], repeated[name]) < TOLERANCE


def test_reported_losses_do_not_depend_on_packing(write_job, write_rows, tmp_path):
    run(["law"], write_job, write_rows, tmp_path / "small", batch={"capacity_tokens": 128, "tile_tokens": 16})
    run(["law", "code"], write_job, write_rows, tmp_path / "large", batch={"capacity_tokens": 512, "tile_tokens": 32})
    small, large = (
        [
            row["loss"]
            for row in read_rows(tmp_path / name / "metrics.jsonl")
            if row["kind"] == "step" and row["adapter"] == "law"
        ]
        for name in ("small", "large")
    )
    assert len(small) == 5  # 14 samples in batches of 3
    np.testing.assert_allclose(small, large, rtol=TOLERANCE)


def test_the_plan_is_executed_exactly(write_job, write_rows, tmp_path):
    run(["law", "chat"], write_job, write_rows, tmp_path / "run")
    plan = RunFolder(tmp_path / "run").read_plan()
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    steps = {
        name: [row["step"] for row in rows if row["kind"] == "step" and row["adapter"] == name]
        for name in ("law", "chat")
    }
    assert steps == {job.name: list(range(1, job.num_batches + 1)) for job in plan.jobs}
    assert json.loads((tmp_path / "run" / "run.json").read_text())["plan"] == plan.digest
