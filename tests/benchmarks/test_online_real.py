"""Jobs that come and go on one device: the plan of the policy's decisions, and a tiny run of it."""

from __future__ import annotations

import csv
import json
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import online_real
from benchmarks.online_real_plan import SCENARIOS, draw_jobs, planned, simulated, slot_at, time_of
from scheduling import Timeline, simulate
from scheduling.online import ModelShape, Worker
from scheduling.online.facts import stage_costs

QUARTER = ModelShape(  # of Llama-3.1-8B
    hidden_size=4096, intermediate_size=14336, num_layers=8, num_heads=32, num_kv_heads=8, vocab_size=128256
)
COSTS = stage_costs(QUARTER, "h200", 1)
CAPACITY = 8192
RESULTS = Path(online_real.__file__).parent / "results"


def read(file):
    return list(csv.DictReader(file.read_text().splitlines()))


def test_the_policy_knows_the_memory_of_the_card():
    assert 75 <= online_real.memory_gib("h100") <= 80
    assert 135 <= online_real.memory_gib("h200") <= 145
    assert online_real.memory_gib("cpu") == Worker("usual", 1).memory_gib


@pytest.fixture(scope="module", params=SCENARIOS)
def scenario(request):
    jobs = draw_jobs(request.param, QUARTER, COSTS, CAPACITY)
    result, moves = simulated(jobs, Worker("host0", 1), COSTS, CAPACITY)
    plan, changes = planned(jobs, moves, COSTS, capacity_tokens=CAPACITY, tile_tokens=128)
    return jobs, result, moves, plan, changes


def test_jobs_join_the_plan_when_the_policy_says(scenario):
    jobs, _, moves, plan, changes = scenario
    timeline = simulate(plan, COSTS)
    slot_s = timeline.duration_s / plan.num_slots
    joined = {job.name: [move.time_s for move in moves if job.name in move.joins] for job in jobs}
    for job in jobs:
        slots = [
            slot
            for slot, slot_content in enumerate(plan.slots)
            if any(ref.adapter == job.name for ref in slot_content.samples)
        ]
        assert 0 <= time_of(timeline, slots[0]) - joined[job.name][0] <= 4 * slot_s
        assert joined[job.name][0] >= job.arrival_s
    for change in changes:
        if change.action == "pause":
            back = next((c.slot for c in changes if c.slot > change.slot and c.job == change.job), plan.num_slots)
            away = {ref.adapter for slot in plan.slots[change.slot : back] for ref in slot.samples}
            assert change.job not in away


def test_every_sample_is_in_the_plan_once(scenario):
    jobs, _, _, plan, _ = scenario
    seen = sorted((ref.adapter, ref.sample) for slot in plan.slots for ref in slot.samples)
    assert seen == sorted((job.name, sample) for job in jobs for sample in range(len(job.lengths)))


def test_the_simulator_agrees_with_the_plan(scenario):
    """What is left to a card is the error of the costs."""
    jobs, result, _, plan, _ = scenario
    timeline = simulate(plan, COSTS)
    errors = []
    for job in jobs:
        took = timeline.finish_s[job.name] - time_of(timeline, slot_at(timeline, job.arrival_s))
        errors.append(abs((result.finish_s[job.name] - job.arrival_s) / took - 1))
    assert result.makespan_s == pytest.approx(timeline.duration_s, rel=0.05)
    assert sum(errors) / len(errors) <= 0.05
    assert max(errors) <= 0.12


@pytest.mark.parametrize("device", ["h100", "h200"])
def test_the_rates_of_a_card_predict_what_was_measured_on_it(device, tmp_path):
    """Published completion times, at the default costs of that card."""
    options = Namespace(layers=8, device=device, small=False, again=None, out=tmp_path)
    real, model = online_real.Real(options), online_real.ModelConfig(**online_real.SHAPES["8b"] | {"num_layers": 8})
    folder = max(RESULTS.glob(f"online_real_{device}_*"))
    costs = online_real.predicted_costs(real.config("joins"), model, device)
    jobs = draw_jobs("joins", model, costs, CAPACITY)
    result, _ = simulated(jobs, real.worker, costs, CAPACITY)
    measured = {row["job"]: float(row["measured_s"]) for row in read(folder / "jobs.csv") if row["scenario"] == "joins"}
    assert len(measured) == 5
    for job in jobs:
        assert result.finish_s[job.name] - job.arrival_s == pytest.approx(measured[job.name], rel=0.10)


def test_a_tiny_run_writes_what_was_predicted_and_measured(tmp_path):
    online_real.main(["--small", "--scenarios", "queue", "--out", str(tmp_path)])
    rows = read(tmp_path / "jobs.csv")
    measured = Timeline.from_json((tmp_path / "timeline_queue.json").read_text())
    assert [row["job"] for row in rows] == [f"j{index}" for index in range(5)]
    for row in rows:
        assert float(row["measured_s"]) > 0
        assert measured.finish_s[row["job"]] >= float(row["measured_s"]) - 1e-3
        for source in ("simulated", "planned", "profiled"):
            error = float(row[f"{source}_s"]) / float(row["measured_s"]) - 1
            assert float(row[f"{source}_error"]) == pytest.approx(error, abs=5e-3)
    (whole,) = read(tmp_path / "runs.csv")
    assert int(whole["tokens"]) == sum(int(row["tokens"]) for row in rows) == measured.tokens
    assert float(whole["makespan_measured_s"]) == pytest.approx(measured.duration_s, abs=1e-3)
    assert {"device", "jax", "date", "capacity_tokens"} <= json.loads((tmp_path / "conditions.json").read_text()).keys()
