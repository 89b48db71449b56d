"""Arrival traces: generated, or read from CSV files: our own columns, or those of the public Philly, Helios, ACME.

Generated arrivals are Poisson with a daily cycle, heavy-tailed sizes, and bursts from sweeps. Public traces hold
arrival, duration and number of GPUs of a job, but not what it trained. Its base and data are drawn at random from a
seed, and its steps are set so that its isolated GPU time is that of the trace.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.errors import PlanError
from scheduling.online.rates import Rates
from scheduling.online.types import Job, Worker

DATA = {"short": (540, 380), "medium": (950, 430), "long": (1900, 900)}  # mean and spread of a sample's tokens
LENGTHS = (32, 4096)
BASES = {  # with their popularity
    "llama-3.1-8b": 0.35,
    "qwen2.5-14b": 0.2,
    "mistral-small-24b": 0.15,
    "qwen2.5-32b": 0.15,
    "llama-3.1-70b": 0.15,
}
DAY_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceShape:
    """Parameters of a generated trace.

    Args:
        day: amplitude of the daily cycle of arrivals, from 0 to 1; the peak is at noon.
        sweep: share of jobs that arrive in sweeps: many jobs of one base and data at once.
        sweep_jobs: smallest and largest sweep.
        hours: median isolated GPU-hours of a job.
        spread: standard deviation of their logarithm; above 1.5 is heavy-tailed.
    """

    day: float = 0.0
    sweep: float = 0.0
    sweep_jobs: tuple[int, int] = (4, 16)
    hours: float = 0.5
    spread: float = 1.6
    longest_hours: float = 72.0

    @property
    def sweep_rate(self) -> float:
        """Probability that a submission is a sweep, from the share of jobs in sweeps."""
        mean = sum(self.sweep_jobs) / 2
        return self.sweep / mean / (self.sweep / mean + 1 - self.sweep)


TRACES = {
    "steady": TraceShape(),
    "day-night": TraceShape(day=0.8, sweep=0.2),
    "sweeps": TraceShape(day=0.4, sweep=0.7, spread=1.3),
}


def generate_trace(
    shape: str | TraceShape,
    *,
    jobs: int,
    workers: Sequence[Worker],
    load: float = 1.0,
    seed: int = 0,
    bases: dict[str, float] | None = None,
    users: int = 20,
    rates: Rates | None = None,
    at_start: bool = False,
) -> list[Job]:
    """Generates a trace.

    load = isolated GPU-seconds of all jobs, each on its best mesh / (GPUs · time from the first to the last arrival)

    Args:
        shape: a name from `TRACES`, or a `TraceShape`.
        bases: bases with their popularity (None: five from 8B to 70B).
        users: number of users; their activity is unequal.
        at_start: all jobs arrive at 0, and `load` is ignored.
    """
    shape = TRACES[shape] if isinstance(shape, str) else shape
    rates, rng = rates or Rates(), np.random.default_rng(seed)
    bases = bases or BASES
    activity = 1 / np.arange(1, users + 1) ** 0.8
    trace: list[Job] = []
    gaps: list[float] = []
    while len(trace) < jobs:
        user = f"user{rng.choice(users, p=activity / activity.sum()):02d}"
        first = draw_job(rng, shape, bases, rates, workers, name=f"j{len(trace):05d}", user=user)
        size = int(rng.integers(*shape.sweep_jobs, endpoint=True)) if rng.random() < shape.sweep_rate else 1
        gaps += [rng.exponential() * size] + [0.0] * (size - 1)
        ranks = [int(rng.choice([8, 16, 32])) for _ in range(size)] if size > 1 else []
        trace += [replace(first, name=f"{first.name}.{i}", rank=rank) for i, rank in enumerate(ranks)] or [first]
    trace, gaps = trace[:jobs], gaps[:jobs]
    if at_start:
        return trace
    work = sum(gpu_seconds(job, workers, rates) for job in trace)
    evenly = np.cumsum(gaps)
    evenly *= work / (load * sum(worker.gpus for worker in workers)) / evenly[-1]
    times = _warp(evenly, shape.day)
    return [replace(job, arrival_s=round(float(time), 3)) for job, time in zip(trace, times, strict=True)]


def draw_job(
    rng: np.random.Generator,
    shape: TraceShape,
    bases: dict[str, float],
    rates: Rates,
    workers: Sequence[Worker],
    *,
    name: str,
    user: str,
) -> Job:
    """Draws base, data, batch, rank and steps of a job; its arrival is 0."""
    mean, spread = DATA[str(rng.choice(list(DATA)))]
    sigma = np.sqrt(np.log(1 + (spread / mean) ** 2))
    lengths = np.clip(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, 64), *LENGTHS).astype(int).tolist()
    popularity = np.array(list(bases.values()))
    job = Job(
        name=name,
        user=user,
        base=str(rng.choice(list(bases), p=popularity / popularity.sum())),
        arrival_s=0.0,
        lengths=lengths,
        global_batch=int(rng.choice([4, 8, 16, 32], p=[0.2, 0.4, 0.3, 0.1])),
        steps=1,
        rank=int(rng.choice([8, 16, 32, 64], p=[0.2, 0.5, 0.2, 0.1])),
    )
    hours = min(shape.longest_hours, max(0.02, shape.hours * np.exp(shape.spread * rng.standard_normal())))
    return replace(job, steps=max(4, round(hours * 3600 / gpu_seconds(job, workers, rates))))


def gpu_seconds(job: Job, workers: Sequence[Worker], rates: Rates) -> float:
    """Isolated GPU-seconds of all steps of a job on its best mesh; infinite if it fits on no worker."""
    best_rates = (rates.best_isolated_rate(job, worker.kind, worker.gpus) for worker in workers)
    return next((rate.gpu_s(job.steps) for rate in best_rates if rate), float("inf"))


def _warp(times: NDArray[np.float64], day: float) -> NDArray[np.float64]:
    """Maps evenly spread arrivals to a rate of 1 − day · cos(2π t / day length)."""
    if not day:
        return times
    grid: NDArray[np.float64] = np.linspace(0, float(times[-1]), 20_000)
    cumulative = grid - day * DAY_S / (2 * np.pi) * np.sin(2 * np.pi * grid / DAY_S)
    warped = np.interp(times * cumulative[-1] / times[-1], cumulative, grid)  # pyright: ignore[reportUnknownVariableType]
    return np.asarray(warped, np.float64)  # pyright: ignore[reportUnknownArgumentType]


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
