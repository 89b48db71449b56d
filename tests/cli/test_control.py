"""Control commands: requests wait for the next resume of a stopped run, and invalid ones are errors."""

from __future__ import annotations

import shutil

import pytest

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


@pytest.mark.parametrize("command", ["cancel", "pause", "continue", "finish", "weight"])
def test_help_shows_an_example(lorafusion, command):
    assert f"Example: lorafusion {command} runs/exp1 law" in lorafusion(command, "--help").out
