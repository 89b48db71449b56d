"""Timelines as traces for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

from typing import Any

from scheduling.timeline import Pause, Span, Timeline


def to_perfetto(timeline: Timeline, *, compare: Timeline | None = None) -> dict[str, Any]:
    """Converts to the trace event format: a process per timeline, a track per stage and one each for host and pauses.

    Times are microseconds from the first forward of each timeline, so predicted and measured runs align.
    """
    charts = [timeline] if compare is None else [timeline, compare]
    events = [event for pid, chart in enumerate(charts, start=1) for event in _process(chart, pid)]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _process(timeline: Timeline, pid: int) -> list[dict[str, Any]]:
    events = [_name("process", timeline.title or "pipeline", pid, 0), _sort("process", pid, 0, pid)]
    tracks = [f"stage {stage}" for stage in range(timeline.num_stages)] + ["host"] * bool(timeline.host)
    tracks += ["pauses"] * bool(timeline.pauses)
    for tid, name in enumerate(tracks):
        events += [_name("thread", name, pid, tid), _sort("thread", pid, tid, tid)]
    events += [_span(timeline, span, pid, span.stage, f"{span.kind} {span.slot}", span.kind) for span in timeline.spans]
    events += [
        _span(timeline, span, pid, timeline.num_stages, f"{span.kind} {span.slot} to stage {span.stage}", "host")
        for span in timeline.host
    ]
    events += [_pause(timeline, pause, pid, len(tracks) - 1) for pause in timeline.pauses]
    return events


def _span(timeline: Timeline, span: Span, pid: int, tid: int, name: str, category: str) -> dict[str, Any]:
    adapters = span.adapters or timeline.slot_adapters.get(span.slot, ())
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": (span.start_s - timeline.start_s) * 1e6,
        "dur": (span.end_s - span.start_s) * 1e6,
        "args": {"slot": span.slot, "adapters": ", ".join(adapters)},
    }


def _pause(timeline: Timeline, pause: Pause, pid: int, tid: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": pause.what or "pause",
        "cat": "pause",
        "pid": pid,
        "tid": tid,
        "ts": (pause.start_s - timeline.start_s) * 1e6,
        "dur": (pause.end_s - pause.start_s) * 1e6,
    }


def _name(metadata: str, name: str, pid: int, tid: int) -> dict[str, Any]:
    return {"ph": "M", "name": f"{metadata}_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _sort(metadata: str, pid: int, tid: int, index: int) -> dict[str, Any]:
    return {"ph": "M", "name": f"{metadata}_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": index}}
