"""An objective from another package with two texts per sample, trained by the command line with another one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import small_jobs
from more_cases import nightly
from safetensors.numpy import load_file

from lorafusion_jax.cli.main import run
from lorafusion_jax.report.recorder import read_rows

pytestmark = pytest.mark.usefixtures("kept_programs")

# A chosen answer should be likelier than a rejected one, token by token; `anchor` keeps the chosen one likely.
SOURCE = """
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from lorafusion_jax.extend import Objective, Segment


@dataclass(frozen=True)
class Options:
    beta: Annotated[float, Field(gt=0)] = 2.0
    anchor: float = 0.1


def segments(row):
    if row["chosen"] == row["rejected"]:
        raise ValueError("both answers are the same")
    return (
        Segment(name="chosen", prompt=row["prompt"], answer=row["chosen"]),
        Segment(name="rejected", prompt=row["prompt"], answer=row["rejected"]),
    )


def loss(sample, options):
    import jax

    chosen, rejected = -sample.nll / sample.tokens
    margin = options.beta * (chosen - rejected)
    return -jax.nn.log_sigmoid(margin) - options.anchor * chosen, {"margin": margin, "right": margin > 0}


PAIRWISE = Objective(
    segments=segments,
    num_segments=2,
    columns=("prompt", "chosen", "rejected"),
    loss=loss,
    metrics={"margin": "nats per token", "right": "share of pairs"},
    options=Options,
)
NO_METRICS = Objective(loss=lambda sample, options: (sample.nll[0], {}), metrics={"margin": "nats"})
MEAN = Objective(loss=lambda sample, options: (sample.nll[0] / sample.tokens[0], {}))
NOTHING = 5
"""
POINTS = {
    "lorafusion_jax.objectives": {
        "pairwise": "PAIRWISE",
        "mean": "MEAN",
        "undeclared": "NO_METRICS",
        "nothing": "NOTHING",
        "gone": "GONE",
    }
}
BETA, ANCHOR = 1.5, 0.1
MOST_TOKENS = 64  # of a text
LORA = {"rank": 4, "alpha": 8, "dropout": 0.1, "targets": ["q_proj"]}
SAVES = {"save": {"every_steps": 2}}
PAIRS = {"name": "pairwise", "beta": BETA}
TOLERANCE = 1e-5  # of float32 sums in another order, carried along by Adam for a few steps; as tests/lossless has it
OWN = {
    "pref": {"objective": PAIRS, "batch": {"global_samples": 3}, "seed": 1},
    "law": {"batch": {"global_samples": 4}, "seed": 2},
    "calm": {"objective": PAIRS | {"beta": 0.1}, "batch": {"global_samples": 2}, "seed": 3},
}


@pytest.fixture(scope="module", autouse=True)
def _installed(install_for_module):
    install_for_module("toy_objective", SOURCE, POINTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Data that all tests use, whoever is in a job."""
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def job(folder, tiny_base):
    """job(names, sections, **changes of pref) → job file."""

    def make(names=("pref",), sections=None, held_out=False, **changes) -> str:
        entries = []
        for name in names:
            pairs = name != "law"
            rows = write_pairs(folder, name, 11) if pairs else small_jobs.write_rows(folder, "law", 12, longest=20)
            data = {"train": rows} | ({"eval": write_pairs(folder, f"{name}_eval", 4)} if pairs and held_out else {})
            fields = {"name": name, "data": data, "lora": LORA, **OWN[name]}
            entries.append(fields | (changes if name == "pref" else {}))
        optim = {"lr": 2e-3, "schedule": "constant", "warmup": 0}
        batch = {"capacity_tokens": 256, "tile_tokens": 16}
        usual = {"optim": optim, "batch": batch}
        return str(small_jobs.write_job(folder, tiny_base, entries, **usual | (sections or {})))

    return make


@pytest.fixture(scope="module")
def joint(job, tmp_path_factory) -> Path:
    """A run of all of them together, with its saves."""
    out = tmp_path_factory.mktemp("runs") / "joint"
    assert run(["train", job(tuple(OWN), SAVES, held_out=True), "--out", str(out)]) == 0
    return out


def write_pairs(folder: Path, name: str, count: int) -> str:
    draw = random.Random(name)
    words = ("adapter", "base", "batch", "cache", "file", "graph", "kernel", "layer", "loss", "mask", "model", "norm")

    def text() -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, 12)))

    rows = [{"prompt": text(), "chosen": f" {text()}", "rejected": f" {text()} bad"} for _ in range(count)]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"{name}.jsonl"


def trained(job_file: str, out: Path, capsys) -> Path:
    code = run(["train", job_file, "--out", str(out)])
    assert code == 0, capsys.readouterr().err
    return out


def weights(folder: Path, name: str) -> dict[str, np.ndarray]:
    return load_file(folder / "adapters" / name / "latest" / "adapter_model.safetensors")


def steps(folder: Path, name: str) -> list[dict]:
    rows = read_rows(folder / "metrics.jsonl")
    return [row for row in rows if row["kind"] == "step" and row["adapter"] == name]


def shared_slots(folder: Path) -> list[set[str]]:
    from lorafusion_jax.training import RunFolder

    return [{ref.adapter for ref in slot.samples} for slot in RunFolder(folder).read_plan().slots]


def read_base(base: Path) -> Callable[[list[int]], np.ndarray]:
    """tokens of a text → its logits under the base in a pass of its own; one program serves texts of all lengths."""
    import jax.numpy as jnp
    from flax import nnx

    from benchmarks.saved_model import load_decoder
    from lorafusion_jax.models import Segments

    model, run_model = load_decoder(base, dtype=jnp.float32), nnx.jit(lambda model, *inputs: model(*inputs))

    def logits(tokens: list[int]) -> np.ndarray:
        padded = np.pad(tokens, (0, MOST_TOKENS - len(tokens)))
        segments = Segments.from_lengths([len(tokens)], MOST_TOKENS)
        return np.asarray(run_model(model, padded, np.arange(MOST_TOKENS), segments), np.float64)

    return logits


def mean_log_p(logits: np.ndarray, tokens: list[int], learned: list[bool]) -> float:
    """Mean log-likelihood of the learned tokens of one text: a softmax in float64."""
    top = logits.max(-1, keepdims=True)
    log_p = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return float(
        np.mean([log_p[position - 1, tokens[position]] for position in range(1, len(tokens)) if learned[position]])
    )


def base_loss_of_first_step(job_file: str, base: Path, capsys) -> tuple[float, float]:
    """Loss and margin of the first global batch before anything is learned: B is 0, the adapter is the base."""
    from lorafusion_jax.config import load_config
    from lorafusion_jax.data.prepare import prepare

    capsys.readouterr()
    assert run(["data", "preview", job_file, "--adapter", "pref", "--rows", "99", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["pref"]
    first = prepare(load_config(job_file)).adapters["pref"].order[:3]
    losses, margins, logits = [], [], read_base(base)
    for row in (rows[number] for number in first):
        end, all_of_it = row["segment_lengths"][0], len(row["tokens"])
        chosen, rejected = (
            mean_log_p(logits(row["tokens"][part]), row["tokens"][part], row["learned"][part])
            for part in (slice(0, end), slice(end, all_of_it))
        )
        margins.append(BETA * (chosen - rejected))
        losses.append(np.log1p(np.exp(-margins[-1])) - ANCHOR * chosen)
    return float(np.mean(losses)), float(np.mean(margins))


def test_the_first_loss_is_the_formula_in_float64(joint, job, tiny_base, capsys):
    first = steps(joint, "pref")[0]
    loss, margin = base_loss_of_first_step(job(tuple(OWN)), tiny_base, capsys)
    np.testing.assert_allclose(first["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(first["margin"], margin, rtol=1e-4, atol=1e-6)  # a small difference of two means
    assert 0 <= first["right"] <= 1


@pytest.mark.parametrize(("name", "mesh"), [("pref", {"data": 2}), nightly("pref", {}), nightly("law", {})])
def test_joint_is_alone_for_adapters_of_different_objectives_in_one_microbatch(
    name, mesh, joint, job, tmp_path, capsys
):
    assert any({"pref", "law"} <= adapters for adapters in shared_slots(joint))
    assert any({"pref", "calm"} <= adapters for adapters in shared_slots(joint))
    alone = trained(job((name,), {"mesh": mesh}), tmp_path / name, capsys)
    for key, wanted in weights(alone, name).items():
        actual = weights(joint, name)[key]
        assert np.linalg.norm(actual - wanted) <= TOLERANCE * np.linalg.norm(wanted), key
    assert any(np.any(array) for key, array in weights(alone, name).items() if "lora_B" in key)
    for own_row, other in zip(steps(joint, name), steps(alone, name), strict=True):
        assert {*own_row} == {*other}
        np.testing.assert_allclose(own_row["loss"], other["loss"], rtol=TOLERANCE)
        np.testing.assert_allclose(own_row.get("margin", 0), other.get("margin", 0), rtol=1e-4, atol=1e-6)
    assert "margin" in steps(joint, "calm")[0]
    assert "margin" not in steps(joint, "law")[0]
    held_out = [row for row in read_rows(joint / "metrics.jsonl") if row["kind"] == "eval" and row["adapter"] == "pref"]
    assert {"eval_loss", "eval_tokens", "eval_margin", "eval_right"} <= {*held_out[0]}


def test_other_objectives_in_a_microbatch_change_no_bit_of_sft(job, tmp_path, capsys):
    """The other adapter takes its mean over samples in one run and over tokens in the other: the slots are the same."""
    folders = []
    for number, objective in enumerate([{"name": "sft"}, {"name": "mean"}]):
        file = job(("law",))
        values = json.loads(Path(file).read_text())
        values["adapters"].append(values["adapters"][0] | {"name": "other", "objective": objective, "seed": 5})
        Path(file).write_text(json.dumps(values))
        folders.append(trained(file, tmp_path / f"run-{number}", capsys))
    assert any(len(adapters) == 2 for adapters in shared_slots(folders[0]))
    assert steps(folders[0], "other")[0]["loss"] != steps(folders[1], "other")[0]["loss"]
    for key, wanted in weights(folders[0], "law").items():
        np.testing.assert_array_equal(weights(folders[1], "law")[key], wanted)


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", [{"data": 2}, {"stages": 2, "data": 2}], ids=str)
def test_on_several_devices_it_is_the_same(joint, job, tmp_path, capsys, mesh):
    several = trained(job(tuple(OWN), {"mesh": mesh}), tmp_path / "several", capsys)
    for name in ("pref", "law"):
        for a, b in zip(steps(joint, name), steps(several, name), strict=True):
            np.testing.assert_allclose(a["loss"], b["loss"], rtol=TOLERANCE)
            np.testing.assert_allclose(a.get("margin", 0), b.get("margin", 0), rtol=1e-4, atol=1e-6)


def test_preview_shows_every_text_with_what_is_learned(job, capsys):
    assert run(["data", "preview", job(), "--rows", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("segment 1 of 2") == shown.count("segment 2 of 2") == 2
    assert shown.count("⟦") == shown.count("⟧") == 5  # two texts of two rows, and the legend
    assert " bad" in shown.replace("\n", "")


@pytest.mark.parametrize(
    ("objective", "says"),
    [
        ({"name": "pairwize"}, ["did you mean 'pairwise'", "sft"]),
        ({"name": "pairwise", "bete": 1}, ["'bete'", "did you mean 'beta'"]),
        ({"name": "pairwise", "beta": -1}, ["objective.beta", "more than 0"]),
        ({"name": "pairwise", "beta": True}, ["objective.beta", "a number"]),
        ({"name": "sft", "beta": 1}, ["no options", "'beta'"]),
        ({"name": "nothing"}, ["toy_objective"]),
        ({"name": "gone"}, ["toy_objective"]),
    ],
)
def test_what_does_not_exist_is_refused_with_its_place(job, capsys, objective, says):
    assert run(["check", job(objective=objective)]) == 2
    shown = capsys.readouterr().err
    assert "error[" in shown
    assert "Traceback" not in shown
    for text in says:
        assert text in " ".join(shown.split())


def test_broken_objectives_are_errors_before_a_run_starts(job, tmp_path, capsys):
    entries = {"data": {"train": "law.jsonl"}, "objective": {"name": "undeclared"}}
    job(("law",))
    assert run(["train", job(**entries), "--out", str(tmp_path / "run")]) == 2
    shown = capsys.readouterr().err
    assert "error[objective.broken]" in shown
    assert "['margin']" in shown
    assert not (tmp_path / "run").exists()


def test_rows_that_an_objective_cannot_use_are_named(folder, job, capsys):
    file = job(data={"train": "bad.jsonl"})
    rows = [json.loads(line) for line in (folder / "pref.jsonl").read_text().splitlines()]
    rows[2]["rejected"] = rows[2]["chosen"]
    del rows[5]["chosen"]
    (folder / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(["check", file]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "2 of 11 rows cannot be used with objective pairwise" in shown
    assert "both answers are the same" in shown
    assert "Traceback" not in shown


def test_columns_may_have_other_names_and_missing_ones_are_named(folder, job, capsys):
    file = job(data={"train": "renamed.jsonl", "columns": {"chosen": "good"}})
    rows = (folder / "pref.jsonl").read_text()
    (folder / "renamed.jsonl").write_text(rows.replace('"chosen"', '"good"'))
    assert run(["check", file]) == 0, capsys.readouterr().err
    (folder / "renamed.jsonl").write_text(rows)
    assert run(["check", file]) == 2
    assert "no column 'good', which objective pairwise needs" in " ".join(capsys.readouterr().err.split())


def test_all_texts_of_a_sample_must_fit_into_a_microbatch(job, capsys):
    assert run(["check", job(sections={"data": {"max_length": 320}})]) == 2
    assert "2 texts of data.max_length=320 do not fit" in " ".join(capsys.readouterr().err.split())


def test_a_finished_adapter_is_a_peft_folder_with_its_objective_on_record(joint):
    latest = joint / "adapters" / "pref" / "latest"
    assert json.loads((latest / "adapter_config.json").read_text())["peft_type"] == "LORA"
    assert json.loads((latest / "run.json").read_text())["adapter"]["objective"] == {
        "name": "pairwise",
        "beta": BETA,
        "reference": None,
    }
