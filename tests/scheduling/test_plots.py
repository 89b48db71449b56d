"""Drawings show the content of the timeline, and names are escaped."""

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from scheduling import (
    AdapterJob,
    Span,
    Timeline,
    default_cost_model,
    make_plan,
    simulate,
    timeline_html,
    timeline_svg,
    timeline_text,
    to_perfetto,
)

NASTY = '</script><b>"&'


@pytest.fixture(scope="module")
def timeline():
    jobs = [AdapterJob("law", [300, 200, 250] * 8, 4), AdapterJob(NASTY, [400, 30] * 9, 3)]
    return simulate(make_plan(jobs, capacity_tokens=1024, num_stages=3), default_cost_model(num_stages=3))


def test_perfetto_has_every_span(timeline):
    events = json.loads(json.dumps(to_perfetto(timeline)))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(timeline.spans)
    assert {event["tid"] for event in spans} == {0, 1, 2}
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(timeline.duration_s * 1e6)
    assert all(event["dur"] >= 0 for event in spans)


def test_html_is_self_contained_and_escaped(timeline):
    page = timeline_html(timeline, note="a <note>", compare=timeline)
    assert not re.search(r"(src|href)\s*=|https?://|url\(", page.replace("http://www.w3.org/2000/svg", ""))
    assert NASTY not in page
    assert "a &lt;note&gt;" in page
    assert page.count("</script>") == 1
    HTMLParser().feed(page)
    data = json.loads(re.search(r"const timelines = (.*);\n", page)[1])
    assert [len(timeline_data["spans"]) for timeline_data in data] == [len(timeline.spans)] * 2
    assert NASTY in data[0]["names"]


def test_html_of_a_long_run_is_truncated_with_a_note():
    spans = tuple(Span("forward", 0, i, float(i), i + 0.5) for i in range(70_000))
    page = timeline_html(Timeline(spans=spans, num_stages=1))
    data = json.loads(re.search(r"const timelines = (.*);\n", page)[1])[0]
    assert (len(data["spans"]), data["cut"]) == (60_000, 10_000)


def test_svg_is_well_formed(timeline):
    root = ElementTree.fromstring(timeline_svg(timeline))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "stage 2" in texts
    assert NASTY in texts
    groups = list(root.iter("{http://www.w3.org/2000/svg}g"))
    assert len(groups) == sum(span.kind != "update" for span in timeline.spans)


def test_the_legend_names_a_dozen_drawn_adapters_and_how_many_more():
    names = [f"point-{number}" for number in range(40)]
    spans = tuple(Span("forward", 0, slot, float(slot), slot + 1.0) for slot in range(40))
    timeline = Timeline(spans=spans, num_stages=1, slot_adapters={slot: (name,) for slot, name in enumerate(names)})
    elsewhere = dict.fromkeys([f"point-{number}" for number in range(1000)], "#0072b2")
    root = ElementTree.fromstring(timeline_svg(timeline, colors=elsewhere, named={"point-33", "point-900"}))
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    legend = texts[-13:]
    assert legend == ["point-33", *names[:11], "and 28 more adapters"]
    assert int(root.attrib["height"]) < 200


def test_svg_of_a_part_has_fewer_bars(timeline):
    part = timeline_svg(timeline, start_s=0.0, end_s=timeline.duration_s / 4)
    assert 0 < part.count("<g>") < timeline_svg(timeline).count("<g>")


def test_terminal(timeline):
    lines = timeline_text(timeline, width=80).splitlines()
    assert [line[:2] for line in lines[:3]] == ["s0", "s1", "s2"]
    assert all(len(line) == 80 for line in lines[:3])
    assert lines[2][4] == "·"  # the last stage waits for the first microbatch
    assert "a=law" in lines[4]


def test_terminal_marks_backwards_with_capitals():
    spans = (
        Span("forward", 0, 0, 0.0, 5.0),
        Span("backward", 0, 0, 5.0, 10.0),
        Span("update", 0, 0, 10.0, 10.0, ("a",)),
    )
    text = timeline_text(Timeline(spans=spans, num_stages=1, slot_adapters={0: ("a",)}), width=14)
    assert text.splitlines()[0] == "s0  aaaaaAAAAA"


def test_measured_timelines_need_no_plan():
    spans = (Span("forward", 0, 0, 100.0, 101.0), Span("backward", 0, 0, 101.5, 103.0))
    timeline = Timeline(spans=spans, num_stages=1, title="measured")
    assert timeline.duration_s == 3.0
    assert timeline.idle_share[0] == pytest.approx(0.5 / 3)
    for drawing in (timeline_html(timeline), timeline_svg(timeline), timeline_text(timeline)):
        assert drawing
    assert to_perfetto(timeline)["traceEvents"][-1]["ts"] == pytest.approx(1.5e6)


def test_empty_timelines_can_be_drawn():
    empty = Timeline(spans=(), num_stages=2)
    assert empty.bubble_share == 0
    assert "s1" in timeline_text(empty)
    ElementTree.fromstring(timeline_svg(empty))
    assert timeline_html(empty)
