"""Reads arrival traces from CSV: our own columns, or those of the public Philly, Helios and ACME traces.

Public traces hold arrival, duration and number of GPUs of a job, but not what it trained. Its base and data are drawn
at random from a seed, and its steps are set so that its isolated GPU time is that of the trace.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
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
    weight, deadline_s, max_slowdown, priority.

    Raises:
        PlanError: `online.trace`, with the line; or the error of an invalid job.
    """
    rows = csv.DictReader(io.StringIO(text))
    header = [name.strip() for name in rows.fieldnames or ()]
    rows.fieldnames = header
    if set(OWN) <= set(header):
        return [_own(row, f"{where} line {line}".strip()) for line, row in enumerate(rows, 2)]
    for columns in FORMATS.values():
        if set(columns) <= set(header):
            return _public(rows, columns, workers, seed, rates or Rates(), dict(bases or BASES), where)
    raise PlanError(
        "online.trace",
        f"no trace has these columns: {', '.join(header) or 'none'}",
        where=where,
        fix=f"columns {', '.join(OWN)}; or those of {', '.join(FORMATS)}, e.g. {', '.join(FORMATS['helios'])}",
    )


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
    except (ValueError, TypeError, AttributeError) as error:
        raise PlanError("online.trace", "a line is no job", where=where, why=str(error)) from None


def _public(
    rows: csv.DictReader[str],
    columns: Columns,
    workers: Sequence[Worker],
    seed: int,
    rates: Rates,
    bases: dict[str, float],
    where: str,
) -> list[Job]:
    rng = np.random.default_rng(seed)
    found: list[tuple[float, Job]] = []
    for line, row in enumerate(rows, 2):
        try:
            gpus, duration_s = float(row[columns.gpus] or 0), float(row[columns.duration] or 0)
            submitted_s = _seconds(row[columns.submitted])
        except (ValueError, TypeError) as error:
            raise PlanError("online.trace", "a line is no job", where=f"{where} line {line}", why=str(error)) from None
        if gpus <= 0 or duration_s <= 0:
            continue
        job = draw_job(
            rng, TRACES["steady"], bases, rates, workers, name=row[columns.name], user=row[columns.user] or "?"
        )
        steps = max(1, round(gpus * duration_s / gpu_seconds(replace(job, steps=1), workers, rates)))
        found.append((submitted_s, replace(job, steps=steps)))
    if not found:
        raise PlanError("online.trace", "no job in this trace uses a GPU", where=where)
    first = min(submitted_s for submitted_s, _ in found)
    return [replace(job, arrival_s=submitted_s - first) for submitted_s, job in sorted(found, key=lambda one: one[0])]


def _seconds(text: str) -> float:
    """Parses seconds or a date."""
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text.strip().replace("/", "-")).timestamp()
