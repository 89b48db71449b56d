"""Reads the samples of objectives that define the segments of a sample themselves."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lorafusion_jax.data.rows import Rows, typed_row
from lorafusion_jax.errors import DataError, LoraFusionError, did_you_mean, first_few, raise_all
from lorafusion_jax.objective.protocol import Chosen, Segment

MOST_EXPANDED = 1024  # rows that one row may stand for


class RowSample(NamedTuple):
    """One sample: a row of the file, or a group of rows.

    Attributes:
        rows: rows of the source that it comes from.
        segments: those of the first row, then those of the second.
        numbers: name → the number of each row.
    """

    rows: tuple[int, ...]
    segments: tuple[Segment, ...]
    numbers: Mapping[str, tuple[float, ...]]


class _OneRow(NamedTuple):
    number: int
    values: Mapping
    numbers: Mapping[str, float]


def read_samples(
    rows: Rows, chosen: Chosen, columns: Mapping[str, str], *, adapter: str
) -> tuple[list[RowSample], list[str]]:
    """Returns the samples of an objective, and notes.

    Args:
        columns: the objective's name of a column → its name in the rows, where they differ.
        adapter: adapter name for messages.

    Raises:
        DataError, ErrorList: data.missing-column, data.unknown-role; data.bad-row, with the rows and the reason;
            data.partial-column; data.no-group; and `rows.problems`.
    """
    column_of, types = columns_of(rows, chosen, columns), rows.types_of_texts(chosen.objective.types)
    bad: list[tuple[int, str]] = []
    samples_of: list[list[_OneRow]] = []  # of each row
    for number, row in enumerate(rows.values):
        try:
            values = typed_row({role: row[name] for role, name in column_of.items() if name in row}, types)
            samples_of.append(_expanded(chosen, number, values))
        except KeyError as missing:
            bad.append((number, f"it has no '{column_of.get(missing.args[0], missing.args[0])}'"))
        except Exception as problem:  # code of another package may raise anything
            bad.append((number, _reason(chosen, problem)))
    parts = itertools.zip_longest(*samples_of) if chosen.objective.by_part else samples_of
    single = [member for part in parts for member in part if member is not None]
    size = chosen.group or 1
    partial = partial_columns(rows, [(member.number, member.numbers) for member in single], column_of, adapter)
    starts = () if bad or partial else range(0, len(single) - size + 1, size)
    groups = [single[start : start + size] for start in starts]
    samples: list[RowSample] = []
    for members in groups:
        try:
            samples.append(_sample(chosen, members))
        except KeyError as missing:
            bad.append((members[0].number, f"it has no '{column_of.get(missing.args[0], missing.args[0])}'"))
        except Exception as problem:
            bad.append((members[0].number, _reason(chosen, problem)))
    width = chosen.objective.num_segments
    for position in range(width):
        values = [
            (row, segment.values)
            for sample in samples
            for row, segment in zip(sample.rows, sample.segments[position::width], strict=True)
        ]
        partial += partial_columns(rows, values, column_of, adapter)
    errors = [] if not bad else [_bad_rows(rows, bad, adapter, chosen)]
    raise_all([*rows.problems, *errors, *partial])
    if not samples:
        raise _no_group(rows, size, len(single), adapter)
    return samples, _left_over(single[len(groups) * size :], size)


def partial_columns(
    rows: Rows, names_of: Sequence[tuple[int, Iterable[str]]], renamed: Mapping[str, str], adapter: str
) -> list[DataError]:
    """Returns an error for each optional number or value that only some rows have.

    Args:
        names_of: row, and the names that it has.
        renamed: name → its column, where they differ.
    """
    errors = []
    for name in dict.fromkeys(name for _, names in names_of for name in names):
        has = {row: name in names for row, names in names_of}
        if without := [row for row in has if not has[row]]:
            example, column = next(row for row in has if has[row]), renamed.get(name, name)
            why = f"it has no '{column}', and {rows.locate(example)} has"
            errors.append(
                rows.refuse(
                    "data.partial-column",
                    f"{adapter}: {len(without)} of {len(has)} rows have no '{column}', the others have.",
                    [(row, why) for row in without],
                    fix=f"'{column}' in all rows of the file or in none; rows without may be in a file of their own",
                )
            )
    return errors


def _reason(chosen: Chosen, problem: Exception) -> str:
    """Describes why an objective did not take a row; what it does not raise on purpose is named as its fault."""
    if isinstance(problem, ValueError | TypeError):
        return str(problem)
    return f"objective {chosen.name} raised {type(problem).__name__}: {problem}"


def columns_of(rows: Rows, chosen: Chosen, columns: Mapping[str, str]) -> dict[str, str]:
    """Returns the objective's name of each column → its name in the rows.

    Raises:
        DataError, ErrorList: data.missing-column, data.unknown-role.
    """
    objective = chosen.objective
    present = list(dict.fromkeys(key for row in rows.values for key in row))
    column_of = {role: columns.get(role, role) for role in (*objective.columns, *objective.optional_columns)}
    for role, names in objective.stand_ins.items():
        if role not in present and role not in columns:
            column_of[role] = next((name for name in names if name in present), role)
    errors: list[LoraFusionError] = [
        DataError(
            "data.unknown-role",
            f"data.columns names the role '{role}', which objective {chosen.name} does not have.",
            fix=did_you_mean(role, column_of) or "one of " + ", ".join(column_of),
        )
        for role in columns
        if role not in column_of
    ]
    errors += [
        DataError(
            "data.missing-column",
            f"{rows.source} has no column '{column_of[role]}', which objective {chosen.name} needs.",
            where=rows.source,
            why=f"its columns are {', '.join(present)}",
            fix=f"data.columns: {{{role}: <column>}}",
        )
        for role in column_of
        if column_of[role] not in present and (role in objective.columns or role in columns)
    ]
    raise_all(errors)
    return column_of


def code_of(chosen: Chosen) -> str | None:
    """Returns the source code that reads rows for an objective, as a part of the cache key. None if there is none."""
    objective, code = chosen.objective, {}
    for function in filter(None, (objective.segments, objective.numbers, objective.expand)):
        try:
            file = inspect.getsourcefile(inspect.unwrap(function))
            if file is None:
                return None
            code[file] = Path(file).read_text(encoding="utf-8")
        except (OSError, TypeError, UnicodeDecodeError):
            return None
    return "\n".join([f"{chosen.name} {chosen.group}", *code.values()])


def _expanded(chosen: Chosen, number: int, row: Mapping) -> list[_OneRow]:
    objective = chosen.objective
    rows = [row] if objective.expand is None else list(objective.expand(row))
    if not 0 < len(rows) <= MOST_EXPANDED:
        raise ValueError(f"objective {chosen.name} makes {len(rows)} rows of it")
    return [_OneRow(number, values, _numbers(chosen, values)) for values in rows]


def _numbers(chosen: Chosen, row: Mapping) -> dict[str, float]:
    row_numbers = {} if chosen.objective.numbers is None else chosen.objective.numbers(row)
    numbers = {name: float(value) for name, value in row_numbers.items()}
    if wrong := [name for name, value in numbers.items() if not math.isfinite(value)]:
        raise ValueError(f"its '{wrong[0]}' is {numbers[wrong[0]]}, not a finite number")
    return numbers


def _sample(chosen: Chosen, members: Sequence[_OneRow]) -> RowSample:
    assert chosen.objective.segments is not None
    if chosen.group is None:
        parts = [chosen.objective.segments(members[0].values)]
    else:
        parts = list(chosen.objective.segments([member.values for member in members]))
    segments = tuple(segment for part in parts for segment in part)
    if len(parts) != len(members) or any(len(part) != chosen.objective.num_segments for part in parts):
        count = chosen.objective.num_segments
        count = count if chosen.group is None else f"{len(members)} × {count}"
        raise ValueError(f"objective {chosen.name} returns {len(segments)} segments for it, but declares {count}")
    names = members[0].numbers.keys()
    return RowSample(
        tuple(member.number for member in members),
        segments,
        {name: tuple(member.numbers[name] for member in members) for name in names},
    )


def _left_over(members: Sequence[_OneRow], size: int) -> list[str]:
    if not members:
        return []
    rows = [*dict.fromkeys(member.number for member in members)]
    rows_text = f"row{'s'[: len(rows) > 1]} {first_few(rows, 5)}"
    return [f"[data.group-rest] left out at the end, no whole group of {size}: {rows_text}"]


def _no_group(rows: Rows, size: int, count: int, adapter: str) -> DataError:
    return DataError(
        "data.no-group",
        f"{adapter}: {count} rows are fewer than one group of {size}.",
        where=rows.source,
        fix="more rows, or a smaller group in the adapter's objective",
    )


def _bad_rows(rows: Rows, bad: list[tuple[int, str]], adapter: str, chosen: Chosen) -> DataError:
    lacking = sum(why.startswith(("it has no ", "it has neither ")) for _, why in bad)
    return rows.refuse(
        "data.bad-row",
        f"{adapter}: {len(bad)} of {len(rows.values)} rows cannot be used with objective {chosen.name}.",
        bad,
        fix=_fix_of_all(rows, chosen) if lacking == len(rows.values) else "repair these rows or take them out",
    )


def _fix_of_all(rows: Rows, chosen: Chosen) -> str:
    """What to do about a file whose rows all lack what an objective reads: it was made for something else."""
    objective = chosen.objective
    columns = ", ".join((*objective.columns, *objective.optional_columns))
    others = (
        f"rows with columns that {chosen.name} reads ({columns}), or data.columns: {{NAME: COLUMN}} for other names"
    )
    if not objective.advantages:
        return others
    reward = "exact" if all("answer" in row for row in rows.values) else "FILE.py:FUNCTION"
    sampled = f"rollout: {{prompts: {rows.source}, reward: {reward}}} instead of data.train"
    return f"{sampled}: the adapter samples answers and learns from their rewards; or {others}"
