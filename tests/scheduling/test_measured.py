"""Measured timelines: JSON, drawings with their prediction, and comparison with it."""

import json
import re
from xml.etree import ElementTree

import pytest

from scheduling import (
    AdapterJob,
    PlanError,
    Span,
    Timeline,
    compare_timelines,
    default_cost_model,
    make_plan,
    one_forward_one_backward,
    simulate,
    timeline_html,
    timeline_svg,
    to_perfetto,
)

JOBS = [AdapterJob("law", [300, 200, 250] * 16, 4), AdapterJob("médecine", [400, 30] * 24, 3)]
PLAN = make_plan(JOBS, capacity_tokens=1024, num_stages=3)
PREDICTED = simulate(PLAN, default_cost_model(num_stages=3))


LATE = one_forward_one_backward(PLAN)[0][5]  # an event of the first stage


def measure(slower: float = 1.0, late_s: float = 0.0, begin_s: float = 17.25) -> Timeline:
    """A run that took `slower` times as long, by another clock, with a host that is a millisecond ahead of its devices.

    late_s: how much too late the host turned to one event; all later ones move with it.
    """
    spans, host, shift = [], [], 0.0
    for span in sorted(PREDICTED.spans, key=lambda span: (span.start_s, span.end_s)):
        late = span[:3] == LATE[:3] and late_s
        shift += late_s if late else 0.0
        start, end = (begin_s + slower * at + shift for at in (span.start_s, span.end_s))
        spans.append(span._replace(start_s=start, end_s=end))
        begun = start if late else start - 1e-3
        host.append(Span(span.kind, span.stage, span.slot, begun, begun + 1e-6))
    return Timeline(
        spans=tuple(spans),
        host=tuple(host),
        num_stages=3,
        title="measured",
        slot_adapters=PREDICTED.slot_adapters,
        tokens=PREDICTED.tokens,
    )


def test_json_round_trip_is_exact():
    timeline = measure(1 / 3)
    text = timeline.to_json()
    assert Timeline.from_json(text) == timeline
    assert Timeline.from_json(text).to_json() == text
    assert Timeline.from_json(PREDICTED.to_json()) == PREDICTED
    assert sum(line.startswith('["') for line in text.splitlines()) == 2 * len(timeline.spans)
    assert "médecine" in text


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[:-20],
        lambda text: text.replace("lorafusion.timeline/1", "lorafusion.timeline/9"),
        lambda text: text.replace('"forward"', '"sideways"', 1),
        lambda text: text.replace('"num_stages"', '"stages"'),
        lambda text: "[]",
    ],
    ids=["cut", "version", "kind", "key", "list"],
)
def test_invalid_timeline_files_are_rejected(spoil):
    with pytest.raises(PlanError, match=r"plan\.timeline-format"):
        Timeline.from_json(spoil(measure().to_json()))


def test_comparison_reports_a_slower_run():
    comparison = compare_timelines(PREDICTED, measure(1.25))
    assert comparison.wall_ratio == pytest.approx(1.25)
    assert comparison.busy_ratios == pytest.approx([1.25] * 3)
    for predicted, measured in comparison.bubble_shares:
        assert measured == pytest.approx(predicted, abs=1e-9)  # stretched evenly, so the shares are the same
    assert "measured / predicted 1.250" in str(comparison)


def test_no_host_wait_if_the_host_is_on_time():
    assert max(compare_timelines(PREDICTED, measure()).host_wait_s) < 1e-9


def test_host_wait_of_a_late_host():
    comparison = compare_timelines(PREDICTED, measure(late_s=0.5))
    assert comparison.host_wait_s[0] == pytest.approx(0.5)
    assert comparison.wall_ratio > 1


def test_timelines_of_different_slots_cannot_be_compared():
    measured = measure()
    with pytest.raises(PlanError, match=r"plan\.other-timeline"):
        compare_timelines(PREDICTED, measured.of_slots(range(3)))
    last = PLAN.num_slots - 1
    part = compare_timelines(PREDICTED, measured, slots=range(3, last))
    assert part.wall_ratio == pytest.approx(1.0)


def test_excluded_slots_do_not_count_as_host_wait():
    slots = range(3, PLAN.num_slots - 1)
    assert max(compare_timelines(PREDICTED, measure(), slots).host_wait_s) < 1e-9
    assert max(compare_timelines(PREDICTED, measure(late_s=0.5), slots).host_wait_s) == pytest.approx(0.5)


def test_measured_timelines_may_lack_updates():
    measured = measure(1.1)
    passes = tuple(span for span in measured.spans if span.kind != "update")
    without = Timeline(spans=passes, num_stages=3)
    assert compare_timelines(PREDICTED, without).wall_ratio == pytest.approx(1.1)


def test_of_slots_has_the_bubbles_of_these_slots():
    # Two slots of idle time in the middle of a stage's run; parts with and without it.
    spans = []
    for slot in range(8):
        start = 2.0 * slot + (3.0 if slot >= 4 else 0.0)
        spans += [Span("forward", 0, slot, start, start + 1), Span("backward", 0, slot, start + 1, start + 2)]
    timeline = Timeline(spans=tuple(spans), num_stages=1, tokens=800)
    assert timeline.bubble_s == (3.0,)
    assert timeline.of_slots(range(4, 8)).bubble_s == (0.0,)
    part = timeline.of_slots(range(3, 6))
    assert (part.bubble_s, part.duration_s, part.tokens) == ((3.0,), 9.0, 300)


def test_perfetto_has_two_processes_on_one_scale():
    measured = measure(1.5)
    events = json.loads(json.dumps(to_perfetto(PREDICTED, compare=measured)))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {1: PREDICTED.title, 2: "measured"}
    tracks = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert [tracks[2, tid] for tid in range(4)] == ["stage 0", "stage 1", "stage 2", "host"]
    assert (1, 3) not in tracks
    first = {}
    for event in events:
        if event["ph"] == "X" and event["name"] == "forward 0" and event["tid"] == 0:
            first[event["pid"]] = event["ts"]
    assert first == {1: 0.0, 2: 0.0}
    host = [event for event in events if event.get("cat") == "host"]
    assert len(host) == len(measured.host)


def test_html_page_shows_both_timelines_and_their_ratio():
    page = timeline_html(PREDICTED, compare=measure(1.2), note=str(compare_timelines(PREDICTED, measure(1.2))))
    predicted, measured = json.loads(re.search(r"const timelines = (.*);\n", page)[1])
    assert predicted["host"] == []
    assert len(measured["host"]) == len(PREDICTED.spans)
    assert predicted["spans"][0][3] == measured["spans"][0][3] == 0
    assert "<b>1.200</b><span>of the first's duration</span>" in page
    assert "measured / predicted 1.200" in page


def test_svg_shows_both_timelines_on_one_scale():
    measured = measure(2.0)
    both = ElementTree.fromstring(timeline_svg(PREDICTED, compare=measured))
    namespace = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in both.iter(f"{namespace}text")]
    assert texts.count("stage 2") == 2
    assert texts.count("host") == 1
    groups = list(both.iter(f"{namespace}g"))
    passes = sum(span.kind != "update" for span in PREDICTED.spans)
    assert len(groups) == 2 * passes + sum(span.end_s > measured.start_s for span in measured.host)
    bars = [[float(group[1].get(key)) for key in ("x", "width")] for group in groups]
    assert bars[passes][1] == pytest.approx(2 * bars[0][1], rel=0.05)  # slot 0 forward takes twice as long
    assert max(x + width for x, width in bars[:passes]) < 600 < max(x + width for x, width in bars) <= 1091
