"""Adapters of different objectives and kinds in the same microbatches: each ends as alone, and disturbs no other."""

from __future__ import annotations

import json
import random
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import small_jobs
from more_cases import nightly
from safetensors.numpy import load_file

from lorafusion_jax.checkpoint.requests import write_addition
from lorafusion_jax.checkpoint.verify_folder import verify_folder
from lorafusion_jax.cli.main import run
from lorafusion_jax.config import load_config
from lorafusion_jax.config.join import read_joining
from lorafusion_jax.report.measured import reference_share
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.session import references
from lorafusion_jax.session.references import run_passes
from lorafusion_jax.session.session import Session
from lorafusion_jax.training import RunFolder, resume, train
from lorafusion_jax.training.verify import verify_exports

pytestmark = pytest.mark.usefixtures("kept_programs")
TOLERANCE = 1e-5  # float32 sums in another order, carried along by Adam for a few steps
LR = 2e-3
NAMES = ("law", "dpo", "kto", "grpo", "reward")
OBJECTIVES = {
    "law": {"name": "sft"},
    "dpo": {"name": "dpo", "loss": ["sigmoid", "hinge"], "sft": 0.1},
    "kto": {"name": "kto", "group": 2},
    "grpo": {"name": "grpo", "beta": 0.05},
    "reward": {"name": "reward", "center": 0.01},
}
KINDS = {"dpo": "dora", "kto": "vera"}  # the others: lora
GLOBAL = {"law": 4, "dpo": 3, "kto": 2, "grpo": 4, "reward": 3}
COUNT = 12  # rows of each


def write_data(folder: Path) -> None:
    """Writes COUNT rows for each objective."""
    draw = random.Random(3)

    def text(most: int = 8) -> str:
        return " " + " ".join(draw.choices(small_jobs.WORDS, k=draw.randint(1, most)))

    pairs = [{"prompt": text(), "chosen": text(), "rejected": text() + " no"} for _ in range(COUNT)]
    labelled = [{"prompt": text(), "completion": text(), "label": number % 3 > 0} for number in range(COUNT)]
    sampled = [{"prompt": text(), "completion": text(), "advantage": draw.gauss(0, 1)} for _ in range(COUNT)]
    better = [row | {"margin": draw.random()} for row in pairs]
    for name, rows in {"dpo": pairs, "reward": better, "kto": labelled, "grpo": sampled}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small_jobs.write_rows(folder, "law", COUNT, longest=16)


@pytest.fixture(scope="module")
def job(tmp_path_factory, tiny_base):
    """job(names, sections, name={changes of an adapter}) → job file."""
    folder = tmp_path_factory.mktemp("objectives")
    write_data(folder)

    def make(names=NAMES, sections=None, **changes) -> Path:
        entries = [
            {
                "name": name,
                "data": {"train": f"{name}.jsonl"} | ({"eval": "dpo.jsonl"} if name == "dpo" else {}),
                "objective": OBJECTIVES[name],
                "lora": {"kind": KINDS.get(name, "lora")},
                "batch": {"global_samples": GLOBAL[name]},
                "seed": NAMES.index(name),
            }
            | changes.get(name, {})
            for name in names
        ]
        base = {
            "optim": {"lr": LR, "schedule": "constant", "warmup": 0},
            "lora": {"rank": 4, "dropout": 0.0, "targets": ["q_proj"]},
            "batch": {"capacity_tokens": 256, "tile_tokens": 16},
        }
        return small_jobs.write_job(folder, tiny_base, entries, **base, **(sections or {}))

    return make


@pytest.fixture(scope="module")
def joint(job, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "joint"
    assert run(["train", str(job()), "--out", str(out)]) == 0
    return out


def trained(file: Path, out: Path) -> Path:
    assert run(["train", str(file), "--out", str(out)]) == 0
    return out


def weights(folder: Path, name: str) -> dict[str, np.ndarray]:
    return load_file(folder / "adapters" / name / "latest" / "adapter_model.safetensors")


def steps(folder: Path, name: str) -> list[dict]:
    rows = [row for row in read_rows(folder / "metrics.jsonl") if row["kind"] == "step" and row["adapter"] == name]
    return [{key: value for key, value in row.items() if key != "time"} for row in rows]


def assert_close(actual_run: Path, other: Path, name: str, *, but: int = 0) -> None:
    """Compares losses and weights, but for some elements of each tensor, which differ by one step at most."""
    for key, wanted in weights(other, name).items():
        apart = np.sort(np.abs(weights(actual_run, name)[key] - wanted), axis=None)
        assert np.linalg.norm(apart[: len(apart) - but]) <= TOLERANCE * np.linalg.norm(wanted), (name, key)
        assert but == 0 or apart[-1] <= max(LR, TOLERANCE * np.linalg.norm(wanted)), (name, key)
    for row, same in zip(steps(actual_run, name), steps(other, name), strict=True):
        np.testing.assert_allclose(row["loss"], same["loss"], rtol=TOLERANCE)


def test_all_objectives_meet_in_a_microbatch_and_learn(joint):
    slots = [{ref.adapter for ref in slot.samples} for slot in RunFolder(joint).read_plan().slots]
    assert any(len(adapters) >= 3 for adapters in slots)
    for name in NAMES:
        changed = [array for key, array in weights(joint, name).items() if "lora_B" in key or "lambda_b" in key]
        assert any(map(np.any, changed))
        assert all(np.isfinite(row["loss"]) for row in steps(joint, name))
    assert {"rewards/chosen", "rewards/accuracies", "logps/rejected"} <= steps(joint, "dpo")[0].keys()
    assert {"kl", "rewards/chosen"} <= steps(joint, "kto")[0].keys()
    assert {"accuracy", "margin", "mean_reward"} <= steps(joint, "reward")[0].keys()
    assert steps(joint, "grpo")[0]["kl"] == pytest.approx(0, abs=1e-6)
    judge = json.loads((joint / "adapters" / "reward" / "latest" / "adapter_config.json").read_text())
    assert (judge["task_type"], judge["modules_to_save"]) == ("SEQ_CLS", ["score"])


def test_an_exported_folder_has_the_held_out_loss_of_the_end(joint):
    checks = verify_exports(joint)
    assert {name: check.same for name, check in checks.items()} == {"dpo": True}


# By default, objective/test_against_trl.py compares adapters of a joint run with those of TRL, and tests in
# extending/ compare objectives of other packages alone, jointly, on stages and on replicas.
@pytest.mark.parametrize("name", [nightly(name) for name in NAMES])
def test_joint_is_alone(name, joint, job, tmp_path):
    assert_close(joint, trained(job((name,)), tmp_path / name), name)


@pytest.mark.parametrize("name", [nightly(name) for name in NAMES])
def test_verify_accepts_every_objective(name, joint, capsys):
    assert run(["verify", str(joint), name, "--steps", "2"]) == 0, capsys.readouterr().out


def test_other_settings_of_one_change_no_bit_of_the_others(joint, job, tmp_path):
    """Learning rates are arguments of the programs, so both runs share them."""
    other = trained(job(dpo={"optim": {"lr": 1e-2}}), tmp_path / "other")
    for name in NAMES:
        same = [np.array_equal(array, weights(other, name)[key]) for key, array in weights(joint, name).items()]
        assert all(same) == (name != "dpo"), name


@pytest.mark.nightly
def test_two_stages_and_two_replicas_are_one(joint, job, tmp_path):
    several = trained(job(sections={"mesh": {"stages": 2, "data": 2}}), tmp_path / "several")
    for name in NAMES:
        assert_close(several, joint, name)


def test_resumed_run_is_the_unbroken_one(joint, job, tmp_path):
    """With `reference: start` adapters have left their reference when the run is cut, and VeRA's pair is a folder's."""

    def again(name: str) -> dict:
        folder = str(joint / "adapters" / name / "latest")
        return {"lora": {"kind": KINDS.get(name, "lora"), "init_from": folder, "dropout": 0.0}}

    sections = {"save": {"every_steps": 4}}
    file = job(sections=sections, dpo=again("dpo"), kto=again("kto"), reward=again("reward"))
    whole = trained(file, tmp_path / "whole")
    record = json.loads((whole / "run.json").read_text())["references"]
    assert {name: record[name]["of"] for name in record} == {
        "dpo": "dpo at its start",
        "kto": "kto at its start",
        "grpo": "the base",
    }

    def power_cut(event) -> None:
        if event.kind == "step" and event.adapter == "dpo" and event.step == 3:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        train(load_config(file), tmp_path / "cut", listeners=[power_cut])
    assert run(["resume", str(tmp_path / "cut")]) == 0
    for name in NAMES:
        assert steps(tmp_path / "cut", name) == steps(whole, name)
        for key, wanted in weights(whole, name).items():
            np.testing.assert_array_equal(weights(tmp_path / "cut", name)[key], wanted)
    assert not any(check.damage for check in verify_folder(whole))
    file = whole / "references" / "dpo.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    (damaged,) = (check for check in verify_folder(whole) if check.damage)
    assert damaged.damage == ("references/dpo.safetensors: its content differs from its digest",)


@contextmanager
def cut_references():
    """The process ends, as by a kill, when one microbatch of the references of a joining adapter is computed."""

    def begin(passes, executor):
        steps = run_passes(passes, executor)
        next(steps)
        yield
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(references, "run_passes", begin)
        yield


def test_an_adapter_that_joins_gets_its_reference_while_others_train(joint, job, tmp_path, monkeypatch):
    """The run is cut twice before the adapter has joined. Waits at a step make the rest the same on any machine."""
    config = load_config(job(("law",), law={"epochs": 10}))
    joining = read_joining(job(("dpo",)), config)
    opened, open_passes = threading.Semaphore(0), Session.open_passes

    def open_and_tell(*args):
        try:
            return open_passes(*args)
        finally:
            opened.release()

    monkeypatch.setattr(Session, "open_passes", open_and_tell)

    def ask(event) -> None:
        if event.kind == "step" and event.step == 1:
            write_addition(tmp_path / "run", joining)
        if event.kind == "phase" and "preparing the references" in event.text:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        train(config, tmp_path / "run", listeners=[ask])
    opened.acquire()
    asked: list[int] = []

    def wait_once(event) -> None:
        if event.kind == "phase" and "preparing the references" in event.text:
            asked.append(event.slot)
        if event.kind == "step" and asked:
            asked.clear()
            opened.acquire()

    with cut_references(), pytest.raises(KeyboardInterrupt):
        resume(tmp_path / "run", listeners=[wait_once])
    assert not [row for row in read_rows(tmp_path / "run" / "events.jsonl") if row["kind"] == "references"]
    asked.clear()
    assert resume(tmp_path / "run", listeners=[wait_once]).exit_code == 0
    assert_close(tmp_path / "run", joint, "dpo")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["references"]["dpo"]["of"] == "the base"
    rows = read_rows(tmp_path / "run" / "events.jsonl")
    (computed,) = (row for row in rows if row["kind"] == "references")
    assert computed["adapters"] == ["dpo"]
    assert 0 < computed["seconds"] <= computed["beside_s"]
    taken_of = reference_share(rows, rows[-1]["seconds"])
    assert taken_of is not None
    assert 0 < taken_of[0] < 1
    (joined,) = (row for row in rows if row.get("action") == "add")
    assert joined["slot"] > computed["slot"] - 2
    taken = [row["slot"] for row in steps(tmp_path / "run", "law")]
    assert sum(slot <= joined["slot"] for slot in taken) >= 4


def test_a_kill_while_references_are_computed_changes_no_bit(job, tmp_path):
    """The adapter joins a run that has ended, so that it joins at the same slot whenever its references are ready."""
    config = load_config(job(("law",)))
    plain = {"objective": {"name": "dpo"}, "lora": {}, "data": {"train": "dpo.jsonl"}}
    joining = read_joining(job(("dpo",), dpo=plain), config)
    assert train(config, tmp_path / "run").exit_code == 0
    write_addition(tmp_path / "run", joining)
    shutil.copytree(tmp_path / "run", tmp_path / "whole", symlinks=True)
    assert resume(tmp_path / "whole").exit_code == 0
    with cut_references(), pytest.raises(KeyboardInterrupt):
        resume(tmp_path / "run")
    assert [adapter.name for adapter in RunFolder(tmp_path / "run").read_config().adapters] == ["law"]
    assert resume(tmp_path / "run").exit_code == 0
    for name in ("law", "dpo"):
        assert steps(tmp_path / "run", name) == steps(tmp_path / "whole", name) != []
        for key, wanted in weights(tmp_path / "whole", name).items():
            np.testing.assert_array_equal(weights(tmp_path / "run", name)[key], wanted)


@pytest.mark.parametrize("quantize", [nightly("fp8"), nightly("nf4")])
def test_joint_is_alone_on_a_quantised_base(quantize, job, tmp_path):
    joint = trained(small_jobs.store_base_as(quantize, job()), tmp_path / "joint")
    for name in NAMES:
        assert_close(joint, trained(small_jobs.store_base_as(quantize, job((name,))), tmp_path / name), name)


@pytest.mark.parametrize("quantize", [nightly("fp8"), nightly("nf4")])
def test_stages_and_replicas_are_one_on_a_quantised_base(quantize, job, tmp_path):
    """Gradients at equal weights decide; of the weights after some steps one element of a tensor may stand apart.

    Adam divides a gradient by its own size, so an element whose gradient is below the rounding of its sum moves by a
    rounding error times the learning rate. On nf4, one of the 192 elements of an A of the DoRA adapter had a gradient
    of 5.7e-9 at its first step, and 6.1e-9 on the mesh, where the others have 1e-3 and agree to 6e-7 of their norm:
    this element alone was 1.7e-5 apart.
    """
    joint = trained(small_jobs.store_base_as(quantize, job()), tmp_path / "joint")
    several = job(sections={"mesh": {"stages": 2, "data": 2}})
    several = trained(small_jobs.store_base_as(quantize, several), tmp_path / "several")
    for name in NAMES:
        assert_close(several, joint, name, but=1)
        assert run(["verify", str(several), name, "--steps", "2"]) == 0  # gradients at equal weights
