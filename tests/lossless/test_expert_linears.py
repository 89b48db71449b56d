"""Joint = alone and isolation where one adapter is on every linear of a model of experts, and on the experts."""

from __future__ import annotations

import numpy as np
import pytest
from adapter_folders import distance, weights
from small_jobs import write_job, write_rows

from lorafusion_jax.config import load_config
from lorafusion_jax.families.experts import Experts, Router
from lorafusion_jax.training import RunFolder, train

TOLERANCE = 1e-5  # sums of float32 in another order, carried along by a few steps
RATES = {"sea": 0.05, "sky": 0.05}
TARGETS = ["all-linear", "experts"]
NAMES = {"q_proj", "k_proj", "v_proj", "o_proj", "experts_gate_up_proj", "experts_down_proj"}


@pytest.fixture(scope="module")
def run(make_base, tmp_path_factory):
    """run(rates) → the folder of a run of these adapters at these rates of learning, on a small Qwen3-MoE."""
    folder = tmp_path_factory.mktemp("experts")
    experts = Experts(width=32, inner=12, count=4, active=2, router=Router(normalise=False))
    base = make_base(folder / "base", family="qwen3_moe", qk_norm=True, experts=experts)
    done: dict[str, RunFolder] = {}

    def run(rates) -> RunFolder:
        if (key := str(rates)) not in done:
            adapters = [
                {
                    "name": name,
                    "data": {"train": write_rows(folder, name, 6, longest=8)},
                    "lora": {"rank": 3, "targets": TARGETS, "dropout": 0},
                    "optim": {"name": "sgd", "lr": rate, "clip": 0, "schedule": "constant"},
                    "batch": {"global_samples": 3},
                }
                for name, rate in rates.items()
            ]
            out = folder / f"run-{len(done)}"
            outcome = train(load_config(write_job(folder, base, adapters)), out)
            assert outcome.exit_code == (0 if max(rates.values()) < 1 else 3)
            done[key] = RunFolder(out)
        return done[key]

    return run


def test_joint_training_of_all_linears_and_experts_equals_separate_training(run):
    joint = weights(run(RATES), "sky")
    assert {key.split(" ")[0].rpartition(".")[2] for key in joint} == NAMES
    assert all(joint[key].any() for key in joint if key.endswith(" 1")), "B is zero: nothing was learned"
    assert distance(joint, weights(run({"sky": RATES["sky"]}), "sky")) < TOLERANCE


def test_an_adapter_that_diverges_on_all_of_them_leaves_the_other_bitwise(run):
    broken, healthy = weights(run(RATES | {"sea": 1e30}), "sky"), weights(run(RATES), "sky")
    assert broken.keys() == healthy.keys()
    for key in healthy:
        np.testing.assert_array_equal(broken[key], healthy[key], err_msg=key)
