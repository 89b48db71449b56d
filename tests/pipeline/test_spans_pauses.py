"""Pauses are no bubbles while a run goes on, and what closes and steps an adapter is recorded where it runs."""

from __future__ import annotations

import pytest
from virtual_clock import VirtualClock

from lorafusion_jax.session.spans import Spans
from scheduling import AdapterJob, Plan, issue_order, make_plan
from scheduling.pipeline import Event, one_forward_one_backward

PAUSE_S, LATE_S = 0.3, 0.0005


@pytest.fixture
def clock(monkeypatch):
    return VirtualClock(monkeypatch)


def plan_of(slots: int, stages: int) -> Plan:
    return make_plan([AdapterJob("law", [100] * slots, slots)], capacity_tokens=128, num_stages=stages)


def play(clock: VirtualClock, spans: Spans, plan: Plan, pauses: dict[int, str]) -> None:
    """Every event takes no time and waits a little for the host.

    Pauses come before the first pass of their slot, when all passes before are done, as in a run.
    """
    for event in issue_order(one_forward_one_backward(plan), plan.num_stages):
        if (event.kind, event.stage) == ("forward", 0) and event.slot in pauses:
            with spans.pause(pauses[event.slot]):
                clock.now += PAUSE_S
        issued = spans.issued(event)
        clock.now += LATE_S
        clock.run(spans, issued, 0.0)


def test_a_pause_is_no_bubble(clock):
    plan, spans = plan_of(20, 2), Spans(2)
    play(clock, spans, plan, {0: "evaluating law", 8: "saving", 14: "evaluating law"})
    timeline = spans.close(plan)
    assert [pause.what for pause in timeline.pauses] == ["saving", "evaluating law"]  # the first came before the run
    assert all(pause.end_s - pause.start_s >= PAUSE_S for pause in timeline.pauses)
    assert max(timeline.bubble_s) < PAUSE_S < 2 * PAUSE_S < min(timeline.paused_s)
    assert timeline.working_s < timeline.duration_s - 2 * PAUSE_S
    assert spans.bubble_share() == timeline.bubble_share


def test_a_pause_that_fails_ends_there(clock):
    plan, spans = plan_of(3, 1), Spans(1)
    play(clock, spans, plan, {})
    full = OSError("full")
    with pytest.raises(OSError, match="full"), spans.pause("saving"):
        clock.fail(full)
    clock.run(spans, spans.issued(Event("forward", 0, 3)), 0.0)
    clock.run(spans, spans.issued(Event("backward", 0, 3)), 0.0)
    assert [pause.what for pause in spans.close(plan_of(4, 1)).pauses] == ["saving"]


def test_runs_with_nothing_but_pauses_have_no_share_of_bubbles(clock):
    plan, spans = plan_of(8, 2), Spans(2)
    for event in sorted(issue_order(one_forward_one_backward(plan), 2), key=lambda event: event.slot):
        with spans.pause("evaluating law"):
            clock.run(spans, spans.issued(event), 0.03)
    spans.close(plan)
    assert spans.bubble_share() is None


def test_a_step_begins_when_the_last_stage_has_closed_the_batch(clock):
    plan, spans = plan_of(1, 3), Spans(3)
    for stage in range(3):
        for kind in ("forward", "backward"):
            clock.run(spans, spans.issued(Event(kind, stage, 0)), 0.0)
    closings = {2: 0.05, 1: 0.1, 0: 0.3}
    results = [
        [clock.begin(spans, spans.issued(Event("update", stage, 0, ("law",)), stepping=stepping)) for stage in closings]
        for stepping in (False, True)
    ]
    for later, clock.now in zip(results[0], closings.values(), strict=True):
        clock.end(spans, later)
    clock.now = 0.6
    for later in results[1]:
        clock.end(spans, later)
    updates = [span for span in spans.close(plan).spans if span.kind == "update"]
    assert [(span.stage, span.end_s) for span in updates[:3]] == list(closings.items())
    assert {(span.stage, span.start_s, span.end_s) for span in updates[3:]} == {(stage, 0.3, 0.6) for stage in range(3)}
