"""Generated traces: Poisson arrivals with day and night, heavy-tailed sizes, bursts of sweeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from scheduling.online.rates import Rates
from scheduling.online.types import Job, Worker

DATA = {"short": (540, 380), "medium": (950, 430), "long": (1900, 900)}  # mean and spread of a sample's tokens
LENGTHS = (32, 4096)
BASES = {  # and how popular they are
    "llama-3.1-8b": 0.35,
    "qwen2.5-14b": 0.2,
    "mistral-small-24b": 0.15,
    "qwen2.5-32b": 0.15,
    "llama-3.1-70b": 0.15,
}
DAY_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceShape:
    """What distinguishes a trace.

    Args:
        day: how much more arrives at noon than on average, and less at midnight; 0 to 1.
        sweep: share of jobs that come in sweeps: many of one base and data at once.
        sweep_jobs: smallest and largest sweep.
        hours: median GPU-hours of a job alone.
        spread: standard deviation of their logarithm; above 1.5 is heavy-tailed.
    """

    day: float = 0.0
    sweep: float = 0.0
    sweep_jobs: tuple[int, int] = (4, 16)
    hours: float = 0.5
    spread: float = 1.6
    longest_hours: float = 72.0


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
    """Draws a trace.

    load = GPU-seconds of all jobs, each alone on its best mesh / (GPUs · time from the first to the last arrival)

    Args:
        shape: a name from `TRACES`, or the figures themselves.
        bases: and their popularity (None: five from 8B to 70B).
        users: of unequal activity.
        at_start: all jobs are there at 0; `load` is not used.
    """
    shape = TRACES[shape] if isinstance(shape, str) else shape
    rates, rng = rates or Rates(), np.random.default_rng(seed)
    bases = bases or BASES
    activity = 1 / np.arange(1, users + 1) ** 0.8
    drawn: list[Job] = []
    starts: list[float] = []
    while len(drawn) < jobs:
        size = 1
        if rng.random() < shape.sweep / np.mean(shape.sweep_jobs) / (shape.sweep / np.mean(shape.sweep_jobs) + 1 - shape.sweep):
            size = int(rng.integers(shape.sweep_jobs[0], shape.sweep_jobs[1] + 1))
        first = _draw(rng, shape, bases, activity, workers, rates, len(drawn))
        gap = rng.exponential() * size
        starts += [gap] + [0.0] * (size - 1)
        drawn += [replace(first, name=f"{first.name}.{i}", rank=int(rng.choice([8, 16, 32]))) for i in range(size)] if size > 1 else [first]
    drawn, starts = drawn[:jobs], starts[:jobs]
    if at_start:
        return drawn
    work = sum(_gpu_s(job, workers, rates) for job in drawn)
    span_s = work / (load * sum(worker.gpus for worker in workers))
    uniform = np.cumsum(starts)
    uniform *= span_s / uniform[-1]
    times = _warp(uniform, shape.day)
    return [replace(job, arrival_s=round(float(time), 3)) for job, time in zip(drawn, times, strict=True)]


def _draw(rng, shape: TraceShape, bases: dict[str, float], activity, workers, rates: Rates, number: int) -> Job:
    mean, spread = DATA[str(rng.choice(list(DATA)))]
    sigma = np.sqrt(np.log(1 + (spread / mean) ** 2))
    lengths = np.clip(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, 64), *LENGTHS).astype(int)
    popularity = np.array(list(bases.values()))
    job = Job(
        name=f"j{number:05d}",
        user=f"user{rng.choice(len(activity), p=activity / activity.sum()):02d}",
        base=str(rng.choice(list(bases), p=popularity / popularity.sum())),
        arrival_s=0.0,
        lengths=lengths,
        global_batch=int(rng.choice([4, 8, 16, 32], p=[0.2, 0.4, 0.3, 0.1])),
        steps=1,
        rank=int(rng.choice([8, 16, 32, 64], p=[0.2, 0.5, 0.2, 0.1])),
    )
    hours = min(shape.longest_hours, max(0.02, shape.hours * np.exp(shape.spread * rng.standard_normal())))
    return replace(job, steps=max(4, round(hours * 3600 / _gpu_s(job, workers, rates))))


def _gpu_s(job: Job, workers: Sequence[Worker], rates: Rates) -> float:
    found = (rates.best_alone(job, worker.kind, worker.gpus) for worker in workers)
    return next(rate.gpu_s(job.steps) for rate in found if rate)


def _warp(times: np.ndarray, day: float) -> np.ndarray:
    """Moves evenly spread arrivals so that their rate is 1 − day · cos(2π t / day length)."""
    if not day:
        return times
    grid = np.linspace(0, times[-1], 20_000)
    arrived = grid - day * DAY_S / (2 * np.pi) * np.sin(2 * np.pi * grid / DAY_S)
    return np.interp(times * arrived[-1] / times[-1], arrived, grid)
