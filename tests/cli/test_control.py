"""Control commands: requests wait for the next resume of a stopped run, and invalid ones are errors."""

from __future__ import annotations

import json
import shutil

import pytest
import small_jobs
from more_cases import nightly

from lorafusion_jax.checkpoint.requests import request_files


@pytest.fixture
def stopped(finished, tmp_path):
    """A run that goes on from its first checkpoint."""
    run = tmp_path / "run"
    shutil.copytree(finished[1], run, symlinks=True)
    events = (run / "events.jsonl").read_text().splitlines(keepends=True)
    (run / "events.jsonl").write_text(
        "".join(row for row in events if "adapter-done" not in row and "finished" not in row)
    )
    for slot in sorted((run / "state").iterdir(), key=lambda folder: int(folder.name))[1:]:
        shutil.rmtree(slot)
    return run


def test_a_request_waits_for_the_next_resume(lorafusion, stopped):
    outcome = lorafusion("cancel", stopped, "law")
    assert outcome.code == 0, outcome.err
    assert "The run is not training and applies it when it is resumed." in outcome.out
    assert outcome.last_line == f"next: lorafusion resume {stopped}"
    assert len(request_files(stopped)) == 1
    resumed = lorafusion("resume", stopped)
    assert resumed.code == 0, resumed.err
    assert "law  step" in resumed.out
    assert "cancelled" in resumed.out
    assert request_files(stopped) == []
    assert "cancelled" in lorafusion("status", stopped).out
    assert lorafusion("verify", stopped).code == 0


def test_a_finished_run_takes_more_adapters_and_more_steps(lorafusion, finished, tmp_path):
    job, run = finished[0], tmp_path / "run"
    shutil.copytree(finished[1], run, symlinks=True)
    small_jobs.write_rows(tmp_path, "tax", 3, longest=8)
    more = tmp_path / "more.yaml"
    entry = {"name": "tax", "data": {"train": "tax.jsonl", "max_length": 32}, "lora": {"rank": 3}}
    more.write_text(json.dumps({"adapters": [entry]}))
    added = lorafusion("add", run, more, "optim.lr=1e-3")
    assert added.code == 0, added.err
    assert "asked: add tax. The run is not training and applies it when it is resumed." in added.out
    extended = lorafusion("extend", run, "law", "--steps", "1")
    assert "asked: extend law --steps 1." in extended.out
    assert "cosine from 0.0002 to 0; what had fallen rises again." in extended.out
    assert extended.last_line == f"next: lorafusion resume {run}"
    resumed = lorafusion("resume", run)
    assert resumed.code == 0, resumed.err
    assert "tax  step 0/1  add: running" in resumed.out
    assert "extend: running" in resumed.out
    status = json.loads(lorafusion("status", run, "--json").out)["adapters"]
    assert {name: row["status"] for name, row in status.items()} == dict.fromkeys(("law", "med", "tax"), "done")
    assert lorafusion("export", run, "tax", "--to", tmp_path / "out").code == 0
    assert lorafusion("verify", run).code == 0
    assert lorafusion("add", run, more).errors == ["add.name"]
    assert job.path.is_file()


def test_a_request_follows_those_that_wait(lorafusion, finished, tmp_path):
    """An adapter that is done has something left to train once an extension is asked for."""
    run = tmp_path / "run"
    shutil.copytree(finished[1], run, symlinks=True)
    assert lorafusion("extend", run, "law", "--steps", "2").code == 0
    assert "asked: weight law." in lorafusion("weight", run, "law", "2").out
    assert "asked: cancel law." in lorafusion("cancel", run, "law").out
    outcome = lorafusion("extend", run, "law", "--steps", "1")
    assert outcome.errors == ["control.ended"]
    assert "law is cancelled by a request that waits" in outcome.err
    resumed = lorafusion("resume", run)
    assert resumed.code == 0, resumed.err
    assert request_files(run) == []
    assert statuses_of(lorafusion, run) == {"law": "cancelled", "med": "done"}


@pytest.mark.parametrize("resumes", [False, nightly(True)])  # a third adapter compiles every program anew
def test_who_waits_to_join_can_be_cancelled(lorafusion, finished, tmp_path, resumes):
    run, more = tmp_path / "run", tmp_path / "more.yaml"
    shutil.copytree(finished[1], run, symlinks=True)
    entry = {"name": "tax", "data": {"train": str(finished[0].path.parent / "law.jsonl"), "max_length": 32}}
    more.write_text(json.dumps({"adapters": [entry]}))
    assert lorafusion("cancel", run, "tax").errors == ["control.unknown-adapter"]
    assert lorafusion("add", run, more).code == 0
    assert lorafusion("add", run, more).errors == ["add.name"]
    assert lorafusion("cancel", run, "tax").code == 0
    if resumes:
        assert lorafusion("resume", run).code == 0
        assert statuses_of(lorafusion, run) == {"law": "done", "med": "done", "tax": "cancelled"}


def statuses_of(lorafusion, run) -> dict[str, str]:
    adapters = json.loads(lorafusion("status", run, "--json").out)["adapters"]
    return {name: row["status"] for name, row in adapters.items()}


def test_what_cannot_be_added_never_reaches_the_run(lorafusion, finished, tmp_path):
    more = tmp_path / "more.yaml"
    entry = {"name": "tax", "data": {"train": "nowhere.jsonl", "max_length": 32}}
    more.write_text(json.dumps({"adapters": [entry]}))
    assert lorafusion("add", finished[1], more).errors == ["data.missing-file"]
    more.write_text(json.dumps({"adapters": [entry], "base": {"dtype": "bfloat16"}}))
    assert lorafusion("add", finished[1], more).errors == ["add.other-settings"]
    for options in ([], ["--steps", "0"], ["--steps", "1", "--epochs", "1"]):
        assert lorafusion("extend", finished[1], "law", *options).errors == ["control.extend"]
    assert request_files(finished[1]) == []


@pytest.mark.parametrize("command", ["cancel", "pause", "continue", "finish"])
def test_an_unknown_adapter_is_refused(lorafusion, finished, command):
    outcome = lorafusion(command, finished[1], "nobody")
    assert (outcome.code, outcome.errors) == (2, ["control.unknown-adapter"])
    assert "one of: law, med" in outcome.err


def test_ended_adapters_and_invalid_weights_are_errors(lorafusion, finished, tmp_path):
    assert lorafusion("pause", finished[1], "law").errors == ["control.ended"]
    assert lorafusion("weight", finished[1], "law", "0").errors == ["control.weight"]
    assert lorafusion("weight", finished[1], "law", "inf").errors == ["control.weight"]
    assert lorafusion("cancel", tmp_path / "nothing", "law").errors == ["run.missing"]


@pytest.mark.parametrize("command", ["cancel", "pause", "continue", "finish", "weight", "extend"])
def test_help_shows_an_example(lorafusion, command):
    assert f"Example: lorafusion {command} runs/exp1 law" in lorafusion(command, "--help").out
