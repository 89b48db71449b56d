"""The planner: packs the samples of all jobs into slots and verifies the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from scheduling.bounds import bound_of_rest
from scheduling.checks import check_jobs, check_rests, check_time_limit
from scheduling.cost_model import CostModel
from scheduling.errors import PlanError
from scheduling.mixed_sizes import fill_sizes
from scheduling.packing.balance_tokens import balance_tokens
from scheduling.packing.balance_work import balance_work
from scheduling.packing.budget import Budget
from scheduling.packing.greedy import greedy
from scheduling.packing.problem import Filling, Problem, make_problem, to_plan
from scheduling.packing.restarts import first_filling, restart
from scheduling.packing.rungs import Rungs
from scheduling.packing.search import search
from scheduling.plan import Plan
from scheduling.rates import default_cost_model
from scheduling.simulate import simulate
from scheduling.types import AdapterJob, Limits
from scheduling.verify import verify_plan

EVALUATIONS_PER_S = 36_000  # half the speed of an idle core
EVEN_SHARE = 0.6  # of the search's evaluations, for balancing work; unused ones are added
AUTO_SAMPLES = 4_000  # "auto" compares capacities on the first batches of long jobs


def make_plan(
    jobs: Sequence[AdapterJob],
    *,
    capacity_tokens: int | Sequence[int] | Literal["auto"],
    num_stages: int,
    data_parallel: int = 1,
    tile_tokens: int = 128,
    time_limit_s: float = 0.5,
    seed: int = 0,
    search_evaluations: int | None = None,
    cost_model: CostModel | None = None,
    max_capacity_tokens: int = 16384,
    most_open: int | None = None,
    rests: Mapping[str, Sequence[int]] | None = None,
) -> Plan:
    """Plans all samples of all jobs in few slots with an even load, and verifies the plan.

    With several capacities the planner minimises the predicted time instead: a slot takes the smallest capacity that
    holds it, so an adapter on its own, the tail of a run and small batches leave less room empty.

    A greedy pass always yields a plan; a search for a shorter one follows. The search counts evaluations and reads no
    clock, so the plan depends only on the arguments, whatever the machine and its load.

    With equal weights the planner minimises the length of the run. Unequal weights are shares of the tokens per slot
    while the jobs are active, as far as the distance between batches lets a job take its share, and as far as that
    leaves microbatches full: where another order holds over 5 % more tokens a slot, slots go to whoever fills them.
    Such a plan is made by greedy passes, without a search.

    Args:
        capacity_tokens: rows of a microbatch, or up to four numbers of them, of which each slot takes one; "auto"
            takes the single one with the shortest predicted time.
        num_stages: S; batch j+1 of an adapter starts at least S slots after the last slot of batch j.
        data_parallel: microbatches per slot.
        tile_tokens: an adapter's rows in a microbatch are padded to whole tiles.
        time_limit_s: effort of the search, as seconds of a slow core: it counts as 36 000 evaluations per second.
            0 returns the greedy plan.
        search_evaluations: number of partial plans that the search evaluates, and of sample exchanges that balance
            their work (None: from `time_limit_s`).
        cost_model: predicts times for `capacity_tokens="auto"`, and for several capacities (None: 8B on an H200; only
            the ratios of the times matter).
        max_capacity_tokens: largest capacity that "auto" tries.
        most_open: jobs that have begun and have samples left, at a time (None: all). The others wait, and the longest
            go first. Such a plan is made by a greedy pass, without a search.
        rests: by job, numbers of batches, ascending: after its n-th the job waits until all others have come to theirs
            and have left the pipeline.
            Jobs that are not named fill the microbatches of the others. Each rung has its share of the effort.

    Raises:
        PlanError: jobs or settings cannot be planned. The message names adapter, sample index and length.

    >>> jobs = [AdapterJob("law", [700, 300, 512], 1), AdapterJob("med", [900, 100], 2)]
    >>> make_plan(jobs, capacity_tokens=1024, num_stages=2).num_slots
    5
    """
    effort = effort_of(time_limit_s, search_evaluations)
    jobs = tuple(jobs)
    shape = {"num_stages": num_stages, "data_parallel": data_parallel, "tile_tokens": tile_tokens}
    if capacity_tokens == "auto":
        capacity_tokens = _best_capacity(jobs, shape, cost_model, max_capacity_tokens)
    limits = check_jobs(jobs, capacity_tokens=capacity_tokens, **shape)
    check_rests(rests or {}, jobs)
    problem = make_problem(jobs, limits, most_open=most_open, rests=rests)
    positions = [np.arange(job.num_samples) for job in jobs]
    bound, filling = fill(problem, positions, effort, seed, cost_model=cost_model)
    plan = to_plan(problem, filling, seed=seed, lower_bound=bound)
    verify_plan(plan, jobs)
    return plan


class Effort(NamedTuple):
    """Budgets of a plan: for the search for fewer slots, then for balancing the work of the microbatches."""

    search: Budget
    even: Budget


def effort_of(time_limit_s: float, search_evaluations: int | None) -> Effort:
    """Counts the work that a time limit stands for. A given number of evaluations applies to search and balancing."""
    evaluations = EVALUATIONS_PER_S * check_time_limit(time_limit_s)
    if search_evaluations is not None:
        return Effort(Budget(search_evaluations), Budget(search_evaluations))
    return Effort(Budget(evaluations), Budget(EVEN_SHARE * evaluations))


def fill(
    problem: Problem,
    left: Sequence[np.ndarray],
    effort: Effort,
    seed: int,
    *,
    cost_model: CostModel | None = None,
) -> tuple[int, Filling]:
    """Returns the lower bound of a problem and the best filling found.

    Args:
        cost_model: as in `make_plan`, for several capacities.
    """
    bound, rungs = bound_of_rest(problem.jobs, left, problem.ready, problem.limits), Rungs(problem)
    if len(rungs) <= 1:
        return bound, _fill_rung(problem, left, effort, seed, bound, cost_model)
    for rung, positions in rungs:
        share = Effort(*(Budget(budget.evaluations / len(rungs)) for budget in effort))
        least = bound_of_rest(rung.jobs, positions, rung.ready, rung.limits)
        rungs.add(_fill_rung(rung, positions, share, seed, least, cost_model))
    return bound, rungs.filling


def _fill_rung(
    problem: Problem, left: Sequence[np.ndarray], effort: Effort, seed: int, bound: int, cost_model: CostModel | None
) -> Filling:
    if problem.most_open is not None:
        return balance_work(problem, greedy(problem), effort.even)
    if problem.limits.smaller:
        costs = cost_model or default_cost_model(num_stages=problem.num_stages)
        filling = fill_sizes(problem, left, effort.search, seed, costs)
        effort.even.evaluations += max(0.0, effort.search.evaluations)
        return balance_work(problem, filling, effort.even)
    budget, even = effort.search, effort.even
    filling, by_chain = first_filling(problem, bound)
    if not problem.weighted:
        filling = restart(problem, incumbent=filling, by_chain=by_chain, bound=bound, budget=budget, seed=seed)
        filling = search(problem, incumbent=filling, bound=bound, budget=budget, seed=seed)
        filling = balance_tokens(problem, filling)
    even.evaluations += max(0.0, budget.evaluations)
    return balance_work(problem, filling, even)


def _best_capacity(
    jobs: tuple[AdapterJob, ...], shape: dict[str, int], cost_model: CostModel | None, largest: int
) -> int:
    """Returns the capacity with the shortest predicted time, from greedy plans for a ladder of capacities."""
    if cost_model is None:
        raise PlanError(
            "plan.no-costs", 'capacity_tokens="auto" needs a cost model', fix="cost_model=default_cost_model(…)"
        )
    limits = check_jobs(jobs, capacity_tokens=largest, **shape)
    tile = limits.tile_tokens
    smallest = -(-max(max(job.sample_tokens) for job in jobs) // tile)
    ladder = {round(smallest * 1.2**step) * tile for step in range(64) if smallest * 1.2**step * tile <= largest}
    fewer = _first_batches(jobs)
    times = {
        capacity: _predicted_s(fewer, replace(limits, capacity_tokens=capacity), cost_model)
        for capacity in sorted(ladder)
    }
    return min(times, key=lambda capacity: (times[capacity], capacity))


def _predicted_s(jobs: tuple[AdapterJob, ...], limits: Limits, cost_model: CostModel) -> float:
    plan = make_plan(
        jobs,
        capacity_tokens=limits.capacity_tokens,
        num_stages=limits.num_stages,
        data_parallel=limits.data_parallel,
        tile_tokens=limits.tile_tokens,
        time_limit_s=0,
    )
    return simulate(plan, cost_model).duration_s


def _first_batches(jobs: tuple[AdapterJob, ...]) -> tuple[AdapterJob, ...]:
    part = min(1.0, AUTO_SAMPLES / sum(job.num_samples for job in jobs))
    return tuple(replace(job, max_batches=max(1, round(job.num_batches * part))) for job in jobs)
