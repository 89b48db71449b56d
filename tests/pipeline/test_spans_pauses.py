"""Pauses are no bubbles while a run goes on, and what closes and steps an adapter is recorded where it runs."""

from __future__ import annotations

import time
from typing import Any

import pytest

from lorafusion_jax.pipeline.spans import Spans
from scheduling import AdapterJob, Plan, issue_order, make_plan
from scheduling.pipeline import Event, one_forward_one_backward

PAUSE_S = 0.3


class Result:
    """What a device has ready after some time."""

    def __init__(self, seconds: float):
        self._at = time.perf_counter() + seconds

    def block_until_ready(self) -> None:
        time.sleep(max(0.0, self._at - time.perf_counter()))


def after(seconds: float) -> Any:
    return Result(seconds)


def plan_of(slots: int, stages: int) -> Plan:
    return make_plan([AdapterJob("law", [100] * slots, slots)], capacity_tokens=128, num_stages=stages)


def play(spans: Spans, plan: Plan, pauses: dict[int, str]) -> None:
    """Every event takes no time and waits a little for the host.

    Pauses come before the first pass of their slot, when all passes before are done, as in a run.
    """
    for number, event in enumerate(issue_order(one_forward_one_backward(plan), plan.num_stages)):
        if (event.kind, event.stage) == ("forward", 0) and event.slot in pauses:
            while len(spans._spans) < number:  # a thread that is late would see a pass end within the pause
                time.sleep(0.001)
            with spans.pause(pauses[event.slot]):
                time.sleep(PAUSE_S)
        issued = spans.issued(event)
        time.sleep(0.0005)
        spans.follow(issued, after(0.0))


def test_a_pause_is_no_bubble():
    plan, spans = plan_of(20, 2), Spans(2)
    play(spans, plan, {0: "evaluating law", 8: "saving", 14: "evaluating law"})
    timeline = spans.close(plan)
    assert [pause.what for pause in timeline.pauses] == ["saving", "evaluating law"]  # the first came before the run
    assert all(pause.end_s - pause.start_s >= PAUSE_S for pause in timeline.pauses)
    assert max(timeline.bubble_s) < PAUSE_S < 2 * PAUSE_S < min(timeline.paused_s)
    assert timeline.working_s < timeline.duration_s - 2 * PAUSE_S
    assert spans.bubble_share() == timeline.bubble_share


def test_a_pause_that_fails_ends_there():
    plan, spans = plan_of(3, 1), Spans(1)
    play(spans, plan, {})
    with pytest.raises(OSError, match="full"), spans.pause("saving"):
        raise OSError("full")
    spans.follow(spans.issued(Event("forward", 0, 3)), after(0.0))
    spans.follow(spans.issued(Event("backward", 0, 3)), after(0.0))
    assert [pause.what for pause in spans.close(plan_of(4, 1)).pauses] == ["saving"]


def test_runs_with_nothing_but_pauses_have_no_share_of_bubbles():
    plan, spans = plan_of(8, 2), Spans(2)
    for event in sorted(issue_order(one_forward_one_backward(plan), 2), key=lambda event: event.slot):
        with spans.pause("evaluating law"):
            spans.follow(spans.issued(event), after(0.0))
            time.sleep(0.03)  # the thread that notes the end must come to run on a busy machine: 1 ms was too short
    spans.close(plan)
    assert spans.bubble_share() is None


def test_a_step_begins_when_the_last_stage_has_closed_the_batch():
    plan, spans = plan_of(1, 3), Spans(3)
    for stage in range(3):
        for kind in ("forward", "backward"):
            spans.follow(spans.issued(Event(kind, stage, 0)), after(0.0))
    closings = {2: 0.05, 1: 0.1, 0: 0.3}
    for stage, seconds in closings.items():
        spans.follow(spans.issued(Event("update", stage, 0, ("law",))), after(seconds))
    for stage in closings:
        spans.follow(spans.issued(Event("update", stage, 0, ("law",)), stepping=True), after(0.6))
    timeline = spans.close(plan)
    closed, steps = ([s for s in timeline.spans if s.kind == "update"][part] for part in (slice(3), slice(3, None)))
    assert max(span.end_s for span in closed) < 0.45
    assert {span.stage for span in steps} == {0, 1, 2}
    for span in steps:
        assert span.start_s == max(span.end_s for span in closed)
        assert span.end_s - span.start_s > 0.2
