"""Rows with and without optional columns: what others have decides nothing, in any objective, set, file or session."""

from __future__ import annotations

import json
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from more_cases import nightly
from small_jobs import WORDS, exported, write_job

from lorafusion_jax.checkpoint.requests import write_addition
from lorafusion_jax.cli.main import run
from lorafusion_jax.config import load_config
from lorafusion_jax.config.join import read_joining
from lorafusion_jax.config.schema import DataSettings
from lorafusion_jax.data.assemble import Weights, assemble, piece_of, segment_weights
from lorafusion_jax.data.join_sets import join_sources
from lorafusion_jax.data.sample_table import table_shape
from lorafusion_jax.data.tokenized import load_samples
from lorafusion_jax.data.tokenizer import load_tokenizer
from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.extend import Objective, Segment
from lorafusion_jax.objective.batch import totals_of
from lorafusion_jax.objective.protocol import Chosen
from lorafusion_jax.objective.table import OBJECTIVES
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.training import train

T, COUNT, D = 512, 8, 4


def rows_of(name: str, has: bool) -> list[dict]:
    """Rows of an objective, with its optional columns or without."""
    draw = random.Random(7)

    def text() -> str:
        return " " + " ".join(draw.choices(WORDS, k=draw.randint(2, 4)))

    pairs = [{"prompt": text(), "chosen": text(), "rejected": text() + " no"} for _ in range(COUNT)]
    if name == "reward":
        return [row | ({"margin": 1.5 - number} if has else {}) for number, row in enumerate(pairs)]
    if name == "graded":
        return [row | ({"grade": number / 4, "stress": 0.5} if has else {}) for number, row in enumerate(pairs)]
    sampled = [
        {"prompt_ids": [5 + n, 9], "completion_ids": [20 + n, 30, 41 + n], "advantage": 1.0 if n % 2 else -0.5}
        for n in range(COUNT)
    ]
    return [row | ({"old_logprobs": [-4.0, -5.5, -3.0]} if has else {}) for row in sampled]


def graded_segments(row):
    values = {"stress": row["stress"]} if "stress" in row else {}
    return (Segment(name="answer", prompt=row["prompt"], answer=row["chosen"], values=values),)


def graded_loss(sample, options):
    factor = sample.numbers.get("grade", 3.0)
    return -factor * (sample.logprobs * sample.values.get("stress", 7.0) * sample.mask).sum(), {}


GRADED = Objective(  # as a package of others would have it
    segments=graded_segments,
    columns=("prompt", "chosen"),
    optional_columns=("grade", "stress"),
    numbers=lambda row: {"grade": row["grade"]} if "grade" in row else {},
    loss=graded_loss,
    needs=frozenset({"logprobs"}),
)


def choose(name: str) -> Chosen:
    objective = GRADED if name == "graded" else OBJECTIVES[name]
    return Chosen(name=name, objective=objective, options=objective.options())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Files called OBJECTIVE-HAS.jsonl, and some whose rows differ."""
    written = tmp_path_factory.mktemp("optional")
    for name in ("grpo", "reward", "graded"):
        rows = {has: rows_of(name, has) for has in (True, False)}
        files = {has: rows[has] for has in rows} | {"mixed": [*rows[True][:5], *rows[False][5:7], rows[True][7]]}
        for has, lines in files.items():
            text = "".join(json.dumps(row) + "\n" for row in lines)
            (written / f"{name}-{has}.jsonl").write_text(text)
    return written


@pytest.fixture(scope="module")
def read(folder, tiny_base, tmp_path_factory):
    """read(objective, has) → its tokenised file."""
    tokenizer, cache = load_tokenizer(tiny_base), tmp_path_factory.mktemp("tokens")

    def load(name: str, has: bool | str):
        return load_samples(
            f"{name}-{has}.jsonl",
            settings=DataSettings(train=()),
            tokenizer=tokenizer,
            adapter="a",
            base_dir=folder,
            cache_dir=cache,
            objective=choose(name),
        )

    return load


def sums(members: list[tuple[Chosen, object]], only: int | None = None) -> list[dict[str, float]]:
    """Loss and metrics of each adapter of a microbatch; with `only`, of this one without the others."""
    present = range(len(members)) if only is None else [only]
    pieces = [
        piece_of(data, sample, adapter, Weights(1.0, 1 / len(data), segment_weights(data)), key=0)
        for adapter in present
        for data in [members[adapter][1]]
        for sample in range(len(data))
    ]
    table = table_shape(64, [members[adapter] for adapter in present])
    batch = assemble(pieces, capacity_tokens=4 * T, tile_tokens=16, max_segments=128, max_adapters=4, table=table)
    batch = jax.tree.map(jnp.asarray, batch)
    nll = 3 + jnp.sin(batch.targets + batch.positions)  # of a token, wherever it is
    hidden = jnp.cos(batch.tokens[:, None] * jnp.arange(1.0, D + 1))
    heads = {"reward.score.Dx1": jnp.ones((64, D, 1))}
    chosen = [chosen for chosen, _ in members]
    losses = jnp.where(batch.weights != 0, nll, 0.0)
    totals = jax.jit(lambda *arrays: totals_of(*arrays[:2], chosen, arrays[2], heads=heads))(losses, batch, hidden)
    return [{name: float(array[adapter]) for name, array in totals.items()} for adapter in range(len(members))]


@pytest.mark.parametrize("name", ["grpo", "reward", "graded"])
def test_no_sum_of_an_adapter_depends_on_the_columns_of_others(name, read):
    chosen, parts = choose(name), [read(name, True), read(name, False)]
    both = join_sources(parts, Path())  # one set of two files
    members = [(chosen, parts[0]), (chosen, parts[1]), (chosen, both), (choose("grpo"), read("grpo", True))]
    joint = sums(members)
    alone = sums(members, 1)[1]
    assert {key: joint[1][key] for key in alone} == pytest.approx(alone, rel=1e-6)
    assert abs(joint[0]["loss"] - joint[1]["loss"]) > 0.1
    assert joint[2]["loss"] == pytest.approx((joint[0]["loss"] + joint[1]["loss"]) / 2, rel=1e-6)


def test_by_hand(read):
    """Without old_logprobs a ratio is 1; numbers and values of a row reach its loss, and only its own do."""
    chosen, data = choose("grpo"), read("grpo", False)
    without, of_sampler = sums([(chosen, data), (chosen, read("grpo", True))])
    assert without["ratio"] == pytest.approx(1)
    assert without["loss"] == pytest.approx(-0.25)  # the mean advantage is 0.25
    nll = [3 + np.sin(token + place) for n in range(COUNT) for place, token in enumerate([20 + n, 30, 41 + n], start=1)]
    ratios = np.exp(-np.array(nll).reshape(COUNT, 3) - [-4.0, -5.5, -3.0])
    assert of_sampler["ratio"] == pytest.approx(ratios.mean(), rel=1e-5)


@pytest.mark.parametrize(("name", "column"), [("grpo", "old_logprobs"), ("reward", "margin"), ("graded", "grade")])
def test_a_file_in_which_only_some_rows_have_a_column_is_refused(name, column, read):
    with pytest.raises(LoraFusionError, match=rf"partial-column[^⁂]*2 of 8 rows have no '{column}'") as caught:
        read(name, "mixed")
    assert f"{name}-mixed.jsonl, lines 6, 7" in str(caught.value)


def test_the_blocks_of_a_large_file_have_the_same_columns(read, monkeypatch, folder):
    from lorafusion_jax.data import row_blocks, sources

    monkeypatch.setattr(row_blocks, "BLOCK_BYTES", 400)
    monkeypatch.setattr(sources, "BLOCK_BYTES", 400)
    lines = [*rows_of("grpo", True), *rows_of("grpo", False)]
    (folder / "grpo-later.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    with pytest.raises(LoraFusionError, match="partial-column"):
        read("grpo", "later")


PAIR = {"with": ("True", "False"), "without": ("False", "True")}  # name -> which has old_logprobs: train, eval


@pytest.fixture(scope="module")
def job(folder, tiny_base):
    """job(names, **changes of adapters) → job file."""

    def make(names, **changes) -> Path:
        entries = [
            {
                "name": name,
                "objective": {"name": "grpo"},
                "data": {"train": f"grpo-{PAIR[name][0]}.jsonl", "eval": f"grpo-{PAIR[name][1]}.jsonl"},
                "batch": {"global_samples": 4},
            }
            | changes
            for name in names
        ]
        optim = {"lr": 2e-3, "schedule": "constant", "warmup": 0, "eps": 1e-4}
        lora = {"rank": 2, "dropout": 0.0, "targets": ["q_proj"]}
        return write_job(folder, tiny_base, entries, optim=optim, lora=lora)

    return make


@pytest.fixture(scope="module")
def joint(job, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "joint"
    assert run(["train", str(job(PAIR)), "--out", str(out)]) == 0
    return out


def rows(folder: Path, name: str) -> list[dict]:
    compared = ("step", "loss", "ratio", "clip_ratio", "eval_loss", "eval_ratio")
    recorded = [row for row in read_rows(folder / "metrics.jsonl") if row.get("adapter") == name]
    return [{key: row[key] for key in compared if key in row} for row in recorded]


def first_value(folder: Path, name: str, key: str) -> float:
    return next(row[key] for row in rows(folder, name) if key in row)


def test_a_run_trains_and_evaluates_each_set_by_its_own_columns(joint):
    """The first ratios; evaluation sets are the other way about."""
    assert first_value(joint, "without", "ratio") == pytest.approx(1, abs=1e-6)
    assert first_value(joint, "with", "eval_ratio") == pytest.approx(1, abs=1e-6)
    assert abs(first_value(joint, "with", "ratio") - 1) > 0.1
    assert abs(first_value(joint, "without", "eval_ratio") - 1) > 0.1


@pytest.mark.parametrize("name", [nightly(name) for name in PAIR])
def test_joint_is_alone(name, joint, job, tmp_path):
    assert run(["train", str(job((name,))), "--out", str(tmp_path / "alone")]) == 0
    for ours, theirs in zip(rows(joint, name), rows(tmp_path / "alone", name), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    for key, wanted in exported(tmp_path / "alone", name).items():
        assert np.linalg.norm(exported(joint, name)[key] - wanted) <= 1e-5 * np.linalg.norm(wanted), key


@pytest.mark.nightly
def test_an_adapter_that_joins_changes_no_ratio(joint, job, tmp_path):
    config = load_config(job(("without",), epochs=4))
    joining = read_joining(job(("with",), epochs=4), config)

    def ask(event) -> None:
        if event.kind == "step" and event.step == 2:
            write_addition(tmp_path / "run", joining)

    assert train(config, tmp_path / "run", listeners=[ask]).exit_code == 0
    assert train(load_config(job(("without",), epochs=4)), tmp_path / "alone").exit_code == 0
    for ours, theirs in zip(rows(tmp_path / "run", "without"), rows(tmp_path / "alone", "without"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    ratio = first_value(joint, "with", "ratio")
    assert first_value(tmp_path / "run", "with", "ratio") == pytest.approx(ratio, rel=1e-5)
