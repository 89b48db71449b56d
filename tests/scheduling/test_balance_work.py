"""Balancing attention work between replicas and slots keeps plans valid."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from strategies import jobs, limits

from scheduling import AdapterJob, CostModel, PassCost, Plan, StageCost, make_plan, simulate, verify_plan
from scheduling.checks import check_jobs
from scheduling.errors import PlanError
from scheduling.packing.balance_work import balance_work
from scheduling.packing.budget import Budget
from scheduling.packing.greedy import greedy
from scheduling.packing.problem import make_problem, to_slots
from scheduling.planner import effort_of


def work(plan: Plan) -> np.ndarray:
    """Σ length² of every microbatch, [slots, replicas]."""
    tokens = {job.name: job.sample_tokens for job in plan.jobs}
    return np.array(
        [[sum(tokens[ref.adapter][ref.sample] ** 2 for ref in rows) for rows in slot.replicas] for slot in plan.slots]
    )


def mixed_jobs(count: int = 4, samples: int = 320, batch: int = 16) -> list[AdapterJob]:
    """Lengths as of short, middle and long documents together."""
    draw = np.random.default_rng(5)
    lengths = np.exp(draw.normal(6.7, 0.8, (count, samples))).clip(32, 4096).astype(int)
    return [AdapterJob(f"a{number}", adapter_lengths.tolist(), batch) for number, adapter_lengths in enumerate(lengths)]


def packed(jobs: list[AdapterJob], *, even: bool, **shape) -> Plan:
    """The first plan, as it is or evened out."""
    bounds = check_jobs(tuple(jobs), **shape)
    problem = make_problem(jobs, bounds)
    filling = greedy(problem)
    if even:
        filling = balance_work(problem, filling, Budget(math.inf))
    return Plan(jobs=tuple(jobs), slots=to_slots(problem, filling), seed=0, lower_bound=0, **shape)


@settings(max_examples=60, deadline=None)
@given(jobs(most_samples=20), limits())
def test_balancing_keeps_the_filling_valid_and_never_raises_imbalance(jobs, shape):
    try:
        before = packed(jobs, even=False, **shape)
    except PlanError:
        return  # a sample longer than a microbatch
    after = packed(jobs, even=True, **shape)
    verify_plan(after, jobs)
    assert after.num_slots == before.num_slots
    assert after.num_noops == before.num_noops
    assert (work(after).astype(float) ** 2).sum() <= (work(before).astype(float) ** 2).sum()
    assert after == packed(jobs, even=True, **shape)


@pytest.mark.parametrize("replicas", [2, 4])
def test_balancing_reduces_replica_imbalance(replicas):
    shape = {"capacity_tokens": 8192, "num_stages": 1, "data_parallel": replicas, "tile_tokens": 128}
    before, after = (work(packed(mixed_jobs(), even=even, **shape)) for even in (False, True))
    assert after.sum() == before.sum()
    waited = [slot_work.max(axis=1).sum() - slot_work.mean(axis=1).sum() for slot_work in (before, after)]
    assert waited[1] < 0.75 * waited[0]


def test_very_long_samples_do_not_overflow():
    """Σ length² squared does not fit into 64 bits here."""
    capacity = 2**18
    draw = np.random.default_rng(0)
    shares = [capacity // 2, capacity // 2 - 128, capacity // 3, capacity // 4, capacity // 5, capacity // 20]
    jobs = [AdapterJob(f"a{number}", draw.choice(shares, 24).tolist(), 8) for number in range(3)]
    shape = {"capacity_tokens": capacity, "num_stages": 1, "data_parallel": 4, "tile_tokens": 128}
    before, after = (work(packed(jobs, even=even, **shape)).astype(float) for even in (False, True))
    assert (after**2).sum() < (before**2).sum()


def test_no_exchange_without_budget():
    problem = make_problem(mixed_jobs(), check_jobs(tuple(mixed_jobs()), capacity_tokens=8192, num_stages=4))
    filling = greedy(problem)
    assert balance_work(problem, filling, Budget(0)) is filling


def test_balancing_reduces_pipeline_bubbles():
    shape = {"capacity_tokens": 8192, "num_stages": 2, "data_parallel": 1, "tile_tokens": 128}
    pass_cost = PassCost(fixed_s=0.4, square_s=2e-9)
    costs = CostModel(stages=(StageCost(forward=pass_cost, backward=pass_cost),))
    idle = [simulate(packed(mixed_jobs(), even=even, **shape), costs).bubble_share for even in (False, True)]
    assert idle[1] < 0.7 * idle[0]


def test_samples_stay_in_their_slots_with_unequal_weights():
    weighted = [replace(job, weight=1.0 + number) for number, job in enumerate(mixed_jobs())]
    shape = {"capacity_tokens": 8192, "num_stages": 2, "data_parallel": 2, "tile_tokens": 128}
    before, after = (packed(weighted, even=even, **shape) for even in (False, True))
    assert work(after).max(axis=1).sum() < work(before).max(axis=1).sum()
    assert [set(slot.samples) for slot in after.slots] == [set(slot.samples) for slot in before.slots]


def test_one_device_needs_no_balancing():
    shape = {"capacity_tokens": 8192, "num_stages": 1, "data_parallel": 1, "tile_tokens": 128}
    assert packed(mixed_jobs(), even=True, **shape) == packed(mixed_jobs(), even=False, **shape)


def test_make_plan_balances_work():
    shape = {"capacity_tokens": 8192, "num_stages": 1, "data_parallel": 4}
    quick, plan = (make_plan(mixed_jobs(), time_limit_s=seconds, **shape) for seconds in (0.0, 2.0))
    waited = [(work(some_plan).max(axis=1) / work(some_plan).mean(axis=1)).mean() for some_plan in (quick, plan)]
    assert plan.num_slots <= quick.num_slots
    assert waited[1] < 0.92 * waited[0]


def test_balancing_has_a_budget_of_its_own():
    """What the search leaves is added; a search that leaves nothing must not leave none."""
    effort = effort_of(1.0, None)
    assert 0 < effort.even.evaluations < effort.search.evaluations
