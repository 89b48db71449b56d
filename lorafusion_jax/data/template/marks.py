"""Reads the marks that a sandbox writes into a rendered text: messages and generation blocks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from lorafusion_jax.data.template.hooks import GENERATION_CLOSE, GENERATION_OPEN, MESSAGE_CLOSE, MESSAGE_OPEN

MARKS = re.compile(f"([{GENERATION_OPEN}{GENERATION_CLOSE}]|{MESSAGE_OPEN}[0-9]*{MESSAGE_CLOSE})")

type Span = tuple[int, int]


class Marked(NamedTuple):
    """A render with its marks removed."""

    text: str
    written: dict[int, list[Span]]  # message → its non-empty parts of the text
    generated: list[tuple[int | None, Span]]  # message of each generation block, if known


def read_marks(marked: str) -> Marked:
    """Takes the marks out of a rendered text. Returns the text and what they mark."""
    pieces: list[str] = []
    spans_by_turn: dict[int, list[Span]] = {}
    generated: list[tuple[int | None, Span]] = []
    turn, generation_start, length = None, 0, 0
    for number, piece in enumerate(MARKS.split(marked)):
        if not number % 2:
            if piece and turn is not None:
                spans = spans_by_turn.setdefault(turn, [])
                begin = spans.pop()[0] if spans and spans[-1][1] == length else length
                spans.append((begin, length + len(piece)))
            pieces.append(piece)
            length += len(piece)
        elif piece == GENERATION_OPEN:
            generation_start = length
        elif piece == GENERATION_CLOSE:
            generated += [(turn, (generation_start, length))] if length > generation_start else []
        else:
            turn = int(piece[1:-1]) if len(piece) > 2 else None
    return Marked("".join(pieces), spans_by_turn, generated)


def spans_by_message(marked: Marked, turns: Sequence[int]) -> dict[int, tuple[Span, ...]]:
    """Groups generation blocks by message. Blocks outside of message loops belong to the answers in order."""
    owners = [turn for turn, _ in marked.generated]
    if any(owner is None for owner in owners) and len(set(owners) - {None}) == 0 and len(owners) == len(turns):
        owners = list(turns)
    by_turn: dict[int, tuple[Span, ...]] = {}
    before = turns[-1] if turns else 0
    for owner, (_, span) in zip(owners, marked.generated, strict=True):
        before = before if owner is None else owner  # e.g. an end token after the last message
        by_turn[before] = (*by_turn.get(before, ()), span)
    return dict(sorted(by_turn.items()))
