"""How others would order the same jobs: plans to compare against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import numpy as np

from scheduling.bounds import bound_of_rest
from scheduling.checks import check_jobs
from scheduling.packing.fill import fill_best, fill_microbatch
from scheduling.packing.problem import Filling, Problem, make_problem, to_slots
from scheduling.types import AdapterJob, Plan
from scheduling.verify import verify_plan


def one_after_another(
    jobs: Sequence[AdapterJob], *, capacity_tokens: int, num_stages: int, data_parallel: int = 1, tile_tokens: int = 128
) -> Plan:
    """Plans one adapter at a time, each batch packed alone; no-ops keep the distance between its batches."""
    problem = make_problem(
        jobs,
        check_jobs(
            jobs,
            capacity_tokens=capacity_tokens,
            num_stages=num_stages,
            data_parallel=data_parallel,
            tile_tokens=tile_tokens,
        ),
    )
    order = ((job, number) for job, batches in enumerate(problem.batches) for number in range(len(batches)))
    return _plan(problem, _in_order(problem, order))


def batch_by_batch(
    jobs: Sequence[AdapterJob], *, capacity_tokens: int, num_stages: int, data_parallel: int = 1, tile_tokens: int = 128
) -> Plan:
    """Plans in mLoRA's order: one batch of each adapter in turn, packed alone; no-ops where too near."""
    problem = make_problem(
        jobs,
        check_jobs(
            jobs,
            capacity_tokens=capacity_tokens,
            num_stages=num_stages,
            data_parallel=data_parallel,
            tile_tokens=tile_tokens,
        ),
    )
    rounds = zip_longest(*([(job, n) for n in range(len(batches))] for job, batches in enumerate(problem.batches)))
    order = (batch for turn in rounds for batch in turn if batch is not None)
    return _plan(problem, _in_order(problem, order))


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


def _plan(problem: Problem, filling: Filling) -> Plan:
    limits = problem.limits
    everything = [np.arange(job.num_samples) for job in problem.jobs]
    plan = Plan(
        jobs=problem.jobs,
        slots=to_slots(problem, filling),
        capacity_tokens=limits.capacity_tokens,
        num_stages=limits.num_stages,
        data_parallel=limits.data_parallel,
        tile_tokens=limits.tile_tokens,
        lower_bound=bound_of_rest(problem.jobs, everything, problem.ready, limits),
    )
    verify_plan(plan)
    return plan
