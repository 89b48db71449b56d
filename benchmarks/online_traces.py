"""Traces that the online policy was not tuned on: other sizes, other bursts, other batches, other users."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from scheduling.online import Job, Rates, Worker
from scheduling.online.traces import gpu_seconds

HELD_OUT = ("pareto", "bursts", "tiny+huge", "sweeps-of-30", "small-batches")
LONGEST_H = 30.0


def held_out_trace(
    name: str, *, jobs: int, workers: Sequence[Worker], load: float, seed: int, rates: Rates
) -> list[Job]:
    """A trace of `HELD_OUT`.

    | name | |
    |---|---|
    | pareto | sizes with a tail of exponent 1.2 |
    | bursts | arrivals switch between four times and a quarter of the rate |
    | tiny+huge | nine in ten jobs of a minute, the others of hours |
    | sweeps-of-30 | thirty equal jobs of a user at once |
    | small-batches | two bases, batches of 1 to 4 |
    """
    rng = np.random.default_rng([seed, HELD_OUT.index(name)])
    small = workers[0].gpus == 1
    bases = ["qwen3-8b", "mistral-7b", "qwen3-14b"] + ([] if small else ["qwen2.5-32b", "llama-3.3-70b"])
    if name == "small-batches":
        bases = ["qwen3-8b", "qwen2.5-32b"]
    drawn: list[Job] = []
    while len(drawn) < jobs:
        drawn_job = _draw(rng, name, f"h{len(drawn):04d}", bases, workers, rates)
        copies = 30 if name == "sweeps-of-30" else 1
        drawn += [replace(drawn_job, name=f"{drawn_job.name}.{copy}") for copy in range(copies)]
    drawn = drawn[:jobs]
    work_s = sum(gpu_seconds(job, workers, rates) for job in drawn)
    return _arrive(rng, name, drawn, work_s / (load * sum(worker.gpus for worker in workers)))


def _draw(
    rng: np.random.Generator, trace: str, name: str, bases: Sequence[str], workers: Sequence[Worker], rates: Rates
) -> Job:
    kind = rng.integers(3)
    if kind == 0:
        lengths = np.where(rng.random(48) < 0.6, rng.normal(250, 60, 48), rng.normal(2400, 400, 48))
    elif kind == 1:
        lengths = np.full(48, rng.integers(150, 2500))
    else:
        lengths = 120 + 500 * rng.pareto(1.5, 48)
    hours = {
        "pareto": 0.1 * (1 + rng.pareto(1.2)),
        "tiny+huge": 1 / 60 if rng.random() < 0.9 else rng.uniform(2, 8),
    }.get(trace, float(rng.gamma(1.0, 0.8)) + 0.02)
    job = Job(
        name=name,
        user=f"team{rng.integers(6)}",
        base=str(rng.choice(list(bases))),
        arrival_s=0.0,
        lengths=np.clip(lengths, 40, 4000).astype(int).tolist(),
        global_batch=int(rng.choice([1, 2, 4] if trace == "small-batches" else [4, 12, 24])),
        steps=1,
        rank=int(rng.choice([8, 32, 64])),
    )
    return replace(job, steps=max(3, round(min(LONGEST_H, hours) * 3600 / gpu_seconds(job, workers, rates))))


def _arrive(rng: np.random.Generator, name: str, jobs: Sequence[Job], seconds: float) -> list[Job]:
    """Spreads the jobs over these seconds."""
    gaps = rng.exponential(size=len(jobs))
    if name == "bursts":
        gaps *= np.where(np.arange(len(jobs)) // 25 % 2, 4.0, 0.25)
    if name == "sweeps-of-30":
        gaps[np.arange(len(jobs)) % 30 != 0] = 0.0
    times = np.cumsum(gaps)
    times *= seconds / times[-1]
    return [replace(job, arrival_s=round(float(time), 3)) for job, time in zip(jobs, times, strict=True)]
