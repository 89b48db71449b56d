"""What is measured while a run goes on is what its timeline says afterwards."""

from __future__ import annotations

import pytest
from virtual_clock import VirtualClock

from lorafusion_jax.session.spans import RECENT, Spans
from scheduling import AdapterJob, Plan, issue_order, make_plan
from scheduling.pipeline import Event, one_forward_one_backward


def plan_of(slots: int, stages: int) -> Plan:
    return make_plan([AdapterJob("law", [100] * slots, slots)], capacity_tokens=128, num_stages=stages)


@pytest.fixture
def clock(monkeypatch):
    return VirtualClock(monkeypatch)


def play(clock: VirtualClock, spans: Spans, plan: Plan) -> None:
    """Every event takes a millisecond, and now and then the host is late, at the beginning more so."""
    for event in issue_order(one_forward_one_backward(plan), plan.num_stages):
        if event.slot % 3 == 0:
            clock.now += 0.002 if event.slot < RECENT else 0.001
        clock.run(spans, spans.issued(event), 0.001)


def test_the_share_of_bubbles_is_that_of_the_timeline(clock):
    plan, spans = plan_of(20, 2), Spans(2)
    play(clock, spans, plan)
    timeline = spans.close(plan)
    assert spans.bubble_share() == timeline.bubble_share
    assert 0 < timeline.bubble_share < 1


def test_only_recent_slots_count(clock):
    plan, spans = plan_of(3 * RECENT, 2), Spans(2)
    play(clock, spans, plan)
    timeline, share = spans.close(plan), spans.bubble_share()
    assert share == pytest.approx(timeline.of_slots(range(2 * RECENT, 3 * RECENT)).bubble_share, rel=0.1)
    assert share != timeline.bubble_share


@pytest.mark.parametrize(("slots", "stages"), [(20, 1), (4, 2)])
def test_one_stage_and_a_few_slots_have_no_share_of_bubbles(slots, stages, clock):
    plan, spans = plan_of(slots, stages), Spans(stages)
    play(clock, spans, plan)
    spans.close(plan)
    assert spans.bubble_share() is None


def test_a_failure_is_found_where_nothing_is_recorded_any_more(clock, monkeypatch):
    class Broken:
        def block_until_ready(self):
            raise RuntimeError("a device that computes wrongly")

    monkeypatch.setattr("lorafusion_jax.session.spans.MOST", 10)
    plan, spans = plan_of(20, 2), Spans(2)
    play(clock, spans, plan)
    failing = Event("backward", 1, 19, ("law",))
    spans.follow(spans.issued(failing), Broken())
    assert spans.first_failure() == failing


@pytest.mark.parametrize("most", [10, 31, 32, 33, 34, 35])
def test_a_slot_of_which_a_part_is_missing_is_left_out(most, clock, monkeypatch):
    """As after a failure, or when a run is too long to be recorded to its end."""
    monkeypatch.setattr("lorafusion_jax.session.spans.MOST", most)
    plan, spans = plan_of(20, 2), Spans(2)
    play(clock, spans, plan)
    timeline = spans.close(plan)
    passes = [(kind, stage) for kind in ("forward", "backward") for stage in (0, 1)]
    seen = {span.slot for span in timeline.spans}
    assert len(seen) > 1
    for slot in seen:
        assert sorted((s.kind, s.stage) for s in timeline.spans if s.slot == slot if s.kind != "update") == sorted(
            passes
        )
