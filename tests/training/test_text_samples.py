"""Texts at evaluations: they do not change training, and stand in the run folder and in the report."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
import small_jobs

import lorafusion_jax as lf
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.log_file import read_rows
from lorafusion_jax.training.evaluations import Scores
from lorafusion_jax.training.text_samples import TextSamples

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
    ("section", "make"),
    [
        ({"train": SimpleNamespace(samples=2)}, lambda job: TextSamples(job, None, print, None)),
        (
            {"adapters": [SimpleNamespace(eval=SimpleNamespace(score="score.py:short"))]},
            lambda job: Scores(job, None, Path("rollouts"), None),
        ),
    ],
    ids=["train.samples", "eval.score"],
)
def test_a_run_of_several_processes_makes_no_text(section, make, monkeypatch, request):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match=f"{request.node.callspec.id} needs a run of one process"):
        make(SimpleNamespace(config=SimpleNamespace(**section)))
