"""Baseline plans: the same jobs in the order that other systems use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest

import numpy as np

from scheduling.bounds import bound_of_rest
from scheduling.checks import check_jobs
from scheduling.cost_model import CostModel
from scheduling.errors import PlanError
from scheduling.packing.fill import fill_best, fill_microbatch
from scheduling.packing.problem import Filling, Problem, make_problem, to_plan
from scheduling.plan import Plan
from scheduling.simulate import simulate
from scheduling.types import AdapterJob
from scheduling.verify import verify_plan


def one_after_another(
    jobs: Sequence[AdapterJob], *, capacity_tokens: int, num_stages: int, data_parallel: int = 1, tile_tokens: int = 128
) -> Plan:
    """Plans one adapter at a time. Each batch is packed separately; no-ops keep the distance between its batches.

    With one stage this is plain training of one adapter after another. With several stages the pipeline is flushed at
    every optimizer step, because S - 1 no-ops follow each batch. It stays filled only between two adapters, which
    makes this baseline slightly faster than separate runs.
    """
    problem = _problem(jobs, capacity_tokens, num_stages, data_parallel, tile_tokens)
    order = ((job, number) for job, batches in enumerate(problem.batches) for number in range(len(batches)))
    return _verified_plan(problem, _in_order(problem, order))


def batch_by_batch(
    jobs: Sequence[AdapterJob], *, capacity_tokens: int, num_stages: int, data_parallel: int = 1, tile_tokens: int = 128
) -> Plan:
    """Plans in mLoRA's order: one batch of each adapter in turn, packed separately. No-ops keep the distance.

    The pipeline holds microbatches of several adapters at once, but no microbatch mixes adapters.
    """
    problem = _problem(jobs, capacity_tokens, num_stages, data_parallel, tile_tokens)
    rounds = zip_longest(*([(job, n) for n in range(len(batches))] for job, batches in enumerate(problem.batches)))
    order = (batch for turn in rounds for batch in turn if batch is not None)
    return _verified_plan(problem, _in_order(problem, order))


def tuned(
    make: Callable[..., Plan],
    jobs: Sequence[AdapterJob],
    *,
    capacities: Iterable[int],
    cost_model: CostModel,
    **settings: int,
) -> Plan:
    """Returns the plan of the capacity with the shortest predicted time; ties go to the smaller capacity.

    Args:
        make: one of the baselines above, or `make_plan`.
        capacities: candidates. Capacities smaller than the longest sample are skipped.
        settings: further arguments of `make`.

    Raises:
        PlanError: every capacity is too small.

    >>> from scheduling import default_cost_model
    >>> jobs = [AdapterJob("law", [900, 800] * 8, 2)]
    >>> tuned(one_after_another, jobs, capacities=(1024, 2048, 8192), cost_model=default_cost_model(),
    ...       num_stages=1).capacity_tokens
    2048
    """
    plans: list[Plan] = []
    refusal: PlanError | None = None
    for capacity in sorted(capacities):
        try:
            plans.append(make(jobs, capacity_tokens=capacity, **settings))
        except PlanError as problem:
            if problem.code not in ("plan.sample-too-long", "plan.capacity"):
                raise
            refusal = problem
    if not plans:
        raise refusal or PlanError("plan.setting", "no capacities to try")
    return min(plans, key=lambda plan: (simulate(plan, cost_model).duration_s, plan.capacity_tokens))


def _problem(
    jobs: Sequence[AdapterJob], capacity_tokens: int, num_stages: int, data_parallel: int, tile_tokens: int
) -> Problem:
    limits = check_jobs(
        jobs,
        capacity_tokens=capacity_tokens,
        num_stages=num_stages,
        data_parallel=data_parallel,
        tile_tokens=tile_tokens,
    )
    return make_problem(jobs, limits)


def _in_order(problem: Problem, order: Iterator[tuple[int, int]]) -> Filling:
    filling: Filling = []
    last: dict[int, int] = {}
    empty = ((),) * problem.data_parallel
    choose = fill_best(problem)
    for job, number in order:
        if job in last:
            filling += [empty] * max(0, last[job] + problem.num_stages - len(filling))
        batch, mask = [0] * len(problem.jobs), [0] * len(problem.jobs)
        tokens = [0] * len(problem.jobs)
        current = problem.batches[job][number]
        batch[job], mask[job], tokens[job] = number, current.full_mask, current.total
        while mask[job]:
            filling.append(
                tuple(
                    fill_microbatch(problem, [job], batch, mask, tokens, choose) for _ in range(problem.data_parallel)
                )
            )
        last[job] = len(filling) - 1
    return filling


def _verified_plan(problem: Problem, filling: Filling) -> Plan:
    everything = [np.arange(job.num_samples) for job in problem.jobs]
    bound = bound_of_rest(problem.jobs, everything, problem.ready, problem.limits)
    plan = to_plan(problem, filling, lower_bound=bound)
    verify_plan(plan)
    return plan
