"""The recorder writes the documented rows as whole lines and drops later rows on resume."""

from __future__ import annotations

import json
import math
import re

import pytest

from lorafusion_jax.report import recorder
from lorafusion_jax.report.events import (
    AdapterDone,
    AdapterEvaluated,
    PhaseBegun,
    RunStarted,
    SlotDone,
    StateSaved,
    StepTaken,
)
from lorafusion_jax.report.recorder import Recorder, read_rows
from lorafusion_jax.report.summary import final_rows, rates, read_summary, throughput
from lorafusion_jax.training.meter import Meter


def step(slot: int, adapter: str = "law", number: int = 1, loss: float = 2.0, **metrics: float) -> StepTaken:
    return StepTaken(
        slot=slot, adapter=adapter, step=number, loss=loss, grad_norm=0.5, lr=1e-4, loss_tokens=90, metrics=metrics
    )


def evaluation(slot: int, number: int, loss: float) -> AdapterEvaluated:
    return AdapterEvaluated(slot=slot, adapter="law", step=number, eval_loss=loss, eval_tokens=40)


def started(slot: int, **values) -> RunStarted:
    sizes = {"slots": 3, "density": 1.0, "capacity_tokens": 64, "trainable": 1, "frozen": 2}
    return RunStarted(slot=slot, device="cpu", plan="0", adapters={}, **sizes, **values)


def documented() -> dict[str, set[str]]:
    """Kind → keys, as the docstring of the recorder lists them."""
    rows = re.findall(r"\{\"kind\": \"(\w+)\", (.*?)\}", recorder.__doc__, re.DOTALL)
    return {kind: {"kind", *re.findall(r"\"(\w+)\"", keys)} for kind, keys in rows}


def test_rows_are_the_documented_ones(tmp_path):
    meter = Meter([{"law": 30}, {"law": 20, "med": 10}], [64] * 2, {"law": 1, "med": 1})
    meter.slots_done([0])
    write = Recorder(tmp_path)
    slot = SlotDone(slot=1, **meter.snapshot(1), bubble_share=0.04)
    for event in (step(1), evaluation(1, 1, 1.5), slot):
        write(event)
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert {row["kind"]: set(row) for row in rows} == documented()
    assert all(isinstance(row["time"], float) and isinstance(row["slot"], int) for row in rows)


def test_metrics_of_an_objective_are_own_fields(tmp_path):
    write = Recorder(tmp_path)
    write(step(1, margin=0.25))
    write(step(2, margin=math.nan))
    assert [row["margin"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0.25, None]
    assert "metrics" not in read_rows(tmp_path / "metrics.jsonl")[0]


def test_numbers_and_changes_go_to_their_own_files_and_phases_nowhere(tmp_path):
    write = Recorder(tmp_path)
    write(step(1))
    write(StateSaved(slot=1, path="state/1", seconds=0.1))
    write(PhaseBegun(text="planning"))
    assert [row["kind"] for row in read_rows(tmp_path / "metrics.jsonl")] == ["step"]
    assert [row["kind"] for row in read_rows(tmp_path / "events.jsonl")] == ["saved"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_are_null(tmp_path, value):
    Recorder(tmp_path)(step(1, loss=value))

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert row["loss"] is None
    assert row["grad_norm"] == 0.5


def test_a_truncated_last_line_is_ignored(tmp_path):
    write = Recorder(tmp_path)
    write(step(1))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "slot": 2, "adap')
    assert [row["slot"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1]
    Recorder(tmp_path, resume_slot=1)(step(2, number=2))  # does not glue its row to the rest
    assert [row["slot"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2]


def test_resume_drops_what_will_be_written_again(tmp_path):
    write = Recorder(tmp_path)
    write(started(0))
    for slot in (1, 2, 3):
        write(step(slot, number=slot))
    write(AdapterDone(slot=3, adapter="law", step=3))
    again = Recorder(tmp_path, resume_slot=2)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2]
    assert [row["kind"] for row in read_rows(tmp_path / "events.jsonl")] == ["started"]  # history stays
    again(step(3, number=3))
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    Recorder(tmp_path, resume_slot=-1)
    assert read_rows(tmp_path / "metrics.jsonl") == []


def test_no_files_are_no_rows(tmp_path):
    assert read_rows(tmp_path / "metrics.jsonl") == []
    Recorder(tmp_path, resume_slot=4)
    assert final_rows(tmp_path) == {}
    assert throughput(tmp_path) is None


def test_rates_are_those_of_the_current_mesh(tmp_path, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(recorder.time, "time", lambda: float(next(clock)))
    write = Recorder(tmp_path)
    keys = ("useful_tokens_per_s", "processed_tokens_per_s", "slot_seconds")
    for sitting, (data, speeds) in enumerate([(1, [10, 10]), (2, [20]), (2, [30, 40])]):
        write(started(sitting, mesh={"stages": 1, "data": data}))
        for speed in speeds:
            write(SlotDone(slot=sitting, slots=5, **dict.fromkeys(keys, speed)))
    medians = throughput(tmp_path)
    newest = rates(read_summary(tmp_path), read_rows(tmp_path / "events.jsonl"), newest=True)
    assert medians is not None
    assert newest is not None
    assert {key: medians[key] for key in keys} == dict.fromkeys(keys, 30), "of mesh 2: 20, 30, 40"
    assert {key: newest[key] for key in keys} == dict.fromkeys(keys, 40), "what the live view shows"


def test_summary_takes_the_newest_numbers_of_each_adapter(tmp_path):
    write = Recorder(tmp_path)
    write(evaluation(0, 0, 3.0))
    for slot in (1, 2):
        write(step(slot, number=slot, loss=3.0 - slot))
        write(step(slot, "med", number=slot, loss=5.0 - slot))
    write(evaluation(2, 2, 0.9))
    rows = final_rows(tmp_path)
    assert (rows["law"]["loss"], rows["law"]["step"], rows["law"]["before"], rows["law"]["after"]) == (1.0, 2, 3.0, 0.9)
    assert rows["med"]["loss"] == 3.0
    assert "after" not in rows["med"]
