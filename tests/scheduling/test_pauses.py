"""Pauses for evaluations and checkpoints count neither as bubbles nor as host wait."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from scheduling import (
    AdapterJob,
    Pause,
    Span,
    Timeline,
    compare_timelines,
    default_cost_model,
    make_plan,
    simulate,
    timeline_html,
    timeline_svg,
    to_perfetto,
)
from scheduling.comparison import host_wait_s

JOBS = [AdapterJob("law", [300, 200, 250] * 16, 4), AdapterJob("med", [400, 30] * 24, 3)]
PLAN = make_plan(JOBS, capacity_tokens=1024, num_stages=3)
PREDICTED = simulate(PLAN, default_cost_model(num_stages=3))
LONGEST = max(span.end_s - span.start_s for span in PREDICTED.spans)
LENGTH = 5.0  # of a pause; the whole plan takes less


def moved(timeline: Timeline, by: float) -> tuple[Span, ...]:
    return tuple(span._replace(start_s=span.start_s + by, end_s=span.end_s + by) for span in timeline.spans)


def drained() -> Timeline:
    """The run twice, with a checkpoint between."""
    start, end = PREDICTED.end_s, PREDICTED.end_s + LENGTH
    first, second = moved(PREDICTED, 0.0), moved(PREDICTED, end)
    later = tuple(span._replace(slot=span.slot + PLAN.num_slots) for span in second)
    return Timeline(spans=first + later, num_stages=3, tokens=200, pauses=(Pause(start, end, "saving"),))


def stopped() -> Timeline:
    """A run with an evaluation in the middle: what is under way goes on, nothing new begins."""
    at = PREDICTED.duration_s / 2
    spans = tuple(
        span._replace(start_s=span.start_s + LENGTH, end_s=span.end_s + LENGTH) if span.start_s > at else span
        for span in PREDICTED.spans
    )
    return replace(PREDICTED, spans=spans, title="measured", pauses=(Pause(at, at + LENGTH, "evaluating <law>"),))


def with_host(timeline: Timeline) -> Timeline:
    """A host that turns to everything just before it starts."""
    host = (span._replace(start_s=span.start_s - 1e-9, end_s=span.start_s) for span in timeline.spans)
    return replace(timeline, host=tuple(host))


def test_fill_and_drain_around_a_pause_are_not_bubbles():
    run = drained()
    assert run.bubble_s == pytest.approx([2 * idle for idle in PREDICTED.bubble_s])
    assert run.steady_s == pytest.approx([2 * steady for steady in PREDICTED.steady_s])
    assert run.bubble_share == pytest.approx(PREDICTED.bubble_share)
    assert replace(run, pauses=()).bubble_share > PREDICTED.bubble_share + 0.1
    assert run.fill_drain_s == pytest.approx(PREDICTED.fill_drain_s)
    assert min(run.paused_s) > LENGTH


def test_an_evaluation_is_not_a_bubble():
    run = stopped()
    for before, after in zip(PREDICTED.bubble_s, run.bubble_s, strict=True):
        assert before - 2 * LONGEST < after <= before + 1e-9
    assert min(replace(run, pauses=()).bubble_s) > LENGTH
    assert run.working_s == pytest.approx(PREDICTED.duration_s, abs=2 * LONGEST)
    assert run.tokens_per_s == pytest.approx(PREDICTED.tokens / run.working_s)


def test_a_stage_that_does_one_pass_between_pauses_has_no_steady_state():
    spans = (
        *(Span("forward", 0, 0, 0, 1), Span("backward", 0, 0, 5, 6)),
        *(Span("forward", 0, 1, 9, 10), Span("backward", 0, 1, 20, 21)),
    )
    run = Timeline(spans=spans, num_stages=1, pauses=(Pause(1, 5), Pause(6, 9), Pause(10, 20)))
    assert (run.steady_s, run.bubble_s) == ((0.0,), (0.0,))
    assert run.paused_s == (4.0 + 3.0 + 10.0,)
    assert run.working_s == 4.0
    assert run.fill_drain_s == 0.0


def test_of_slots_keeps_the_pauses_within():
    run = drained()
    first, second = run.of_slots(range(PLAN.num_slots)), run.of_slots(range(PLAN.num_slots, 2 * PLAN.num_slots))
    assert (first.pauses, second.pauses) == ((), ())
    middle = run.of_slots(range(5, PLAN.num_slots + 5))
    assert middle.pauses == run.pauses
    assert middle.working_s < middle.duration_s - LENGTH


def test_pauses_do_not_count_in_the_wall_ratio():
    compared = compare_timelines(PREDICTED, with_host(stopped()))
    assert compared.wall_ratio == pytest.approx(1.0, rel=0.05)
    assert compare_timelines(PREDICTED, replace(stopped(), pauses=())).wall_ratio > 2
    transfers = host_wait_s(with_host(PREDICTED))  # look like waiting: the host turns to an event when it starts
    assert all(wait < usual + LONGEST for wait, usual in zip(compared.host_wait_s, transfers, strict=True))
    assert max(host_wait_s(replace(with_host(stopped()), pauses=()))) > LENGTH / 2


def test_json_keeps_pauses_and_reads_files_without_them():
    text = stopped().to_json()
    assert Timeline.from_json(text) == stopped()
    old = "".join(line for line in text.splitlines(keepends=True) if not line.startswith('"pauses"'))
    assert Timeline.from_json(old) == replace(stopped(), pauses=())


def test_drawings_show_pauses():
    events = to_perfetto(PREDICTED, compare=with_host(stopped()))["traceEvents"]
    (pause,) = (event for event in events if event.get("cat") == "pause")
    assert (pause["pid"], pause["name"], pause["dur"]) == (2, "evaluating <law>", pytest.approx(LENGTH * 1e6))
    tracks = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert tracks[2, pause["tid"]] == "pauses"
    page = timeline_html(PREDICTED, compare=stopped())
    (data,) = re.findall(r"const timelines = (.*);\n", page)
    predicted, measured = json.loads(data)
    assert predicted["pauses"] == []
    assert [what for *_, what in measured["pauses"]] == ["evaluating <law>"]
    assert page.count("<span>pauses between microbatches</span>") == 1
    after = replace(PREDICTED, pauses=(Pause(PREDICTED.end_s, PREDICTED.end_s + LENGTH, "evaluating law"),))
    assert "pauses between microbatches" not in timeline_html(after)  # 0 s would deny an evaluation at the end
    assert re.search(r"<b>(1\.0\d\d|0\.9\d\d)</b><span>of the first's duration", page)
    texts = [element.text for element in ElementTree.fromstring(timeline_svg(stopped())).iter()]
    assert "pause: evaluating <law>" in texts


def update(stage: int, start: float, end: float) -> Span:
    return Span("update", stage, 0, start, end, ("law",))


def test_a_step_waits_for_the_gradients_of_all_stages():
    """Not for those of a neighbour only: stage 0 closes a batch last, and stage 2 is no neighbour of it."""
    passes = [Span("backward", stage, 0, 2.0 - stage, 3.0 - stage) for stage in range(3)]
    closings = [update(stage, 3.0 - stage, 3.5 - stage) for stage in range(3)]
    steps = [update(stage, 3.5, 4.0) for stage in range(3)]
    timeline = Timeline(spans=(*passes, *closings, *steps), num_stages=3)
    assert host_wait_s(with_host(timeline)) == pytest.approx((0.0, 0.0, 0.0), abs=1e-6)
    late = replace(timeline, spans=(*passes, *closings, *steps[:2], update(2, 5.0, 5.5)))
    assert host_wait_s(with_host(late)) == pytest.approx((0.0, 0.0, 1.5), abs=1e-6)


def test_closing_a_batch_does_not_wait():
    """A stage closes it as soon as its own gradients are there."""
    spans = (Span("backward", 0, 0, 1.0, 2.0), update(0, 4.0, 5.0), Span("backward", 1, 0, 0.0, 1.0), update(1, 1.0, 4))
    assert host_wait_s(with_host(Timeline(spans=spans, num_stages=2))) == pytest.approx((2.0, 0.0), abs=1e-6)
