"""Plays measured passes of a pipeline again in the simulator: do its rules of who waits for whom give the time?

What a prediction gets wrong beyond this is the time of passes, not their order.
"""

from __future__ import annotations

import json
from pathlib import Path

from scheduling.pipeline import Event, play


def replayed_over_measured(trace: Path) -> float:
    """Time of a timeline's passes, each as long as measured and as early as the simulator lets it begin, over the
    measured time. Transfers and host threads, which it leaves out, make it less than one.

    Args:
        trace: of `Timeline.to_perfetto`, with a thread for each stage.
    """
    stages: dict[int, list[tuple[float, float, Event]]] = {}
    for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]:
        kind, _, slot = event["name"].partition(" ")
        if event["ph"] == "X" and kind in ("forward", "backward", "update") and slot.isdecimal():
            stage = event["tid"]
            stages.setdefault(stage, []).append((event["ts"], event["dur"], Event(kind, stage, int(slot))))
    program = tuple(tuple(event for *_, event in sorted(stages[stage])) for stage in sorted(stages))
    seconds = {event: length for passes in stages.values() for _, length, event in passes}
    ends = [end for *_, end in play(program, seconds.__getitem__)]
    return max(ends) / max(start + length for passes in stages.values() for start, length, _ in passes)
