"""How others would order the same jobs: plans to compare against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from scheduling.bounds import lower_bound
from scheduling.checks import check_jobs
from scheduling.packing.fill import chooser, fill_microbatch
from scheduling.packing.problem import Filling, Problem, make_problem, to_slots
from scheduling.types import AdapterJob, Plan
from scheduling.verify import verify_plan


def one_after_another(jobs: Sequence[AdapterJob], **limits: int) -> Plan:
    """Plans one adapter at a time, each batch packed alone; no-ops keep the distance between its batches."""
    problem = _problem(jobs, limits)
    order = ((job, number) for job, batches in enumerate(problem.batches) for number in range(len(batches)))
    return _plan(problem, _in_order(problem, order), limits)


def batch_by_batch(jobs: Sequence[AdapterJob], **limits: int) -> Plan:
    """Plans in mLoRA's order: one batch of each adapter in turn, packed alone; no-ops where too near."""
    problem = _problem(jobs, limits)
    rounds = zip_longest(*([(job, n) for n in range(len(batches))] for job, batches in enumerate(problem.batches)))
    order = (batch for turn in rounds for batch in turn if batch is not None)
    return _plan(problem, _in_order(problem, order), limits)


def _problem(jobs: Sequence[AdapterJob], limits: dict[str, int]) -> Problem:
    limits.setdefault("data_parallel", 1)
    limits.setdefault("tile_tokens", 128)
    return make_problem(jobs, **check_jobs(jobs, **limits))


def _in_order(problem: Problem, order: Iterator[tuple[int, int]]) -> Filling:
    filling: Filling = []
    last: dict[int, int] = {}
    empty = ((),) * problem.data_parallel
    choose = chooser(problem)
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


def _plan(problem: Problem, filling: Filling, limits: dict[str, int]) -> Plan:
    bound = lower_bound(problem.jobs, **limits)
    plan = Plan(jobs=problem.jobs, slots=to_slots(problem, filling), lower_bound=bound, **limits)
    verify_plan(plan)
    return plan
