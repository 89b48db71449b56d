"""Adapters of all built-in kinds in one job: each trains as alone, resumes bitwise and is exported as what it is."""

from __future__ import annotations

import json

import numpy as np
import pytest
import small_jobs
from more_cases import nightly
from small_jobs import exported, largest_difference

from lorafusion_jax.cli.main import run
from lorafusion_jax.config import load_config
from lorafusion_jax.training import train
from lorafusion_jax.training.verify import verify_exports

pytestmark = pytest.mark.usefixtures("kept_programs")
KINDS = {"plain": "lora", "dora": "dora", "vera": "vera", "fa": "lora-fa"}


@pytest.fixture(scope="module")
def job(tmp_path_factory, tiny_base):
    folder = tmp_path_factory.mktemp("job")
    rows = {name: small_jobs.write_rows(folder, name, 8, longest=12) for name in KINDS}

    def make(*names: str, **sections):
        adapters = [
            {
                "name": name,
                "data": {"train": rows[name], "eval": rows[name]},
                "batch": {"global_samples": 4},
                "lora": {"kind": KINDS[name], "rank": 3},
                "optim": {"lr": 0.02, "schedule": "constant"} | ({"lr_ratio": 4} if name == "plain" else {}),
            }
            for name in names
        ]
        return small_jobs.write_job(folder, tiny_base, adapters, **{"save": {"every_steps": 1}} | sections)

    return make


@pytest.fixture(scope="module")
def joint(job, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "joint"
    assert run(["train", str(job(*KINDS)), "--out", str(out)]) == 0
    return out


def test_all_begin_at_the_base_and_folders_hold_what_was_trained(joint):
    rows = [json.loads(line) for line in (joint / "metrics.jsonl").read_text().splitlines()]
    for name in KINDS:
        evals = [row["eval_loss"] for row in rows if row["kind"] == "eval" and row["adapter"] == name]
        assert evals[-1] < evals[0]
    for check in verify_exports(joint).values():
        assert check.delta < 1e-6 * check.trained
    configs = {name: json.loads((joint / f"adapters/{name}/latest/adapter_config.json").read_text()) for name in KINDS}
    assert [configs[name]["peft_type"] for name in KINDS] == ["LORA", "LORA", "VERA", "LORA"]
    assert [configs[name].get("use_dora") for name in KINDS] == [False, True, None, False]
    assert {key for key in exported(joint, "vera") if "layers" not in key} == {"base_model.vera_A", "base_model.vera_B"}


@pytest.mark.parametrize("mesh", [nightly({}), nightly({"stages": 2, "data": 2})], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_joint_equals_alone(joint, job, tmp_path, name, mesh):
    assert run(["train", str(job(name, mesh=mesh)), "--out", str(tmp_path / "alone")]) == 0
    assert largest_difference(exported(joint, name), exported(tmp_path / "alone", name)) < 1e-5


def test_dora_alone_equals_dora_among_others(joint, job, tmp_path):
    assert run(["train", str(job("dora")), "--out", str(tmp_path / "alone")]) == 0
    assert largest_difference(exported(joint, "dora"), exported(tmp_path / "alone", "dora")) < 1e-5


def test_resumed_run_equals_uninterrupted_run(joint, job, tmp_path):
    def power_cut(event) -> None:
        if event.kind == "step" and event.adapter == "dora" and event.step == 2:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        train(load_config(job(*KINDS)), tmp_path / "cut", listeners=[power_cut])
    assert run(["resume", str(tmp_path / "cut")]) == 0
    for name in KINDS:
        ours, theirs = exported(tmp_path / "cut", name), exported(joint, name)
        for key in theirs:
            np.testing.assert_array_equal(ours[key], theirs[key])


def test_dora_has_no_dropout(job, capsys):
    assert run(["check", str(job("dora")), "adapters.dora.lora.dropout=0.1"]) == 2
    assert "adapters of kind dora have none" in " ".join(capsys.readouterr().err.split())
