"""Generated traces: Poisson arrivals with a daily cycle, heavy-tailed sizes, and bursts from sweeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

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
    drawn: list[Job] = []
    gaps: list[float] = []
    while len(drawn) < jobs:
        user = f"user{rng.choice(users, p=activity / activity.sum()):02d}"
        first = draw_job(rng, shape, bases, rates, workers, name=f"j{len(drawn):05d}", user=user)
        size = int(rng.integers(*shape.sweep_jobs, endpoint=True)) if rng.random() < shape.sweep_rate else 1
        gaps += [rng.exponential() * size] + [0.0] * (size - 1)
        drawn += [first] if size == 1 else [_variant(first, i, int(rng.choice([8, 16, 32]))) for i in range(size)]
    drawn, gaps = drawn[:jobs], gaps[:jobs]
    if at_start:
        return drawn
    work = sum(gpu_seconds(job, workers, rates) for job in drawn)
    evenly = np.cumsum(gaps)
    evenly *= work / (load * sum(worker.gpus for worker in workers)) / evenly[-1]
    times = _warp(evenly, shape.day)
    return [replace(job, arrival_s=round(float(time), 3)) for job, time in zip(drawn, times, strict=True)]


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


def _variant(job: Job, number: int, rank: int) -> Job:
    return replace(job, name=f"{job.name}.{number}", rank=rank)


def _warp(times: NDArray[np.float64], day: float) -> NDArray[np.float64]:
    """Maps evenly spread arrivals to a rate of 1 − day · cos(2π t / day length)."""
    if not day:
        return times
    grid: NDArray[np.float64] = np.linspace(0, float(times[-1]), 20_000)
    arrived = grid - day * DAY_S / (2 * np.pi) * np.sin(2 * np.pi * grid / DAY_S)
    moved = np.interp(times * arrived[-1] / times[-1], arrived, grid)  # pyright: ignore[reportUnknownVariableType]
    return np.asarray(moved, np.float64)  # pyright: ignore[reportUnknownArgumentType]
