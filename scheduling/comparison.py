"""A measured run beside its prediction."""

from __future__ import annotations

from dataclasses import dataclass

from scheduling.errors import PlanError
from scheduling.timeline import Span, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineComparison:
    """What a measured run has in common with its prediction.

    Args:
        wall_ratio: measured over predicted duration.
        bubble_shares: per stage (predicted, measured), between fill and drain.
        busy_ratios: per stage, measured over predicted time in events: where the costs are wrong.
        host_wait_s: per stage, idle time in which the input was there and only the host was late.
    """

    wall_ratio: float
    bubble_shares: tuple[tuple[float, float], ...]
    busy_ratios: tuple[float, ...]
    host_wait_s: tuple[float, ...]

    def __str__(self) -> str:
        predicted, measured = (max(pair[side] for pair in self.bubble_shares) for side in (0, 1))
        return (
            f"measured / predicted {self.wall_ratio:.3f}; bubbles of the worst stage {measured:.1%} "
            f"(predicted {predicted:.1%}); waiting for the host {max(self.host_wait_s) * 1e3:.1f} ms"
        )


def compare_timelines(predicted: Timeline, measured: Timeline) -> TimelineComparison:
    """Compares two timelines of the same slots.

    Raises:
        PlanError: `plan.other-timeline`, other stages or slots.

    >>> spans = (Span("forward", 0, 0, 0.0, 1.0), Span("backward", 0, 0, 1.0, 2.0))
    >>> compare_timelines(Timeline(spans=spans, num_stages=1), Timeline(spans=spans, num_stages=1)).wall_ratio
    1.0
    """
    here, there = ({(span.kind, span.stage, span.slot) for span in one.spans} for one in (predicted, measured))
    passes = [event for event in here ^ there if event[0] != "update"]  # updates need not be measured
    if predicted.num_stages != measured.num_stages or passes or not here:
        raise PlanError(
            "plan.other-timeline",
            "these timelines are not of the same events",
            where=f"{len(passes)} passes are in one of them only" if passes else "",
            fix="compare the same slots: timeline.of_slots(range(first, last + 1))",
        )
    return TimelineComparison(
        wall_ratio=_wall(measured) / _wall(predicted),
        bubble_shares=tuple(zip(predicted.bubble_shares, measured.bubble_shares, strict=True)),
        busy_ratios=tuple(_busy(b) / _busy(a) for a, b in zip(predicted.by_stage, measured.by_stage, strict=True)),
        host_wait_s=host_wait_s(measured),
    )


def host_wait_s(timeline: Timeline) -> tuple[float, ...]:
    """Per stage, seconds between the moment an event could have started and the host's turning to it.

    An event can start when the one before it on its stage and the one that makes its input have ended.
    """
    issued = {(span.kind, span.stage, span.slot): span.start_s for span in timeline.host}
    ends = {(span.kind, span.stage, span.slot): span.end_s for span in timeline.spans}
    waits = []
    for stage, spans in enumerate(timeline.by_stage):
        free = spans[0].start_s if spans else 0.0
        late = 0.0
        for span in spans:
            ready = max(free, ends.get((span.kind, stage + (1 if span.kind == "backward" else -1), span.slot), free))
            late += max(0.0, min(issued.get((span.kind, stage, span.slot), ready), span.start_s) - ready)
            free = span.end_s
        waits.append(late)
    return tuple(waits)


def _wall(timeline: Timeline) -> float:
    passes = [span for span in timeline.spans if span.kind != "update"]
    return max(span.end_s for span in passes) - min(span.start_s for span in passes)


def _busy(spans: tuple[Span, ...]) -> float:
    return sum(span.end_s - span.start_s for span in spans if span.kind != "update")
