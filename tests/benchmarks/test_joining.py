"""The search of `benchmarks.joining` tells a row as each phase ends, also when its budget ends first."""

from __future__ import annotations

import math
from contextlib import suppress
from types import SimpleNamespace

import pytest

from benchmarks import joining
from benchmarks.joining import SearchEnded, SearchWatch
from lorafusion_jax.report.events import AdapterChanged, RunStarted, StepTaken


def started(steps):
    return RunStarted(
        slot=0, device="cpu", slots=8, density=1.0, adapters=steps, capacity_tokens=64, trainable=1, plan="", frozen=1
    )


def step(name, number):
    return StepTaken(slot=number, adapter=name, step=number, loss=1.0, grad_norm=1.0, lr=0.1, loss_tokens=4, metrics={})


def test_a_search_ends_with_its_last_point(capsys):
    rows = []
    watch = SearchWatch(rows.append, math.inf, 10.0)
    watch(started({"a": 1, "b": 4}))
    watch(step("b", 1))
    watch(AdapterChanged(slot=2, adapter="b", step=1, action="stop", status="running", num_steps=2))
    watch(step("a", 1))
    assert [row["phase"] for row in rows] == ["started"]
    with pytest.raises(SearchEnded):
        watch(step("b", 2))
    assert rows[-1]["phase"] == "trained"
    assert {key: rows[-1][key] for key in ("points_done", "ended_early", "steps_done", "steps", "slots_done")} == {
        "points_done": 2, "ended_early": 1, "steps_done": 3, "steps": 3, "slots_done": 2,
    }  # fmt: skip


def test_a_search_that_is_cut_says_what_is_left():
    rows = []
    watch = SearchWatch(rows.append, 0.0, 10.0)  # its budget is spent
    with pytest.raises(SearchEnded):
        watch(started({"a": 1, "b": 3}))
    assert [row["phase"] for row in rows] == ["cut"]
    assert (rows[0]["left_predicted_s"], rows[0]["points_done"], rows[0]["steps"]) == (10.0, 0, 4)
    watch(step("a", 1))  # what the run tells while it ends is no row
    assert len(rows) == 1


@pytest.mark.parametrize("end", [SearchEnded(), OSError("no room")])
def test_a_search_leaves_no_adapters_on_the_disk(end, monkeypatch, tmp_path):
    """The checkpoint of the next one needs the room."""
    predicted = {"seconds": 29.5034, "evaluation_s": 13.138, "evaluations": 272}
    plan = SimpleNamespace(numbers={"predicted": predicted, "slots": 63, "tokens": 9})
    monkeypatch.setattr(joining.lf, "plan", lambda job: plan)

    def train(job, folder, *, progress):
        (folder / "adapters").mkdir(parents=True)
        raise end

    monkeypatch.setattr(joining, "_train", train)
    rows = []
    with suppress(OSError):
        joining._search_run({}, tmp_path / "search", rows.append, math.inf)
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]
    assert rows[0]["predicted"] == {"seconds": 29.5, "evaluation_s": 13.1, "evaluations": 272}
