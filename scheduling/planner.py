"""Jobs in, verified plan out."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from scheduling.bounds import lower_bound
from scheduling.errors import PlanError
from scheduling.packing.greedy import greedy
from scheduling.packing.search import Budget, search
from scheduling.packing.problem import make_problem, to_slots
from scheduling.types import AdapterJob, Plan
from scheduling.verify import verify_plan


EVALUATIONS_PER_S = 80_000  # two thirds of what one quiet core does, so that the clock seldom decides


def make_plan(
    jobs: Sequence[AdapterJob],
    *,
    capacity_tokens: int,
    num_stages: int,
    data_parallel: int = 1,
    tile_tokens: int = 128,
    time_limit_s: float = 0.5,
    seed: int = 0,
) -> Plan:
    """Plans all samples of all jobs in as few slots as it can find; the plan is verified.

    Raises:
        PlanError: jobs or settings that cannot be planned; names adapter, sample index and length.

    >>> jobs = [AdapterJob("law", [700, 300, 512], 1), AdapterJob("med", [900, 100], 2)]
    >>> make_plan(jobs, capacity_tokens=1024, num_stages=2).num_slots
    5
    """
    jobs = tuple(jobs)
    limits = {
        "capacity_tokens": capacity_tokens,
        "num_stages": num_stages,
        "data_parallel": data_parallel,
        "tile_tokens": tile_tokens,
    }
    check_jobs(jobs, **limits)
    limits = {name: int(value) for name, value in limits.items()}
    deadline = time.monotonic() + time_limit_s
    problem = make_problem(jobs, **limits)
    bound = lower_bound(jobs, **limits)
    budget = Budget(evaluations=EVALUATIONS_PER_S * time_limit_s, deadline=deadline)
    filling = search(problem, incumbent=greedy(problem), bound=bound, budget=budget, seed=seed)
    plan = Plan(jobs=jobs, slots=to_slots(problem, filling), seed=seed, lower_bound=bound, **limits)
    verify_plan(plan, jobs)
    return plan


def check_jobs(
    jobs: Sequence[AdapterJob], *, capacity_tokens: int, num_stages: int, data_parallel: int, tile_tokens: int
) -> None:
    """Refuses what cannot be planned, with the reason."""
    settings = {
        "capacity_tokens": capacity_tokens,
        "num_stages": num_stages,
        "data_parallel": data_parallel,
        "tile_tokens": tile_tokens,
    }
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise PlanError("plan.setting", f"{name} must be a whole number of at least 1, not {value!r}")
    if not jobs:
        raise PlanError("plan.no-jobs", "no adapters to plan", fix="give at least one AdapterJob")
    names = [job.name for job in jobs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise PlanError("plan.duplicate-name", f"two adapters have the name {twice!r}", fix="rename one of them")
    if capacity_tokens < tile_tokens:
        raise PlanError(
            "plan.capacity",
            f"a microbatch of {capacity_tokens} tokens has no room for one tile of {tile_tokens}",
            fix=f"capacity_tokens: {tile_tokens} or more",
        )
    _refuse_long_samples(jobs, capacity_tokens // tile_tokens * tile_tokens)


def _refuse_long_samples(jobs: Sequence[AdapterJob], room: int) -> None:
    problems, longest = [], 0
    for job in jobs:
        lengths = np.asarray(job.sample_tokens)
        for index in np.flatnonzero(lengths > room):
            problems.append(f"{job.name}: sample {index} has {lengths[index]} tokens")
            longest = max(longest, int(lengths[index]))
    if problems:
        raise PlanError(
            "plan.sample-too-long",
            f"{problems[0]}, but a microbatch holds {room} ({len(problems)} such samples)",
            problems=tuple(problems),
            fix=f"capacity_tokens: {longest} or more (a whole number of tiles), or cut or drop these samples",
        )
