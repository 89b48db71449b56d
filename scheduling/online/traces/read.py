"""Reads arrival traces from CSV: our own columns, or those of the public Philly, Helios and ACME traces.

Public traces hold arrival, duration and number of GPUs of a job, but not what it trained. Its base and data are drawn
at random from a seed, and its steps are set so that its isolated GPU time is that of the trace.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from scheduling.errors import PlanError
from scheduling.online.rates import Rates
from scheduling.online.traces.generate import BASES, TRACES, draw_job, gpu_seconds
from scheduling.online.types import Job, Worker

OWN = ("name", "user", "base", "arrival_s", "lengths", "global_batch", "steps")
OPTIONAL: dict[str, Callable[[str], Any]] = {
    "rank": int,
    "weight": float,
    "deadline_s": float,
    "max_slowdown": float,
    "priority": int,
    "eval_every": int,
    "eval_tokens": int,
}


class Columns(NamedTuple):
    """Column names of a public trace."""

    name: str
    user: str
    submitted: str
    duration: str
    gpus: str


FORMATS = {
    "philly": Columns("jobid", "user", "submitted_time", "duration", "gpus"),
    "helios": Columns("job_id", "user", "submit_time", "duration", "gpu_num"),
    "acme": Columns("job_id", "user", "submit_time", "duration", "gpu_num"),
}


def read_trace(
    text: str,
    *,
    workers: Sequence[Worker],
    seed: int = 0,
    rates: Rates | None = None,
    bases: Mapping[str, float] | None = None,
    where: str = "",
) -> list[Job]:
    """Reads a trace. The header decides the format. Jobs without GPUs are skipped.

    Own columns: name, user, base, arrival_s, lengths (separated by spaces), global_batch, steps; optional: rank,
    weight, deadline_s, max_slowdown, priority, eval_every, eval_tokens.

    Raises:
        PlanError: `online.trace`, with the line; or the error of an invalid job.
    """
    header, *lines = [*_lines(text, where)] or [("", [])]
    names = [name.strip() for name in header[1]]
    rows = [(line, dict(zip(names, cells, strict=False))) for line, cells in lines if cells]
    columns = next((columns for columns in FORMATS.values() if set(columns) <= set(names)), None)
    if set(OWN) <= set(names):
        jobs = [_own(row, line) for line, row in rows]
    elif columns is not None:
        jobs = _public(rows, columns, workers, seed, rates or Rates(), dict(bases or BASES))
    else:
        raise PlanError(
            "online.trace",
            f"no trace has these columns: {', '.join(names) or 'none'}",
            where=where,
            fix=f"columns {', '.join(OWN)}; or those of {', '.join(FORMATS)}, e.g. {', '.join(FORMATS['helios'])}",
        )
    if not jobs:
        raise PlanError("online.trace", "the trace has no job that uses a GPU", where=where)
    return jobs


def write_trace(jobs: Sequence[Job]) -> str:
    """Writes jobs in our own columns, for `read_trace`."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    names = [*OWN, *OPTIONAL]
    table.writerow(names)
    for job in jobs:
        values = {name: getattr(job, name) for name in names} | {"lengths": " ".join(map(str, job.lengths))}
        table.writerow(["" if values[name] is None else values[name] for name in names])
    return text.getvalue()


def _lines(text: str, where: str) -> Iterator[tuple[str, list[str]]]:
    """Cells of every line, with its place for messages."""
    lines = csv.reader(io.StringIO(text))
    while True:
        try:
            cells = next(lines, None)
        except csv.Error as error:
            line = f"{where} line {lines.line_num}".strip()
            raise PlanError(
                "online.trace",
                "a line is no CSV",
                where=line,
                why=str(error),
                fix="some hundred lengths of a job are enough",
            ) from None
        if cells is None:
            return
        yield f"{where} line {lines.line_num}".strip(), cells


def _own(row: Mapping[str, str], where: str) -> Job:
    try:
        more = {name: kind(row[name]) for name, kind in OPTIONAL.items() if row.get(name)}
        return Job(
            name=row["name"],
            user=row["user"],
            base=row["base"],
            arrival_s=float(row["arrival_s"]),
            lengths=[int(tokens) for tokens in row["lengths"].split()],
            global_batch=int(row["global_batch"]),
            steps=int(row["steps"]),
            **more,
        )
    except PlanError as error:
        raise PlanError(error.code, error.what, where=where, why=error.why, fix=error.fix) from None
    except (ValueError, KeyError) as error:
        why = f"no column {error}" if isinstance(error, KeyError) else str(error)
        raise PlanError("online.trace", "a line is no job", where=where, why=why) from None


def _public(
    rows: Sequence[tuple[str, Mapping[str, str]]],
    columns: Columns,
    workers: Sequence[Worker],
    seed: int,
    rates: Rates,
    bases: dict[str, float],
) -> list[Job]:
    rng = np.random.default_rng(seed)
    submitted: list[tuple[float, Job]] = []
    for line, row in rows:
        try:
            gpus, duration_s = (_finite(row[name] or "0") for name in (columns.gpus, columns.duration))
            submitted_s = _seconds(row[columns.submitted])
            if gpus <= 0 or duration_s <= 0:
                continue
            name, user = row[columns.name], row[columns.user] or "?"
            job = draw_job(rng, TRACES["steady"], bases, rates, workers, name=name, user=user)
        except PlanError as error:
            raise PlanError(error.code, error.what, where=line, why=error.why, fix=error.fix) from None
        except (ValueError, KeyError) as error:
            why = f"no column {error}" if isinstance(error, KeyError) else str(error)
            raise PlanError("online.trace", "a line is no job", where=line, why=why) from None
        steps = max(1, round(gpus * duration_s / gpu_seconds(replace(job, steps=1), workers, rates)))
        submitted.append((submitted_s, replace(job, steps=steps)))
    first = min((submitted_s for submitted_s, _ in submitted), default=0.0)
    return [
        replace(job, arrival_s=submitted_s - first)
        for submitted_s, job in sorted(submitted, key=lambda entry: entry[0])
    ]


def _seconds(text: str) -> float:
    """Parses seconds or a date; a date without a time zone is in UTC."""
    try:
        return _finite(text)
    except ValueError:
        date = datetime.fromisoformat(text.strip().replace("/", "-"))
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text!r} is no finite number")
    return value
