"""An optimizer and a schedule from another package, used in training by the command line."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from lorafusion_jax.cli.main import run
from lorafusion_jax.plugins import find, not_known

SOURCE = """
import jax.numpy as jnp
import optax

from lorafusion_jax.extend import Optimizer, Schedule


def build(lr, weight_decay, numbers):
    return optax.chain(
        optax.add_decayed_weights(weight_decay), optax.scale(numbers["gain"]), optax.scale_by_learning_rate(lr)
    )


GAIN = Optimizer(build=build, states_per_weight=0, options={"gain": 1.0})
STAIRS = Schedule(build=lambda lr, ratio, steps: lambda step: jnp.where(step < steps // 2, lr, lr * ratio))
NOTHING = 5
"""
POINTS = {
    "lorafusion_jax.optimizers": {"gain": "GAIN", "nothing": "NOTHING", "gone": "GONE"},
    "lorafusion_jax.schedules": {"stairs": "STAIRS"},
}


@pytest.fixture
def job(install, write_rows, write_job):
    install("toy_optimizer", SOURCE, POINTS)

    def make(optim: dict):
        fields = {
            "data": {"train": write_rows("law.jsonl", 12, 0, 20)}, "batch": {"global_samples": 4},
            "lora": {"rank": 4, "targets": ["q_proj"]},
        }  # fmt: skip
        plain = {"name": "sgd", "schedule": "constant", "warmup": 0, "lr": 0.05, "clip": 0}
        return write_job([{"name": "law", **fields, "optim": optim}, {"name": "plain", **fields, "optim": plain}])

    return make


def test_trains_to_a_peft_folder_and_computes_what_it_says(job, tmp_path, capsys):
    """Gradient times gain 2 at rate 0.025 is plain gradient descent at 0.05: both adapters see the same samples."""
    optim = {"name": "gain", "options": {"gain": 2}, "schedule": "stairs", "min_lr_ratio": 1, "warmup": 0}
    path = job(optim | {"lr": 0.025, "clip": 0})
    assert run(["train", str(path), "--out", str(tmp_path / "run")]) == 0, capsys.readouterr().err
    toy, plain = (
        load_file(tmp_path / "run" / "adapters" / name / "latest" / "adapter_model.safetensors")
        for name in ("law", "plain")
    )
    assert any(np.any(toy[key]) for key in toy if "lora_B" in key)
    for key in toy:
        np.testing.assert_allclose(toy[key], plain[key], rtol=1e-6, atol=1e-8)  # one product more, rounded


def test_memory_counts_its_state(job, capsys):
    needed = {}
    for name in ("gain", "adamw"):
        assert run(["plan", str(job({"name": name})), "--json"]) == 0
        needed[name] = json.loads(capsys.readouterr().out)["memory"]["stages"][0]["optimizers"]
    assert needed["gain"] < needed["adamw"]


@pytest.mark.parametrize(
    ("optim", "says"),
    [
        ({"name": "adamv"}, "did you mean 'adamw'"),
        ({"name": "gain", "options": {"gian": 2}}, "gain"),
        ({"name": "adamw", "options": {"gain": 2}}, "reads none"),
        ({"schedule": "stair"}, "did you mean 'stairs'"),
        ({"warmup": 1.5}, "a whole number of steps"),
        ({"name": "nothing"}, "toy_optimizer"),
        ({"name": "gone"}, "toy_optimizer"),
    ],
)
def test_what_does_not_exist_or_load_is_refused_with_its_place(job, capsys, optim, says):
    assert run(["check", str(job(optim))]) == 2
    shown = capsys.readouterr().err
    assert "error[" in shown
    assert says in shown
    assert "Traceback" not in shown
    assert "?." not in shown


def test_a_package_cannot_replace_what_is_built_in(install):
    install("toy_thief", "ADAM = 5", {"lorafusion_jax.optimizers": {"adamw": "ADAM"}})
    assert find("lorafusion_jax.optimizers", {"adamw": 1}, "adamw", int) == 1
    assert not_known("lorafusion_jax.optimizers", {"adamw": 1}, "adamw") is None
