"""Timelines of predicted and measured runs: spans per stage, and the figures derived from them."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

from scheduling.errors import PlanError
from scheduling.pipeline import Kind

# Timelines as JSON with one line per span. The round trip is exact.

SCHEMA = "lorafusion.timeline/1"
_KINDS = ("forward", "backward", "update")


class TimelineFields(NamedTuple):
    """The content of a timeline file."""

    spans: tuple[Span, ...]
    num_stages: int
    title: str
    slot_adapters: Mapping[int, tuple[str, ...]]
    tokens: int
    host: tuple[Span, ...]
    pauses: tuple[Pause, ...]


def fields_to_json(timeline: TimelineFields) -> str:
    """Writes a timeline with one line per span."""
    head = {
        "schema": SCHEMA,
        "title": timeline.title,
        "num_stages": timeline.num_stages,
        "tokens": timeline.tokens,
        "columns": list(Span._fields),
    }
    adapters = {str(slot): list(names) for slot, names in sorted(timeline.slot_adapters.items())}
    lines = [f"{_dump(name)}: {_dump(value)}," for name, value in head.items()]
    lines += [f'"slot_adapters": {_dump(adapters)},', f'"pauses": {_dump(timeline.pauses)},']
    lines += ['"spans": [', *_rows(timeline.spans), "],", '"host": [', *_rows(timeline.host), "]"]
    return "\n".join(["{", *lines, "}"]) + "\n"


def fields_from_json(text: str) -> TimelineFields:
    """Reads a timeline.

    Raises:
        PlanError: `plan.timeline-format`.
    """
    try:
        data = json.loads(text)
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']!r}, expected {SCHEMA}")
        return TimelineFields(
            spans=tuple(map(_span, data["spans"])),
            host=tuple(map(_span, data["host"])),
            num_stages=int(data["num_stages"]),
            title=str(data["title"]),
            tokens=int(data["tokens"]),
            slot_adapters={int(slot): tuple(names) for slot, names in data["slot_adapters"].items()},
            pauses=tuple(Pause(float(start), float(end), str(reason)) for start, end, reason in data.get("pauses", ())),
        )
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise PlanError("plan.timeline-format", "this is not a timeline", why=repr(error)) from None


def _rows(spans: Iterable[Span]) -> list[str]:
    rows = [_dump([span.kind, span.stage, span.slot, span.start_s, span.end_s, span.adapters]) for span in spans]
    return [row + "," for row in rows[:-1]] + rows[-1:]


def _span(row: list[Any]) -> Span:
    kind, stage, slot, start_s, end_s, adapters = row
    if kind not in _KINDS:
        raise ValueError(f"kind {kind!r}")
    return Span(kind, int(stage), int(slot), float(start_s), float(end_s), tuple(adapters))


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True, kw_only=True)  # no __slots__: cached properties live in __dict__
class Timeline:
    """All spans of a run, in order per stage.

    Pauses divide a run into parts. Each part has its own fill and drain, which do not count as bubbles.

    Args:
        spans: of all stages.
        num_stages: S.
        title: shown above drawings.
        slot_adapters: adapters in each slot, for colours and labels.
        tokens: real tokens of the run.
        host: spans in which the host issued an event to its stage; measured runs only.
        pauses: in order; measured runs only.
    """

    spans: tuple[Span, ...]
    num_stages: int
    title: str = ""
    slot_adapters: Mapping[int, tuple[str, ...]] = field(default_factory=dict[int, tuple[str, ...]])
    tokens: int = 0
    host: tuple[Span, ...] = ()
    pauses: tuple[Pause, ...] = ()

    @cached_property
    def start_s(self) -> float:
        """Start of the first forward. Drawings start here, so that timelines of one plan align."""
        return min((span.start_s for span in self.spans), default=0.0)

    @cached_property
    def end_s(self) -> float:
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def working_s(self) -> float:
        """Duration without the cost of pauses, which is the smallest idle time around them of any stage."""
        return self.duration_s - min(self.paused_s, default=0.0)

    @property
    def tokens_per_s(self) -> float:
        """Real tokens per second, without pauses."""
        return self.tokens / self.working_s if self.working_s else 0.0

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
        """Per stage, idle time / duration, including fill, drain and pauses."""
        return tuple(1 - busy / self.duration_s if self.duration_s else 0.0 for busy in self.busy_s)

    @cached_property
    def _parts(self) -> tuple[tuple[_Part, ...], ...]:
        ends = [pause.end_s for pause in self.pauses]
        return tuple(_parts(spans, ends) for spans in self.by_stage)

    @cached_property
    def steady_s(self) -> tuple[float, ...]:
        """Per stage, time from the first backward to the end of the last forward of each part (no fill, no drain)."""
        return tuple(sum(part.steady_s for part in parts) for parts in self._parts)

    @cached_property
    def bubble_s(self) -> tuple[float, ...]:
        """Per stage, idle time inside the steady windows."""
        return tuple(sum(part.bubble_s for part in parts) for parts in self._parts)

    @cached_property
    def paused_s(self) -> tuple[float, ...]:
        """Per stage, idle time around pauses, from the last forward before one to the first backward after it."""
        return tuple(_bubbles_at_pauses(spans, parts) for spans, parts in zip(self.by_stage, self._parts, strict=True))

    @property
    def bubble_shares(self) -> tuple[float, ...]:
        """Per stage, idle share of the steady windows."""
        pairs = zip(self.bubble_s, self.steady_s, strict=True)
        return tuple(bubble / steady if steady else 0.0 for bubble, steady in pairs)

    @property
    def bubble_share(self) -> float:
        """Idle share of the steady windows of all stages."""
        return sum(self.bubble_s) / sum(self.steady_s) if sum(self.steady_s) else 0.0

    @property
    def fill_drain_s(self) -> float:
        """Idle time of a stage before its first backward and after its last forward, mean over stages."""
        idle = self.num_stages * self.duration_s - sum(self.busy_s) - sum(self.bubble_s) - sum(self.paused_s)
        return idle / self.num_stages

    def of_slots(self, slots: range) -> Timeline:
        """The timeline of some slots, for example those after a warm-up; tokens are in proportion to slots.

        A stage works in order, so no other slot runs between its first backward and its last forward, and bubbles are
        exact. `host_wait_s` is not: before the first backward, work on other slots looks idle.
        """
        spans, host = (tuple(span for span in of if span.slot in slots) for of in (self.spans, self.host))
        num_slots, num_inside = (len({span.slot for span in of}) for of in (self.spans, spans))
        tokens = self.tokens * num_inside // max(num_slots, 1)
        return replace(self, spans=spans, host=host, tokens=tokens).with_pauses(self.pauses)

    def with_pauses(self, pauses: Sequence[Pause]) -> Timeline:
        """The same timeline with those pauses that lie between its start and its end."""
        inside = (pause for pause in pauses if pause.end_s > self.start_s and pause.start_s < self.end_s)
        return replace(self, pauses=tuple(inside))

    def to_json(self) -> str:
        """Writes the timeline as JSON with one line per span; `from_json` reads it back exactly."""
        return fields_to_json(TimelineFields(*(getattr(self, name) for name in TimelineFields._fields)))

    @staticmethod
    def from_json(text: str) -> Timeline:
        """Reads the output of `to_json`.

        Raises:
            PlanError: `plan.timeline-format`, not a timeline of this version.
        """
        return Timeline(**fields_from_json(text)._asdict())

    @cached_property
    def finish_s(self) -> dict[str, float]:
        """Per adapter, the end of its last update, from the start of the run."""
        finish: dict[str, float] = {}
        for span in self.spans:
            for adapter in span.adapters:
                finish[adapter] = max(finish.get(adapter, 0.0), span.end_s - self.start_s)
        return dict(sorted(finish.items(), key=lambda item: item[1]))


class _Part(NamedTuple):
    """A stage's work between two pauses."""

    last_forward_s: float  # its end
    first_backward_s: float  # its start
    bubble_s: float

    @property
    def steady_s(self) -> float:
        return max(0.0, self.last_forward_s - self.first_backward_s)


def _parts(spans: Sequence[Span], pause_ends: Sequence[float]) -> tuple[_Part, ...]:
    # Events that start during a pause were issued before it: the host waits for them or has queued them.
    parts = groupby(spans, key=lambda span: bisect_right(pause_ends, span.start_s))
    return tuple(_part(tuple(part)) for _, part in parts)


def _part(spans: Sequence[Span]) -> _Part:
    # A part without forwards is only drain; a part without backwards is only fill.
    forward = next((span.end_s for span in reversed(spans) if span.kind == "forward"), spans[0].start_s)
    backward = next((span.start_s for span in spans if span.kind == "backward"), spans[-1].end_s)
    return _Part(forward, backward, _idle_s(spans, backward, forward))


def _bubbles_at_pauses(spans: Sequence[Span], parts: Sequence[_Part]) -> float:
    if len(parts) < 2:
        return 0.0
    return _idle_s(spans, parts[0].last_forward_s, parts[-1].first_backward_s) - sum(p.bubble_s for p in parts[1:-1])


def _idle_s(spans: Sequence[Span], start: float, end: float) -> float:
    """Idle time between two times that no event crosses."""
    idle, now = 0.0, start
    for span in spans:
        if span.start_s >= start and span.end_s <= end:
            idle += max(0.0, span.start_s - now)
            now = max(now, span.end_s)
    return idle + max(0.0, end - now)


class Span(NamedTuple):
    """One event with its times."""

    kind: Kind
    stage: int
    slot: int
    start_s: float
    end_s: float
    adapters: tuple[str, ...] = ()


class Pause(NamedTuple):
    """Training waits for an evaluation or a checkpoint. Events that started earlier end within the pause."""

    start_s: float
    end_s: float
    what: str = ""
