"""Measured passes played again take the measured time, if the run waits for what the simulator waits for."""

import json
from dataclasses import replace

import pytest

from benchmarks.replayed import replayed_over_measured
from scheduling import AdapterJob, default_cost_model, make_plan, simulate, to_perfetto


@pytest.fixture
def trace(tmp_path):
    """trace(delay) → file of a run of three stages in which one pass begins later than it could."""
    plan = make_plan([AdapterJob("law", [700] * 24, 4)], capacity_tokens=1024, num_stages=3)
    costs = replace(default_cost_model(num_stages=3), transfer_s=0.0, transfer_token_s=0.0)
    found = to_perfetto(simulate(plan, costs))

    def write(delay):
        last = max((event for event in found["traceEvents"] if event["ph"] == "X"), key=lambda event: event["ts"])
        last["ts"] += delay * last["ts"]
        (tmp_path / "trace.json").write_text(json.dumps(found))
        return tmp_path / "trace.json"

    return write


def test_a_run_by_the_rules_is_itself(trace):
    assert replayed_over_measured(trace(0.0)) == pytest.approx(1, abs=1e-6)


def test_a_pass_that_waits_for_something_else_takes_longer_than_played_again(trace):
    assert replayed_over_measured(trace(0.25)) == pytest.approx(0.8, abs=0.02)
