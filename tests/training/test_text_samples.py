"""Texts at evaluations: they do not change training, and stand in the run folder and in the report."""

from __future__ import annotations

import json

import jax
import pytest
import small_jobs

import lorafusion_jax as lf
from lorafusion_jax.config.load import load_config
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.log_file import read_rows
from lorafusion_jax.session.base import check_mesh
from lorafusion_jax.training.job import Job
from lorafusion_jax.training.revisions import with_adapters

PROMPTS = ["adapter base", "<b>kernel</b>"]


@pytest.fixture(scope="module")
def train(tmp_path_factory, tiny_base, kept_programs):
    """train(name, *overrides) → the run of a job."""
    folder = tmp_path_factory.mktemp("samples")
    rows = {name: small_jobs.write_rows(folder, name, 8) for name in ("law", "med")}
    adapters = small_jobs.two_adapters(rows)
    for adapter in adapters:
        adapter["lora"] |= {"rank": 4}
    batch = {"capacity_tokens": 64, "tile_tokens": 16}  # programs as those of lossless/test_resume.py
    job = small_jobs.write_job(folder, tiny_base, adapters, batch=batch)

    def train(name: str, *overrides: str) -> lf.Run:
        return lf.train(lf.load_job(job, ["train.eval_every_steps=1", *overrides]), folder / name, progress=False)

    return train


@pytest.fixture(scope="module")
def with_texts(train) -> lf.Run:
    return train("with", f"train.samples={json.dumps(PROMPTS)}", "train.sample_tokens=5")


def test_training_is_bitwise_the_same(train, with_texts, tmp_path):
    runs = with_texts, train("without")
    assert all(not adapter["texts"] for adapter in shown(runs[1], tmp_path)["adapters"])
    for name in ("law", "med"):
        exported = [small_jobs.exported(run.folder, name) for run in runs]
        assert all((exported[0][key] == exported[1][key]).all() for key in exported[0])
    losses = [
        [(row["adapter"], row["step"], row.get("loss"), row.get("eval_loss")) for row in rows if row["kind"] != "slot"]
        for rows in (read_rows(run.folder / "metrics.jsonl") for run in runs)
    ]
    assert losses[0] == losses[1]


def test_texts_are_in_the_run_and_change_as_the_adapter_learns(with_texts):
    events = [row for row in read_rows(with_texts.folder / "events.jsonl") if row["kind"] == "sample"]
    by_adapter = {name: [row for row in events if row["adapter"] == name] for name in ("law", "med")}
    for rows in by_adapter.values():
        assert [row["step"] for row in rows] == [0, 1, 2]
        assert all(row["prompts"] == PROMPTS for row in rows)
        assert len({tuple(row["texts"]) for row in rows}) > 1
    assert by_adapter["law"][0]["texts"] == by_adapter["med"][0]["texts"]  # of the base, at the start
    # The last texts are those of the exported adapter.
    last = lf.generate(with_texts, PROMPTS, adapters="law", max_tokens=5)
    assert [text.text for text in last] == by_adapter["law"][-1]["texts"]


def test_the_report_shows_each_prompt_with_its_texts(with_texts, tmp_path):
    data = shown(with_texts, tmp_path)
    law = next(adapter for adapter in data["adapters"] if adapter["name"] == "law")
    assert [entry["step"] for entry in law["texts"]] == [0, 1, 2]
    assert law["texts"][0]["pairs"][0][0] == PROMPTS[0]


def shown(run: lf.Run, folder) -> dict:
    """Data of the run's page."""
    page = run.report().save(folder / "page.html").read_text()
    assert "<b>kernel" not in page
    return json.loads(page.partition("const data = ")[2].partition(";\n")[0])


@pytest.mark.parametrize(
    ("settings", "of_adapter", "key"),
    [
        ({"train": {"samples": 2}}, {}, "train.samples"),
        ({}, {"eval": {"score": "score.py:short"}}, "eval.score"),
        ({}, {"objective": "grpo", "rollout": {"reward": "exact", "group": 4}}, "rollout"),
    ],
)
def test_a_run_of_several_processes_makes_no_text(settings, of_adapter, key, tmp_path, tiny_base, monkeypatch):
    """Neither does one that an adapter joins: it would end at the first evaluation."""
    (tmp_path / "score.py").write_text("def short(prompts, completions): return [0.0] * len(prompts)\n")
    rows = small_jobs.write_rows(tmp_path, "law", 4)
    law = {"name": "law", "data": {"train": rows, "eval": rows, "max_length": 512}}
    batch = {"batch": {"global_samples": 4, "capacity_tokens": 512, "tile_tokens": 16}}
    config = load_config(small_jobs.write_job(tmp_path, tiny_base, [law | of_adapter], **batch, **settings))
    check_mesh(config)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match=f"{key} needs a run of one process"):
        check_mesh(config)
    run = Job(config=config.model_copy(update={"adapters": ()}), prepared=None, plan=None)
    with pytest.raises(ConfigError, match=f"{key} needs a run of one process"):
        with_adapters(run, config.adapters, lambda config: None)
