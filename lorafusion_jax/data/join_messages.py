"""What the blocks of a source say of their rows, said once for the whole source."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from lorafusion_jax.data.rows import SHOWN
from lorafusion_jax.errors import LoraFusionError

COUNTS = re.compile(r"(\d+) of (\d+)(?= rows)")
FIRST = re.compile(r"first (line|row) \d+(, message \d+)?")
PLACES = re.compile(r", (line|row)s? ([\d, ]+?)(?: and (\d+) more)?$")


def join_notes(notes: Iterable[str], rows: int) -> tuple[str, ...]:
    """Joins notes of blocks that differ in their counts and first rows only.

    Args:
        rows: of the source.

    >>> join_notes(["5 of 40 rows are odd, first line 3", "a note", "7 of 60 rows are odd, first line 44"], 200)
    ('12 of 200 rows are odd, first line 3', 'a note')
    """
    groups: dict[str, list[str]] = {}
    for note in notes:
        groups.setdefault(FIRST.sub("", COUNTS.sub("", note)), []).append(note)
    return tuple(_counted(same, rows) for same in groups.values())


def join_errors(errors: Iterable[LoraFusionError], rows: int) -> list[LoraFusionError]:
    """Joins errors of blocks that differ in their counts, rows and reasons only; the first reason stays.

    >>> places = ("a.jsonl, lines 1, 2, 3, 4, 5 and 3 more", "a.jsonl, line 20")
    >>> counts = ("8 of 10 rows are odd.", "1 of 10 rows are odd.")
    >>> odd = [LoraFusionError("odd", what, where=where) for what, where in zip(counts, places)]
    >>> [(error.what, error.where) for error in join_errors(odd, 20)]
    [('9 of 20 rows are odd.', 'a.jsonl, lines 1, 2, 3, 4, 5 and 4 more')]
    """
    groups: dict[tuple[str, str, str], list[LoraFusionError]] = {}
    for error in errors:
        groups.setdefault((error.code, COUNTS.sub("", error.what), error.fix), []).append(error)
    for first, *others in groups.values():
        if others:
            first.what = _counted([error.what for error in (first, *others)], rows)
            first.where = _joined_places([error.where for error in (first, *others)])
    return [same[0] for same in groups.values()]


def _counted(same: Sequence[str], rows: int) -> str:
    counts = [match for text in same if (match := COUNTS.search(text)) is not None]
    if len(same) == 1 or not counts:
        return same[0]
    some, all_rows = (sum(int(match[group]) for match in counts) for group in (1, 2))
    return COUNTS.sub(f"{some} of {max(all_rows, rows)}", same[0], count=1)


def _joined_places(places: Sequence[str]) -> str:
    parts = [match for text in places if (match := PLACES.search(text)) is not None]
    if len(parts) < len(places):
        return places[0]
    numbers = [number for match in parts for number in match[2].split(", ")]
    more = len(numbers[SHOWN:]) + sum(int(match[3] or 0) for match in parts)
    shown = ", ".join(numbers[:SHOWN]) + (f" and {more} more" if more else "")
    return f"{places[0][: parts[0].start()]}, {parts[0][1]}s {shown}"
