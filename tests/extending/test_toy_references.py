"""Objectives from another package that no built-in resembles: one compares with a reference and reads numbers of its
row, one sees three rows at once and numbers of their tokens."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import small_jobs
from more_cases import nightly
from safetensors.numpy import load_file, save_file

from lorafusion_jax.cli.main import run
from lorafusion_jax.report.recorder import read_rows

pytestmark = pytest.mark.usefixtures("kept_programs")

SOURCE = """
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from lorafusion_jax.extend import Objective, Segment


# A reply should become `lift` nats per token likelier than it was; rows that are trusted count more.
def replies(row):
    return (Segment(name="reply", prompt=row["query"], answer=row["reply"]),)


def lifted(sample, options):
    gain = (sample.reference_nll[0] - sample.nll[0]) / sample.tokens[0]
    missing = sample.numbers["lift"] - gain
    return sample.numbers["trust"] * missing**2 + 0.1 * sample.nll[0] * sample.token_weight[0], {"gain": gain}


LIFT = Objective(
    segments=replies, columns=("query", "reply", "lift"), optional_columns=("trust",),
    numbers=lambda row: {"lift": row["lift"], "trust": row.get("trust", 1.0)},
    loss=lifted, metrics={"gain": "nats per token"}, needs=frozenset({"reference"}), defaults={"lora.dropout": 0.0},
)


# The texts of a group should be as likely, one against the other, as their grades say; some tokens count double.
@dataclass(frozen=True)
class Options:
    size: int = 3


def texts(rows):
    return [
        (
            Segment(name="body", prompt="", answer=row["body"], template=False, learn="all",
                    values={"stress": row["stress"]}),
            Segment(name="title", text=row["title"]),
        )
        for row in rows
    ]


def ranked(samples, options):
    of_row = samples.segment // 2 == jnp.arange(options.size)[:, None]
    body = of_row & samples.mask & (samples.segment % 2 == 0)
    said = jnp.where(body, samples.logprobs * (1 + samples.values["stress"]), 0.0).sum(1) / samples.tokens[:, 0]
    wanted = jax.nn.softmax(samples.numbers["grade"])
    return -(wanted * jax.nn.log_softmax(said - samples.nll[:, 1] / 50)).sum(), {"spread": said.max() - said.min()}


RANK = Objective(
    segments=texts, num_segments=2, columns=("body", "title", "grade", "stress"),
    numbers=lambda row: {"grade": float(row["grade"])}, group=lambda options: options.size,
    loss=ranked, metrics={"spread": "nats"}, needs=frozenset({"logprobs"}), options=Options,
)
"""
POINTS = {"lorafusion_jax.objectives": {"lift": "LIFT", "rank": "RANK"}}
WORDS = ("adapter", "base", "batch", "cache", "file", "graph", "kernel", "layer", "loss", "mask", "model", "norm")
TWO_STAGES = {"stages": 2}  # of every run of `lift` alone: their programs are shared
NOT_HELD_OUT = {"train": "lift.jsonl"}
TOLERANCE = 1e-5  # of float32 sums in another order, carried along by Adam for a few steps; as tests/lossless has it


def text(draw: random.Random, most: int = 8) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))


def write_lifts(folder: Path, name: str, count: int) -> str:
    draw = random.Random(name)
    rows = [
        {"query": text(draw), "reply": f" {text(draw)}", "lift": draw.random(), "trust": draw.choice([0.5, 2])}
        for _ in range(count)
    ]
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def write_grades(folder: Path, name: str, count: int) -> str:
    draw = random.Random(name)
    rows = [
        {"body": text(draw, 4), "title": text(draw, 4), "grade": draw.randint(0, 3), "stress": draw.random()}
        for _ in range(count)
    ]
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


@pytest.fixture(scope="module", autouse=True)
def _installed(install_for_module):
    install_for_module("toy_references", SOURCE, POINTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Data that all tests use, whoever is in a job."""
    folder = tmp_path_factory.mktemp("jobs")
    write_lifts(folder, "lift.jsonl", 10)
    write_lifts(folder, "held.jsonl", 4)
    write_grades(folder, "rank.jsonl", 14)
    small_jobs.write_rows(folder, "law", 12, longest=10)
    return folder


@pytest.fixture(scope="module")
def job(folder, tiny_base):
    """job(names, sections, **changes of lift) → job file."""
    lora = {"rank": 4, "alpha": 8, "targets": ["q_proj"]}
    entries = {
        "lift": {
            "data": {"train": "lift.jsonl", "eval": "held.jsonl"}, "objective": {"name": "lift"}, "lora": lora,
            "batch": {"global_samples": 3}, "seed": 1,
        },
        "rank": {
            "data": {"train": "rank.jsonl"}, "objective": {"name": "rank"}, "lora": lora,
            "batch": {"global_samples": 2}, "seed": 2,
        },
        "law": {
            "data": {"train": "law.jsonl"}, "lora": lora | {"dropout": 0.1}, "batch": {"global_samples": 4}, "seed": 3,
        },
    }  # fmt: skip

    def make(names=("lift", "rank", "law"), sections=None, **changes) -> str:
        chosen = [{"name": name, **entries[name], **(changes if name == "lift" else {})} for name in names]
        optim = {"lr": 2e-3, "schedule": "constant", "warmup": 0}
        batch = {"capacity_tokens": 256, "tile_tokens": 16}
        usual = {"optim": optim, "batch": batch, "data": {"max_length": 40}}  # six texts of a group fit
        return str(small_jobs.write_job(folder, tiny_base, chosen, **usual | (sections or {})))

    return make


def trained(job_file: str, out: Path, capsys) -> Path:
    code = run(["train", job_file, "--out", str(out)])
    assert code == 0, capsys.readouterr().err
    return out


def weights(folder: Path, name: str) -> dict[str, np.ndarray]:
    return load_file(folder / "adapters" / name / "latest" / "adapter_model.safetensors")


def steps(folder: Path, name: str, kind: str = "step") -> list[dict]:
    rows = [row for row in read_rows(folder / "metrics.jsonl") if row["kind"] == kind and row["adapter"] == name]
    return [{key: value for key, value in row.items() if key != "time"} for row in rows]


def assert_close(actual_run: Path, other: Path, name: str) -> None:
    for key, wanted in weights(other, name).items():
        actual = weights(actual_run, name)[key]
        assert np.linalg.norm(actual - wanted) <= TOLERANCE * np.linalg.norm(wanted), key
    for row, same in zip(steps(actual_run, name), steps(other, name), strict=True):
        np.testing.assert_allclose(row["loss"], same["loss"], rtol=TOLERANCE)


@pytest.fixture(scope="module")
def joint(job, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "joint"
    assert run(["train", job(), "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("lift", TWO_STAGES),
        nightly("rank", {"data": 2}),
        nightly("lift", {}),
        nightly("rank", {"stages": 2, "data": 2}),
    ],
)
def test_joint_is_alone_also_on_several_devices(name, mesh, joint, job, tmp_path, capsys):
    assert_close(joint, trained(job((name,), {"mesh": mesh}, data=NOT_HELD_OUT), tmp_path / "alone", capsys), name)


def test_a_run_tells_its_metrics_and_writes_peft_folders(joint):
    first = steps(joint, "lift")[0]
    assert first["gain"] == pytest.approx(0, abs=1e-5)  # the adapter is the base before its first step
    assert max(row["gain"] for row in steps(joint, "lift")[2:]) > 1e-4
    assert {"eval_loss", "eval_gain"} <= {*steps(joint, "lift", "eval")[-1]}
    assert (joint / "adapters" / "rank" / "latest" / "adapter_config.json").exists()
    assert any(np.any(array) for key, array in weights(joint, "rank").items() if "lora_B" in key)


def test_the_first_loss_is_the_formula(joint):
    """B is 0 at the first step, so the gain is 0: the loss is Σ trust · lift² and a tenth of the mean token loss."""
    from lorafusion_jax.data.prepare import prepare
    from lorafusion_jax.training import RunFolder

    data = prepare(RunFolder(joint).read_config()).adapters["lift"]
    first = data.order[:3]
    numbers = {name: array[first].astype(np.float64) for name, array in data.train.numbers.items()}
    reference = load_file(joint / "references" / "lift.safetensors")["train"]
    nll = -np.array([reference[data.train.offsets[row] : data.train.offsets[row + 1]].sum() for row in first])
    tokens = data.train.segment_tokens[first].sum()
    wanted = np.mean(numbers["trust"] * numbers["lift"] ** 2) + 0.1 * nll.sum() / tokens
    np.testing.assert_allclose(steps(joint, "lift")[0]["loss"], wanted, rtol=1e-5)


def test_a_group_of_rows_is_one_sample(job):
    from lorafusion_jax.config import load_config
    from lorafusion_jax.data.prepare import prepare

    config = load_config(job())
    data = prepare(config).adapters["rank"]
    assert len(data.train) == 4  # 14 rows
    assert data.train.numbers["grade"].shape == (4, 3)
    assert "no whole group of 3: rows 12, 13" in " ".join(data.train.report.notes)
    grades = [row["grade"] for row in map(json.loads, Path(config.directory, "rank.jsonl").read_text().splitlines())]
    assert data.train.numbers["grade"][1].tolist() == grades[3:6]
    assert data.train.segment_lengths.shape == (4, 6)
    assert len(data.order) == 4


@pytest.mark.parametrize("objective", ["rank", nightly("law")])
def test_other_settings_of_one_change_no_bit_of_another(objective, joint, job, tmp_path, capsys):
    other = trained(job(optim={"lr": 1e-2}), tmp_path / "other", capsys)
    for key, wanted in weights(joint, objective).items():
        np.testing.assert_array_equal(weights(other, objective)[key], wanted)
    assert any(np.any(weights(other, "lift")[key] != wanted) for key, wanted in weights(joint, "lift").items())


def test_a_resumed_run_keeps_the_reference_of_its_start(joint, job, tmp_path, capsys):
    """The adapter starts from a trained one, which it has left when the run is cut."""
    from lorafusion_jax.config import load_config
    from lorafusion_jax.training import train

    start = {"init_from": str(joint / "adapters" / "lift" / "latest"), "dropout": 0.0}
    file = job(("lift",), {"save": {"every_steps": 2}, "mesh": TWO_STAGES}, lora=start, data=NOT_HELD_OUT)
    whole = trained(file, tmp_path / "whole", capsys)
    record = json.loads((whole / "run.json").read_text())
    assert record["references"]["lift"]["of"] == "lift at its start"
    base = load_file(joint / "references" / "lift.safetensors")["train"]
    assert np.abs(load_file(whole / "references" / "lift.safetensors")["train"] - base).max() > 1e-3
    assert steps(whole, "lift")[0]["gain"] == pytest.approx(0, abs=1e-5)

    def power_cut(event) -> None:
        if event.kind == "step" and event.adapter == "lift" and event.step == 3:
            raise RuntimeError("power cut")

    cut = tmp_path / "cut"
    with pytest.raises(RuntimeError, match="power cut"):
        train(load_config(file), cut, listeners=[power_cut])
    stored = cut / "references" / "lift.safetensors"
    kept = tmp_path / "kept.safetensors"
    shutil.move(stored, kept)
    assert run(["resume", str(cut)]) == 2
    assert "error[reference.missing] lift" in capsys.readouterr().err
    arrays = load_file(kept)
    save_file(arrays | {"train": arrays["train"] + 1}, stored)
    assert run(["resume", str(cut)]) == 2
    assert "error[reference.damaged] lift" in capsys.readouterr().err
    shutil.copy(kept, stored)
    assert run(["resume", str(cut)]) == 0, capsys.readouterr().err
    for key, wanted in weights(whole, "lift").items():
        np.testing.assert_array_equal(weights(cut, "lift")[key], wanted)
    assert steps(cut, "lift") == steps(whole, "lift")


def test_references_are_other_adapters_or_folders(joint, job, tmp_path, capsys):
    trained_before = str(joint / "adapters" / "rank" / "latest")
    objective = {"name": "lift", "reference": trained_before}
    of_folder = trained(job(objective=objective), tmp_path / "folder", capsys)
    assert abs(steps(of_folder, "lift")[0]["gain"]) > 1e-4
    for reference, says in (("bse", "did you mean 'base'"), ("gone/folder", "no PEFT folder")):
        assert run(["check", job(("lift",), objective={"name": "lift", "reference": reference})]) == 2
        shown = " ".join(capsys.readouterr().err.split())
        assert "error[objective.reference]" in shown
        assert says in shown
    assert run(["check", job(("rank", "lift"), objective={"name": "lift", "reference": "rank"})]) == 0
    assert run(["check", job(("law",), {"objective": {"reference": "base"}})]) == 2
    assert "has no reference" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"lift": "high"}, "data.bad-row", "line 1: could not convert"),
        ({"lift": float("inf")}, "data.bad-row", "not a finite number"),
        ({"reply": 7}, "data.bad-row", "not a text"),
    ],
)
def test_rows_that_an_objective_cannot_use_are_named(job, folder, capsys, changes, code, says):
    first, *rest = (folder / "lift.jsonl").read_text().splitlines()
    (folder / "bad.jsonl").write_text("\n".join([json.dumps(json.loads(first) | changes), *rest]) + "\n")
    assert run(["check", job(("lift",), data={"train": "bad.jsonl"})]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert f"error[{code}]" in shown
    assert says in shown
