"""Timelines as JSON with one line per span. The round trip is exact."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from scheduling.errors import PlanError
from scheduling.spans import Pause, Span

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
