"""Parses rows for objectives that define the segments of a sample themselves."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path

from lorafusion_jax.data.example import Chat, Example, Pair, Text
from lorafusion_jax.data.rows import Rows
from lorafusion_jax.errors import DataError, LoraFusionError, did_you_mean, raise_all
from lorafusion_jax.objective.protocol import Chosen, Segment


def read_segments(rows: Rows, chosen: Chosen, columns: Mapping[str, str], *, adapter: str) -> list[list[Example]]:
    """Returns the objective's segments of every row.

    Args:
        columns: the objective's name of a column → its name in the rows, where they differ.
        adapter: adapter name for messages.

    Returns:
        For each segment of a sample, the examples of all rows.

    Raises:
        DataError, ErrorList: data.missing-column, data.unknown-role; data.bad-row, with the rows and the reason; and
            `rows.problems`.
    """
    needed = columns_of(rows, chosen, columns)
    read: list[tuple[Segment, ...]] = []
    bad: list[tuple[int, str]] = []
    for number, row in enumerate(rows.values):
        try:
            read.append(_segments(chosen, {role: row[column] for role, column in needed.items() if column in row}))
        except KeyError as missing:
            bad.append((number, f"it has no '{needed.get(missing.args[0], missing.args[0])}'"))
        except (ValueError, TypeError) as problem:
            bad.append((number, str(problem)))
    errors = [] if not bad else [_bad_rows(rows, bad, adapter, chosen)]
    raise_all([*rows.problems, *errors])
    return [[_example(segments[place]) for segments in read] for place in range(chosen.objective.num_segments)]


def columns_of(rows: Rows, chosen: Chosen, columns: Mapping[str, str]) -> dict[str, str]:
    """Returns the objective's name of each column → its name in the rows.

    Raises:
        DataError, ErrorList: data.missing-column, data.unknown-role.
    """
    present = list(dict.fromkeys(key for row in rows.values for key in row))
    needed = {role: columns.get(role, role) for role in chosen.objective.columns}
    errors: list[LoraFusionError] = [
        DataError(
            "data.unknown-role",
            f"data.columns names the role '{role}', which objective {chosen.name} does not have.",
            fix=did_you_mean(role, needed) or "one of " + ", ".join(needed),
        )
        for role in columns
        if role not in needed
    ]
    errors += [
        DataError(
            "data.missing-column",
            f"{rows.source} has no column '{column}', which objective {chosen.name} needs.",
            where=rows.source,
            why=f"its columns are {', '.join(present)}",
            fix=f"data.columns: {{{role}: <column>}}",
        )
        for role, column in needed.items()
        if column not in present
    ]
    raise_all(errors)
    return needed


def code_of(chosen: Chosen) -> str | None:
    """Returns the source code that reads rows for an objective, as a part of the cache key. None if there is none."""
    function = inspect.unwrap(chosen.objective.segments) if chosen.objective.segments else None
    try:
        file = inspect.getsourcefile(function) if function is not None else None
        return None if file is None else Path(file).read_text(encoding="utf-8")
    except (OSError, TypeError, UnicodeDecodeError):
        return None


def _segments(chosen: Chosen, row: Mapping) -> tuple[Segment, ...]:
    assert chosen.objective.segments is not None
    segments, wanted = tuple(chosen.objective.segments(row)), chosen.objective.num_segments
    if len(segments) != wanted:
        raise ValueError(f"objective {chosen.name} returns {len(segments)} segments for it, but declares {wanted}")
    return segments


def _example(segment: Segment) -> Example:
    if segment.messages is not None:
        return Chat([dict(message) for message in segment.messages])
    if segment.text is not None:
        return Text(segment.text)
    return Pair(segment.prompt or "", segment.answer or "")


def _bad_rows(rows: Rows, bad: list[tuple[int, str]], adapter: str, chosen: Chosen) -> DataError:
    return DataError(
        "data.bad-row",
        f"{adapter}: {len(bad)} of {len(rows.values)} rows cannot be used with objective {chosen.name}.",
        where=rows.places([row for row, _ in bad]),
        why=f"{rows.place(bad[0][0])}: {bad[0][1]}",
        fix="repair these rows or take them out",
    )
