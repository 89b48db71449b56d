"""Comparison of a measured timeline with its prediction."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scheduling.errors import PlanError
from scheduling.pipeline import Kind
from scheduling.timeline import Span, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineComparison:
    """A measured timeline relative to its prediction.

    Args:
        wall_ratio: measured over predicted duration, without pauses.
        bubble_shares: per stage (predicted, measured), between fill and drain.
        busy_ratios: per stage, measured over predicted time in events. It shows which costs are wrong.
        host_wait_s: per stage, idle time in which the input was ready and the host was late.
    """

    wall_ratio: float
    bubble_shares: tuple[tuple[float, float], ...]
    busy_ratios: tuple[float, ...]
    host_wait_s: tuple[float, ...]

    def __str__(self) -> str:
        predicted_bubble, measured_bubble = (max(pair[side] for pair in self.bubble_shares) for side in (0, 1))
        return (
            f"measured / predicted {self.wall_ratio:.3f}; bubbles of the worst stage {100 * measured_bubble:.1f} % "
            f"(predicted {100 * predicted_bubble:.1f} %); waiting for the host {max(self.host_wait_s) * 1e3:.1f} ms"
        )


def compare_timelines(predicted: Timeline, measured: Timeline, slots: range | None = None) -> TimelineComparison:
    """Compares two timelines of the same slots.

    Args:
        slots: compares only these slots of both (None: all). `measured` must still be the whole timeline: in a part
            of it, a stage that works on another slot looks idle.

    Raises:
        PlanError: `plan.other-timeline`, the timelines have different stages or slots.

    >>> spans = (Span("forward", 0, 0, 0.0, 1.0), Span("backward", 0, 0, 1.0, 2.0))
    >>> compare_timelines(Timeline(spans=spans, num_stages=1), Timeline(spans=spans, num_stages=1)).wall_ratio
    1.0
    """
    complete = measured
    if slots is not None:
        predicted, measured = predicted.of_slots(slots), measured.of_slots(slots)
    predicted_events, measured_events = (
        {(span.kind, span.stage, span.slot) for span in timeline.spans} for timeline in (predicted, measured)
    )
    passes = [
        event for event in predicted_events ^ measured_events if event[0] != "update"
    ]  # measured runs may lack updates
    if predicted.num_stages != measured.num_stages or passes or not predicted_events:
        raise PlanError(
            "plan.other-timeline",
            "these timelines contain different events",
            where=f"{len(passes)} passes are in one of them only" if passes else "",
            fix="compare the same slots: compare_timelines(predicted, measured, slots=range(first, last + 1))",
        )
    return TimelineComparison(
        wall_ratio=_wall_s(measured) / _wall_s(predicted),
        bubble_shares=tuple(zip(predicted.bubble_shares, measured.bubble_shares, strict=True)),
        busy_ratios=tuple(_busy(b) / _busy(a) for a, b in zip(predicted.by_stage, measured.by_stage, strict=True)),
        host_wait_s=host_wait_s(complete, slots),
    )


def host_wait_s(timeline: Timeline, slots: range | None = None) -> tuple[float, ...]:
    """Per stage, seconds in which an event was ready and the host had not issued it yet; pauses are excluded.

    An event is ready when the previous event of its stage and the events that produce its input have ended.

    Args:
        timeline: the whole timeline; a part may lack the event that ran between two others.
        slots: counts only the events of these slots (None: all).
    """
    issued, spans = _spans_by_name(timeline.host), _spans_by_name(timeline.spans)
    pause_ends = [pause.end_s for pause in timeline.pauses]
    free: dict[int, float] = {}
    waits = [0.0] * timeline.num_stages
    for name, span in spans.items():
        ends_s = [spans[other].end_s for other in _dependencies(name, timeline.num_stages) if other in spans]
        ready = max([free.get(name.stage, span.start_s), *ends_s])
        issue_s = min(issued[name].start_s, span.start_s) if name in issued else ready
        paused = pause_ends[: bisect_right(pause_ends, issue_s)]
        if slots is None or name.slot in slots:
            waits[name.stage] += max(0.0, issue_s - max([ready, *paused[-1:]]))
        free[name.stage] = span.end_s
    return tuple(waits)


class _Name(NamedTuple):
    """Identifies a span."""

    kind: Kind
    stage: int
    slot: int
    adapters: tuple[str, ...]  # only for updates
    number: int  # closing a batch and stepping its adapter are both updates


def _spans_by_name(spans: Sequence[Span]) -> dict[_Name, Span]:
    """Spans by name, in order of time."""
    span_by_name: dict[_Name, Span] = {}
    for span in sorted(spans, key=lambda span: span.start_s):
        name = _Name(span.kind, span.stage, span.slot, span.adapters if span.kind == "update" else (), 0)
        span_by_name[name._replace(number=1) if name in span_by_name else name] = span
    return span_by_name


def _dependencies(name: _Name, num_stages: int) -> list[_Name]:
    """The events of other stages whose results this event needs."""
    if name.kind == "update":  # needs the gradient norms of all stages
        return [name._replace(stage=stage, number=0) for stage in range(num_stages)] if name.number else []
    return [name._replace(stage=name.stage + (1 if name.kind == "backward" else -1))]


def _wall_s(timeline: Timeline) -> float:
    passes = [span for span in timeline.spans if span.kind != "update"]
    elapsed_s = max(span.end_s for span in passes) - min(span.start_s for span in passes)
    return elapsed_s - (timeline.duration_s - timeline.working_s)


def _busy(spans: tuple[Span, ...]) -> float:
    return sum(span.end_s - span.start_s for span in spans if span.kind != "update")
