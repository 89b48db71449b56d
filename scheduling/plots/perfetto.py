"""A timeline for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

from typing import Any

from scheduling.timeline import Timeline


def to_perfetto(timeline: Timeline) -> dict[str, Any]:
    """Converts to the trace event format: one track per stage, times in microseconds from the start of the run."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": timeline.title or "pipeline"}}
    ]
    for stage in range(timeline.num_stages):
        events.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": stage, "args": {"name": f"stage {stage}"}})
        events.append({"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": stage, "args": {"sort_index": stage}})
    for span in timeline.spans:
        adapters = span.adapters or timeline.slot_adapters.get(span.slot, ())
        events.append(
            {
                "ph": "X",
                "name": f"{span.kind} {span.slot}",
                "cat": span.kind,
                "pid": 1,
                "tid": span.stage,
                "ts": (span.start_s - timeline.start_s) * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "args": {"slot": span.slot, "adapters": ", ".join(adapters)},
            }
        )
    return {"displayTimeUnit": "ms", "traceEvents": events}
