"""Elements of a timeline: spans of events, and pauses of training."""

from __future__ import annotations

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


class Pause(NamedTuple):
    """Training waits for an evaluation or a checkpoint. Events that started earlier end within the pause."""

    start_s: float
    end_s: float
    what: str = ""
