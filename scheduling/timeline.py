"""When each stage did what, and what follows from it; the same for predicted and for measured runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from scheduling.pipeline import Kind


class Span(NamedTuple):
    """One event with its times."""

    kind: Kind
    stage: int
    slot: int
    start_s: float
    end_s: float
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)  # no __slots__: cached properties live in __dict__
class Timeline:
    """All spans of a run, in order per stage.

    Args:
        spans: of all stages.
        num_stages: S.
        title: shown above drawings.
        slot_adapters: adapters in each slot, for colours and labels.
        tokens: real tokens of the run.
        host: when the host was busy handing an event to its stage; measured runs have it.
    """

    spans: tuple[Span, ...]
    num_stages: int
    title: str = ""
    slot_adapters: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    tokens: int = 0
    host: tuple[Span, ...] = ()

    @cached_property
    def start_s(self) -> float:
        """The first forward; drawings start here, so that timelines of one plan lie under each other."""
        return min((span.start_s for span in self.spans), default=0.0)

    @cached_property
    def end_s(self) -> float:
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.duration_s if self.duration_s else 0.0

    @cached_property
    def by_stage(self) -> tuple[tuple[Span, ...], ...]:
        stages: list[list[Span]] = [[] for _ in range(self.num_stages)]
        for span in self.spans:
            stages[span.stage].append(span)
        return tuple(tuple(sorted(spans, key=lambda span: span.start_s)) for spans in stages)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Per stage, time spent in events."""
        return tuple(sum(span.end_s - span.start_s for span in spans) for spans in self.by_stage)

    @property
    def idle_share(self) -> tuple[float, ...]:
        """Per stage, idle time / duration, fill and drain of the whole run included."""
        return tuple(1 - busy / self.duration_s if self.duration_s else 0.0 for busy in self.busy_s)

    @cached_property
    def steady_s(self) -> tuple[float, ...]:
        """Per stage, time between its first backward and the end of its last forward: neither fill nor drain."""
        return tuple(max(0.0, end - start) for start, end in map(_steady_window, self.by_stage))

    @cached_property
    def bubble_s(self) -> tuple[float, ...]:
        """Per stage, idle time inside the steady window."""
        return tuple(map(_steady_idle, self.by_stage))

    @property
    def bubble_shares(self) -> tuple[float, ...]:
        """Per stage, idle share of the steady window."""
        pairs = zip(self.bubble_s, self.steady_s, strict=True)
        return tuple(bubble / steady if steady else 0.0 for bubble, steady in pairs)

    @property
    def bubble_share(self) -> float:
        """Idle share of the steady windows of all stages."""
        return sum(self.bubble_s) / sum(self.steady_s) if sum(self.steady_s) else 0.0

    @property
    def fill_drain_s(self) -> float:
        """Idle time of a stage before its first backward and after its last forward, mean over stages."""
        idle = self.num_stages * self.duration_s - sum(self.busy_s) - sum(self.bubble_s)
        return idle / self.num_stages

    def of_slots(self, slots: range) -> Timeline:
        """The part that belongs to some slots, for example those after a warm-up; tokens in proportion to slots.

        A stage works in order, so nothing of other slots lies between its first backward and its last forward: bubbles
        of the part are right.
        """
        spans, host = (tuple(one for one in of if one.slot in slots) for of in (self.spans, self.host))
        whole, part = (len({span.slot for span in of}) for of in (self.spans, spans))
        tokens = self.tokens * part // max(whole, 1)
        return replace(self, spans=spans, host=host, tokens=tokens)

    def to_json(self) -> str:
        """Writes the timeline as JSON, a line per span; `from_json` reads it back exactly."""
        from scheduling.timeline_json import timeline_to_json

        return timeline_to_json(self)

    @staticmethod
    def from_json(text: str) -> Timeline:
        """Reads what `to_json` wrote.

        Raises:
            PlanError: `plan.timeline-format`, no timeline of this version.
        """
        from scheduling.timeline_json import timeline_from_json

        return timeline_from_json(text)

    @cached_property
    def finish_s(self) -> dict[str, float]:
        """Per adapter, the end of its last update, from the start of the run."""
        finish: dict[str, float] = {}
        for span in self.spans:
            for adapter in span.adapters:
                finish[adapter] = max(finish.get(adapter, 0.0), span.end_s - self.start_s)
        return dict(sorted(finish.items(), key=lambda item: item[1]))


def _steady_window(spans: tuple[Span, ...]) -> tuple[float, float]:
    start = next((span.start_s for span in spans if span.kind == "backward"), 0.0)
    end = next((span.end_s for span in reversed(spans) if span.kind == "forward"), 0.0)
    return start, end


def _steady_idle(spans: tuple[Span, ...]) -> float:
    start, end = _steady_window(spans)
    idle, now = 0.0, start
    for span in spans:
        if span.start_s >= start and span.end_s <= end:
            idle += max(0.0, span.start_s - now)
            now = max(now, span.end_s)
    return idle
