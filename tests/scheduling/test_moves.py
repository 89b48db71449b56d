"""Replanning for a run that moves to other devices."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import jobs, limits

from scheduling import (
    AdapterJob,
    Layout,
    Plan,
    PlanError,
    Slot,
    default_cost_model,
    find_violations,
    lower_bound,
    make_plan,
    plan_statistics,
    replan,
)

EVALUATIONS = {"search_evaluations": 200}
JOBS = [AdapterJob("law", [300, 200, 250, 100, 90, 80], 2), AdapterJob("med", [400, 30, 20, 500], 1)]
PLAN = make_plan(JOBS, capacity_tokens=640, num_stages=3, data_parallel=2, time_limit_s=0)
MOVED = replan(PLAN, at_slot=2, num_stages=2, data_parallel=1, time_limit_s=0)


def codes(plan: Plan) -> list[str]:
    return [violation.code for violation in find_violations(plan)]


@settings(max_examples=80, deadline=None)
@given(jobs(most_tokens=128), limits(), st.data())
def test_repeated_moves(jobs, limits, data):
    """Also back to a checkpoint before the last move, and on."""
    plan = make_plan(jobs, **limits, time_limit_s=0)
    for _ in range(data.draw(st.integers(1, 3))):
        before, at_slot = plan, data.draw(st.integers(0, plan.num_slots))
        stages, replicas = data.draw(st.sampled_from([1, 2, 5])), data.draw(st.sampled_from([1, 2, 4]))
        plan = replan(before, at_slot=at_slot, num_stages=stages, data_parallel=replicas, **EVALUATIONS)
        assert find_violations(plan, jobs) == []
        assert plan.slots[:at_slot] == before.slots[:at_slot]
        assert plan.layouts_before(at_slot) == before.layouts_before(at_slot)
        assert (plan.num_stages, plan.data_parallel) == (stages, replicas)
        assert plan.lower_bound <= plan.num_slots
        assert 0 < plan.density <= 1
        assert Plan.from_json(plan.to_json()) == plan
    assert sum(len(slot.samples) for slot in plan.slots) == sum(job.num_samples for job in jobs)


@settings(max_examples=40, deadline=None)
@given(jobs(most_tokens=128), limits(), st.integers(1, 8), st.integers(1, 4))
def test_a_move_before_the_first_slot_is_a_new_plan(jobs, limits, stages, replicas):
    plan = make_plan(jobs, **limits, time_limit_s=0)
    there = limits | {"num_stages": stages, "data_parallel": replicas}
    moved = replan(plan, at_slot=0, num_stages=stages, data_parallel=replicas, time_limit_s=0)
    assert moved == make_plan(jobs, **there, time_limit_s=0)
    assert moved.lower_bound == lower_bound(jobs, **there)


def test_no_distance_is_needed_across_a_move():
    plan = make_plan([AdapterJob("law", [100] * 6, 1)], capacity_tokens=128, num_stages=4, time_limit_s=0)
    assert plan.num_slots == 6 + 5 * 3
    moved = replan(plan, at_slot=1, num_stages=5, time_limit_s=0)
    assert [slot.is_noop for slot in moved.slots] == [False] + [False, True, True, True, True] * 4 + [False]
    assert moved.earlier == (Layout(end=1, num_stages=4, data_parallel=1),)


def test_replanning_without_changes_is_not_a_move():
    assert replan(PLAN, at_slot=3, num_stages=3, data_parallel=2, time_limit_s=0).earlier == ()
    at_end = replan(MOVED, at_slot=MOVED.num_slots, time_limit_s=0)
    assert (at_end.slots, at_end.earlier) == (MOVED.slots, MOVED.earlier)


def test_verifier_checks_moved_plans():
    assert MOVED.earlier == (Layout(2, 3, 2),)
    assert codes(MOVED) == []
    assert set(codes(replace(MOVED, num_stages=3))) == {"plan.distance"}, "the rest keeps a distance of 2 slots"
    assert "plan.replicas" in codes(replace(MOVED, earlier=()))
    assert "plan.replicas" in codes(replace(MOVED, earlier=(Layout(3, 3, 2),)))
    assert "plan.layouts" in codes(replace(MOVED, earlier=(Layout(2, 3, 2), Layout(1, 3, 1))))
    assert "plan.layouts" in codes(replace(MOVED, earlier=(Layout(99, 3, 2),)))
    late = replan(PLAN, at_slot=5, num_stages=1, data_parallel=1, time_limit_s=0)
    assert codes(replace(late, earlier=(Layout(5, 3, 2),))) == []
    assert set(codes(replace(late, earlier=(Layout(5, 4, 2),)))) == {"plan.distance"}, "so did what has run"
    assert "plan.order" in codes(replace(late, slots=late.slots[4::-1] + late.slots[5:]))
    with pytest.raises(PlanError, match=r"plan\.digest"):
        Plan.from_json(MOVED.to_json().replace('"earlier": [[2,3,2]]', '"earlier": [[2,4,2]]'))


def test_the_room_of_a_moved_plan_counts_the_replicas_of_each_slot():
    microbatches = sum(len(slot.replicas) for slot in MOVED.slots)
    assert MOVED.room == microbatches * 640 != MOVED.num_slots * 640
    assert MOVED.density == MOVED.tokens / MOVED.room
    statistics = plan_statistics(MOVED, default_cost_model(num_stages=2))
    assert statistics.density == MOVED.density
    empty = Slot(replicas=((),))
    assert replace(MOVED, slots=(*MOVED.slots, empty)).room == MOVED.room + 640
