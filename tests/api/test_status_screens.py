"""What `status` shows of a run that starts, of a sweep, and of a folder of runs."""

import io
import json
import os

import pytest
from rich.console import Console

from lorafusion_jax.api.status import run_numbers, runs_in, runs_screen, status_screen
from lorafusion_jax.checkpoint.begun_folder import begun_folder, read_start, start_file
from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.report.ranking import Measure, adapter_to_export, measures_of, rank


def evaluations(losses):
    return {name: {} if loss is None else {"eval_loss": loss} for name, loss in losses.items()}


def shown(renderable):
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


def test_a_run_exists_from_its_first_second(tmp_path):
    run = tmp_path / "runs" / "tuesday"
    with begun_folder(run) as start:
        assert run_numbers(run)["phase"] == "getting ready"
        start.record("compiling 1 of 2: stage 0")
        numbers = run_numbers(run)
        assert (numbers["state"], numbers["phase"], numbers["adapters"]) == (
            "starting",
            "compiling 1 of 2: stage 0",
            {},
        )
        assert f"{run}  starting  compiling 1 of 2: stage 0 … " in shown(status_screen(numbers)).replace("\n", "")
        head, row = shown(runs_screen(runs_in(run.parent))).splitlines()
        assert row[head.index("note") :].rstrip() == "compiling 1 of 2: stage 0"
        assert "best" not in head
        with pytest.raises(CheckpointError, match=r"run\.in-use"), begun_folder(run):
            pass
        assert read_start(run) is not None, "the other one's start goes on"
    assert list(tmp_path.iterdir()) == [], "a start without a run leaves nothing, not even the folders above"


def test_a_run_stays_and_a_killed_start_is_told(tmp_path):
    with begun_folder(tmp_path / "run"):
        (tmp_path / "run" / "plan.json").write_text("{}")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["plan.json", "run.lock"]

    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / "start.json").write_text(json.dumps({"phase": "planning", "phase_began": 1.0, "began": 0.5}))
    (killed / "run.lock").write_text(json.dumps({"process": 7, "host": os.uname().nodename}))
    numbers = run_numbers(killed)
    assert (numbers["state"], numbers["phase"]) == ("stopped", None)
    assert "its start was cut: process 7 has ended" in shown(status_screen(numbers))
    with begun_folder(killed) as start:  # the next start takes the folder over
        start.record("planning")
        assert run_numbers(killed)["state"] == "starting"
    assert killed.exists()
    assert list(killed.iterdir()) == []


@pytest.mark.parametrize("content", ["", "[]", '{"phase": 1}', '{"phase": "x", "began": "y", "phase_began": 1}'])
def test_a_damaged_phase_is_no_phase(tmp_path, content):
    (tmp_path / "start.json").write_text(content)
    assert read_start(tmp_path) is None


def test_phases_end_when_the_run_has_started(tmp_path):
    with start_file(tmp_path) as start:
        start.remove()
        start.record("evaluating law")  # later phases are those of training
        assert read_start(tmp_path) is None


def test_a_sweep_ends_with_an_answer():
    losses = {"r4": 2.75, "r8": 2.5, "law": 1.25, "r16": 2.0, "r32": None, "r64": 2.625}
    status = dict.fromkeys(losses, "done") | {"r16": "cancelled", "r32": "failed"}
    data = dict.fromkeys(("r4", "r8", "r16", "r32", "r64"), "9f3c") | {"law": "00aa"}
    ranking = rank(status, evaluations(losses), data)
    assert ranking.order == ("r8", "r64", "r4", "r16", "r32", "law")
    assert ranking.groups == (("r8", "r64", "r4"),)
    assert ranking.lines == ("best: r8, held-out loss 2.5000, the lowest of 3 on the same data, 0.1250 below r64",)
    steps = dict.fromkeys(losses, 9)
    assert adapter_to_export(status, steps, ranking.best) == "r8"
    assert adapter_to_export(status, steps, ()) == "r4"
    assert (
        adapter_to_export(status, steps | {"r4": 0, "r8": 0, "r64": 0, "law": 0}, ()) == "r16"
    )  # nothing else is left
    assert adapter_to_export(status, dict.fromkeys(losses, 0), ranking.best) is None


def test_adapters_are_compared_by_the_metric_that_their_job_names():
    written = {"metric": "eval_hits", "rises": True}
    damaged = {"reed": {"metric": 3}, "lost": ["eval_hits"], "iris": {}}
    record = {"compared_by": {"fern": written, "moss": written} | damaged}
    evaluated = {
        "fern": {"eval_loss": 0.5, "eval_hits": 0.25},
        "moss": {"eval_loss": 0.9, "eval_hits": 0.75},
        "reed": {"eval_loss": 0.1, "eval_hits": 1.0},
        "iris": {"eval_loss": 0.2, "eval_hits": float("nan")},
    }
    assert measures_of(record) == dict.fromkeys(("fern", "moss"), Measure("eval_hits", rises=True))
    ranking = rank(dict.fromkeys(evaluated, "done"), evaluated, dict.fromkeys(evaluated, "same"), measures_of(record))
    assert ranking.order == ("moss", "fern", "reed", "iris")
    assert ranking.lines == (
        "best: moss, eval_hits 0.7500, the highest of 2 on the same data, 0.5000 above fern",
        "best: reed, held-out loss 0.1000, the lowest of 2 on the same data, 0.1000 below iris",
    )


def test_without_common_data_nothing_is_ranked():
    losses = {"law": 3.0, "med": 1.0}
    ranking = rank(dict.fromkeys(losses, "done"), evaluations(losses), {"law": "a", "med": "b"})
    assert (ranking.order, ranking.best) == (("law", "med"), ())
