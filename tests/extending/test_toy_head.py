"""Objectives from another package with heads of their own: one grades a text twice, with as many grades as a setting
says; one finds the passage of a question by two projections, of which one is constant."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import small_jobs
from more_cases import nightly
from safetensors.numpy import load_file

from lorafusion_jax.cli.main import run
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.training.verify import verify_exports

pytestmark = pytest.mark.usefixtures("kept_programs")

SOURCE = """
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from lorafusion_jax.extend import Leaf, Objective, Segment


def ramp(draw, shape):
    return (draw(int(np.prod(shape))).reshape(shape) - 0.5) / 4


@dataclass(frozen=True)
class Options:
    grades: int = 2
    delta: float = 0.5


def graded(sample, options):
    marks = jnp.stack([sample.numbers["clear"], sample.numbers["brief"]])[: options.grades]
    apart = jnp.abs(sample.score[0].reshape(-1) - marks)  # [grades]
    huber = jnp.where(apart < options.delta, apart**2 / 2, options.delta * (apart - options.delta / 2))
    return huber.sum(), {"apart": apart.mean()}


GRADE = Objective(
    segments=lambda row: (Segment(name="essay", text=row["essay"], learn="nothing"),),
    columns=("essay", "clear", "brief"), numbers=lambda row: {"clear": row["clear"], "brief": row["brief"]},
    loss=graded, metrics={"apart": "grades"}, options=Options, needs=frozenset({"score"}),
    head=lambda options: (
        Leaf(name="marks", axes=("D", options.grades), init=ramp, decay=False, lr_group="marks",
             peft_name="classifier.weight"),
    ),
    task="SEQ_CLS", defaults={"lora.dropout": 0.0},
)


def texts(rows):
    return [(Segment(name="passage", text=row["passage"]),
             Segment(name="question", prompt="", answer=row["question"], template=False, learn="nothing"))
            for row in rows]


def found(samples, options):
    passages = samples.hidden[:, 0] @ samples.head["compass"]
    questions = samples.hidden[:, 1] @ samples.head["anchor"] + samples.head["tilt"]
    likeness = jax.nn.log_softmax(questions @ passages.T, axis=1)
    return -jnp.diagonal(likeness).mean() + 0.01 * samples.nll[:, 0].sum(), {}


FIND = Objective(
    segments=texts, num_segments=2, columns=("passage", "question"), group=3, loss=found,
    needs=frozenset({"hidden"}),
    head=(
        Leaf(name="anchor", axes=("D", 5), init=ramp, trainable=False, peft_name="anchor.weight"),
        Leaf(name="compass", axes=("D", 5), init=ramp, peft_name="compass.weight"),
        Leaf(name="tilt", axes=(5,), init=ramp, peft_name="compass.bias"),
    ),
    task="FEATURE_EXTRACTION",
)
NOWHERE = Objective(
    segments=lambda row: (Segment(name="essay", text=row["essay"]),), columns=("essay",),
    loss=lambda sample, options: (sample.score.sum(), {}), needs=frozenset({"score"}),
    head=(Leaf(name="secret", axes=("D", 1), init=ramp, peft_name="secret"),),
)
HEADLESS = Objective(
    segments=lambda row: (Segment(name="essay", text=row["essay"]),), columns=("essay",),
    loss=lambda sample, options: (sample.score.sum(), {}), needs=frozenset({"score"}),
)
"""
POINTS = {"lorafusion_jax.objectives": {"grade": "GRADE", "find": "FIND", "nowhere": "NOWHERE", "headless": "HEADLESS"}}
NAMES = ("grade", "single", "find", "law")
TOLERANCE = 1e-5  # of float32 sums in another order, carried along by Adam for a few steps; as tests/lossless has it


@pytest.fixture(scope="module", autouse=True)
def _installed(install_for_module):
    install_for_module("toy_heads", SOURCE, POINTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("jobs")
    draw = random.Random(5)

    def text(most: int) -> str:
        return " ".join(draw.choices(small_jobs.WORDS, k=draw.randint(2, most)))

    essays = [{"essay": text(9), "clear": draw.random(), "brief": draw.random()} for _ in range(10)]
    passages = [{"passage": text(5), "question": text(3)} for _ in range(12)]
    for name, rows in {"essays": essays, "held": essays[:4], "passages": passages}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small_jobs.write_rows(folder, "law", 12, longest=10)
    return folder


@pytest.fixture(scope="module")
def job(folder, tiny_base):
    """job(names, sections, **changes of grade) → job file."""
    entries = {
        "grade": {
            "data": {"train": "essays.jsonl", "eval": "held.jsonl"}, "objective": {"name": "grade"},
            "batch": {"global_samples": 3}, "seed": 1,
        },
        "single": {
            "data": {"train": "essays.jsonl"}, "objective": {"name": "grade", "grades": 1},
            "batch": {"global_samples": 5}, "seed": 4,
        },
        "find": {
            "data": {"train": "passages.jsonl"}, "objective": {"name": "find"}, "batch": {"global_samples": 2},
            "seed": 2,
        },
        "law": {"data": {"train": "law.jsonl"}, "batch": {"global_samples": 4}, "seed": 3},
    }  # fmt: skip

    def make(names=NAMES, sections=None, **changes) -> str:
        chosen = [{"name": name, **entries[name], **(changes if name == "grade" else {})} for name in names]
        usual = {
            "optim": {"lr": 2e-3, "schedule": "constant", "warmup": 0},
            "batch": {"capacity_tokens": 256, "tile_tokens": 16},
            "data": {"max_length": 40},  # six texts of a group fit
            "lora": {"rank": 4, "dropout": 0.0, "targets": ["q_proj"]},
        }
        return str(small_jobs.write_job(folder, tiny_base, chosen, **usual | (sections or {})))

    return make


def trained(job_file: str, out: Path) -> Path:
    assert run(["train", job_file, "--out", str(out)]) == 0
    return out


def weights(folder: Path, name: str) -> dict[str, np.ndarray]:
    return load_file(folder / "adapters" / name / "latest" / "adapter_model.safetensors")


def head_of(folder: Path, name: str) -> dict[str, np.ndarray]:
    root = "base_model.model."
    return {key.removeprefix(root): array for key, array in weights(folder, name).items() if f"{root}model." not in key}


def steps(folder: Path, name: str, kind: str = "step") -> list[dict]:
    rows = [row for row in read_rows(folder / "metrics.jsonl") if row["kind"] == kind and row["adapter"] == name]
    return [{key: value for key, value in row.items() if key != "time"} for row in rows]


def assert_close(ours: Path, theirs: Path, name: str) -> None:
    for key, wanted in weights(theirs, name).items():
        apart = np.linalg.norm(weights(ours, name)[key] - wanted)
        assert apart <= TOLERANCE * np.linalg.norm(wanted), (name, key)
    for row, same in zip(steps(ours, name), steps(theirs, name), strict=True):
        np.testing.assert_allclose(row["loss"], same["loss"], rtol=TOLERANCE)


def assert_same(ours: Path, theirs: Path, name: str) -> None:
    assert steps(ours, name) == steps(theirs, name)
    for key, wanted in weights(theirs, name).items():
        np.testing.assert_array_equal(weights(ours, name)[key], wanted)


@pytest.fixture(scope="module")
def joint(job, tmp_path_factory):
    return trained(job(), tmp_path_factory.mktemp("runs") / "joint")


def test_folders_hold_the_heads(joint):
    assert {key: array.shape for key, array in head_of(joint, "grade").items()} == {"classifier.weight": (2, 32)}
    assert {key: array.shape for key, array in head_of(joint, "single").items()} == {"classifier.weight": (1, 32)}
    assert {key: array.shape for key, array in head_of(joint, "find").items()} == {
        "anchor.weight": (5, 32), "compass.weight": (5, 32), "compass.bias": (5,),
    }  # fmt: skip
    assert head_of(joint, "law") == {}
    settings = json.loads((joint / "adapters" / "find" / "latest" / "adapter_config.json").read_text())
    assert (settings["modules_to_save"], settings["task_type"]) == (["anchor", "compass"], "FEATURE_EXTRACTION")
    checks = verify_exports(joint)
    assert {name: check.same for name, check in checks.items()} == {"grade": True}
    assert steps(joint, "grade")[0]["loss_tokens"] == 0


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        nightly("grade", {"stages": 2}),
        ("find", {"data": 2}),
        nightly("grade", {}),
        nightly("find", {"stages": 2, "data": 2}),
    ],
)
def test_joint_is_alone_also_on_several_devices(name, mesh, joint, job, tmp_path):
    data = {"train": "essays.jsonl"}  # nothing held out: fewer programs
    assert_close(joint, trained(job((name,), {"mesh": mesh}, data=data), tmp_path / "alone"), name)


def test_what_one_does_changes_no_bit_of_the_others(joint, job, tmp_path, capsys):
    """An adapter whose numbers overflow fails; a constant leaf of a head is as it was drawn."""
    assert run(["train", job(optim={"lr": 1e30, "clip": 0}), "--out", str(tmp_path / "sick")]) == 3
    assert "grade  FAILED: gradient not finite" in capsys.readouterr().out
    for name in NAMES[1:]:
        assert_same(tmp_path / "sick", joint, name)
    fast = trained(job(optim={"lr": 2e-3, "lr_ratio": {"marks": 8}}), tmp_path / "fast")
    for name in NAMES[1:]:
        assert_same(fast, joint, name)
    moved = [np.abs(head_of(out, "grade")["classifier.weight"]).mean() for out in (joint, fast)]
    assert moved[1] > moved[0]


def test_the_head_learns_and_is_continued(joint, job, tmp_path, capsys):
    start = str(joint / "adapters" / "grade" / "latest")
    more = {"lora": {"init_from": start, "dropout": 0.0}, "epochs": 4, "optim": {"lr": 2e-3, "lr_ratio": {"marks": 5}}}
    out = trained(job(sections={"save": {"every_steps": 3}}, **more), tmp_path / "more")  # programs of the joint run
    evals = [row["eval_loss"] for row in steps(out, "grade", "eval")]
    assert evals[0] == pytest.approx(steps(joint, "grade", "eval")[-1]["eval_loss"], rel=1e-6)
    assert evals[-1] < evals[0] / 2
    # A folder without a head may start one; a folder with a head starts nothing that lacks it, or has another.
    plain = str(joint / "adapters" / "law" / "latest")
    assert run(["check", job(("grade",), lora={"init_from": plain})]) == 0
    assert run(["check", job(("grade",), lora={"init_from": start}, objective={"name": "find"})]) == 2
    capsys.readouterr()
    for changes, says in (
        ({"objective": {"name": "sft"}, "data": {"train": "law.jsonl"}}, "this one trains none"),
        ({"objective": {"name": "grade", "grades": 1}}, "misshapen: base_model.model.classifier.weight is [2, 32]"),
    ):
        assert run(["train", job(("grade",), lora={"init_from": start}, **changes), "--out", str(tmp_path / "no")]) == 2
        assert says in " ".join(capsys.readouterr().err.split())
        assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("name", [nightly("grade"), nightly("find")])
def test_verify_follows_the_first_steps(name, joint, capsys):
    assert run(["verify", str(joint), name, "--steps", "2"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "says"),
    [("nowhere", "secret of its head has no peft_name like 'score.weight'"), ("headless", "needs a score and has no")],
)
def test_heads_that_cannot_be_used_are_refused_before_the_first_step(name, says, job, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(["train", job(("grade",), objective={"name": name}), "--out", str(out)]) == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert not out.exists()
