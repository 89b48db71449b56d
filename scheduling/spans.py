"""What a timeline consists of: when something ran, and when training stood still."""

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
    """Training stood still for something else: an evaluation, a checkpoint. Everything begun before ends in it."""

    start_s: float
    end_s: float
    what: str = ""
