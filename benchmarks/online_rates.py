"""Compares the rate model with simulated windows: tokens per second and slowdowns of groups that the policy would form.

`seen` groups have lengths like those that the fluid model was fitted on; `unseen` ones have equal, two-peaked, normal
and long-tailed lengths, and other batches, ranks and bases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from scheduling import AdapterJob, Plan, simulate
from scheduling.baselines import one_after_another
from scheduling.online import TRACES, ChangeCosts, GroupRate, Job, Rates, Worker
from scheduling.online.facts import stage_costs
from scheduling.online.sharing import IsolatedRate
from scheduling.online.traces import BASES, draw_job
from scheduling.pipeline import one_forward_one_backward
from scheduling.types import Limits, Slot
from scheduling.window import Cursor, Tail, plan_window

KIND = ("h200", 140.0)
STEPS = 80  # of the members in the mean
ALONE = 12  # batches of an isolated job
WINDOW_SLOTS = 48
UNSEEN_BASES = ("mistral-7b", "qwen3-14b", "mistral-small-24b", "llama-3.3-70b")


class Played(Rates):
    """Isolated rates from plans that are simulated, on the meshes of the model."""

    def isolated_rate(self, job: Job, kind: tuple[str, float], gpus: int) -> IsolatedRate | None:
        rate = super().isolated_rate(job, kind, gpus)
        return rate and self._jobs.once(job, ("played", gpus), lambda: IsolatedRate(self._step_s(job, rate), rate.mesh))

    def _step_s(self, job: Job, rate: IsolatedRate) -> float:
        stages, replicas, capacity = rate.mesh
        adapter = AdapterJob(job.name, np.resize(job.lengths, ALONE * job.global_batch).tolist(), job.global_batch)
        plan = one_after_another([adapter], capacity_tokens=capacity, num_stages=stages, data_parallel=replicas)
        costs = stage_costs(job.shape, KIND[0], stages, self.recomputes([job], KIND, rate.mesh))
        return simulate(plan, costs, program=one_forward_one_backward(plan, flush=True)).duration_s / ALONE


def compare_rates(count: int = 60, seed: int = 0, *, unseen: bool = False) -> list[dict]:
    """Rows of random groups within their bounds."""
    changes = ChangeCosts(save_s=0.0)
    rng, rates, played, rows = np.random.default_rng(seed), Rates(changes), Played(changes), []
    while len(rows) < count:
        jobs = unseen_jobs(rng) if unseen else seen_jobs(rng, rates)
        gpus = int(rng.choice([2, 4, 8] if jobs[0].base_name.endswith("70b") else [1, 2, 4, 8]))
        rate = rates.group(jobs, KIND, gpus)
        if rate is not None and rate.within_bounds:
            rows.append({"data": "unseen" if unseen else "seen"} | compare_group(jobs, gpus, rate, rates, played))
    return rows


def seen_jobs(rng: np.random.Generator, rates: Rates) -> list[Job]:
    base, size, workers = str(rng.choice(list(BASES))), int(rng.integers(2, 9)), [Worker("host0", 8)]
    drawn = (draw_job(rng, TRACES["steady"], {base: 1.0}, rates, workers, name=f"j{i}", user="u") for i in range(size))
    return [replace(job, weight=float(rng.choice([1.0, 1.0, 2.0]))) for job in drawn]


def unseen_jobs(rng: np.random.Generator) -> list[Job]:
    base, size = str(rng.choice(UNSEEN_BASES)), int(rng.integers(2, 6))
    return [
        Job(
            f"j{index}",
            "u",
            base,
            0.0,
            unseen_lengths(rng),
            global_batch=int(rng.choice([4, 6, 10, 20, 32])),
            steps=1000,
            rank=int(rng.choice([8, 32, 64])),
            weight=float(rng.choice([1.0, 1.0, 1.5, 3.0])),
        )
        for index in range(size)
    ]


def unseen_lengths(rng: np.random.Generator, count: int = 96) -> list[int]:
    lengths = (
        np.full(count, rng.integers(150, 2500)),
        np.where(rng.random(count) < 0.6, rng.normal(250, 60, count), rng.normal(2400, 400, count)),
        rng.normal(rng.uniform(400, 1500), 200, count),
        120 + 500 * rng.pareto(1.5, count),
    )[rng.integers(4)]
    return np.clip(lengths, 40, 4000).astype(int).tolist()


def compare_group(jobs: Sequence[Job], gpus: int, searched: GroupRate, rates: Rates, played: Played) -> dict:
    """Simulates windows of about `STEPS` steps of every job, as a session plans them, until the first job ends."""
    rate = rates.formed(jobs, KIND, searched.mesh)
    assert rate is not None
    seconds = STEPS / float(np.mean(rate.steps_per_s))
    planned = [
        AdapterJob(
            job.name,
            np.resize(job.lengths, max(3, round(seconds * steps)) * job.global_batch).tolist(),
            job.global_batch,
            weight=job.weight,
        )
        for job, steps in zip(jobs, rate.steps_per_s, strict=True)
    ]
    stages, replicas, capacity = rate.mesh
    plan = plan_of_windows(planned, Limits(capacity_tokens=capacity, num_stages=stages, data_parallel=replicas))
    timeline = simulate(plan, stage_costs(jobs[0].shape, KIND[0], stages, rates.recomputes(jobs, KIND, rate.mesh)))
    steps_per_s = _steps_per_s(timeline, jobs)
    per_weight = gpus / sum(job.weight for job in jobs)
    slowdowns = [
        played.fair_steps_per_s(job, KIND, round(per_weight * job.weight, 6)) / steps
        for job, steps in zip(jobs, steps_per_s, strict=True)
    ]
    tokens_per_s = sum(steps * job.tokens / job.steps for job, steps in zip(jobs, steps_per_s, strict=True))
    errors = [mine / true - 1 for mine, true in zip(rate.slowdowns, slowdowns, strict=True)]
    return {
        "base": jobs[0].base_name, "jobs": len(jobs), "stages": stages, "replicas": replicas,
        "capacity_tokens": capacity, "modelled_tokens_per_s": round(rate.tokens_per_s),
        "planned_tokens_per_s": round(tokens_per_s), "error": round(rate.tokens_per_s / tokens_per_s - 1, 4),
        "searched_error": round(searched.tokens_per_s / tokens_per_s - 1, 4),
        "slowdown_errors": " ".join(f"{error:.4f}" for error in errors),
        "slowdown_most": round(max(slowdowns), 3),
    }  # fmt: skip


def plan_of_windows(jobs: Sequence[AdapterJob], limits: Limits) -> Plan:
    """The slots of windows until one of the jobs ends, or all do."""
    cursors, tail, slots = tuple(Cursor(job=job) for job in jobs), Tail(limits=limits), list[Slot]()
    while not any(cursor.is_finished for cursor in cursors):
        window = plan_window(cursors, tail, WINDOW_SLOTS)
        cursors, tail, slots = window.cursors, window.tail, [*slots, *window.slots]
    return Plan(
        jobs=tuple(jobs),
        slots=tuple(slots),
        capacity_tokens=limits.capacity_tokens,
        num_stages=limits.num_stages,
        data_parallel=limits.data_parallel,
    )


def _steps_per_s(timeline, jobs: Sequence[Job]) -> list[float]:
    ends: dict[str, list[float]] = {job.name: [] for job in jobs}
    for span in timeline.spans:
        if span.kind == "update" and span.stage == 0:
            for name in span.adapters:
                ends[name].append(span.end_s)
    until = min(timeline.finish_s.values())
    before = [[end for end in sorted(ends[job.name]) if end <= until] for job in jobs]
    return [len(done) / done[-1] if done else 1 / min(ends[job.name]) for job, done in zip(jobs, before, strict=True)]
