"""No plan is longer than a simple rule or another system's order makes it."""

import pytest
from more_cases import mostly_nightly

from benchmarks.plan_floors import FLOORS, SEEDS, draw_instance, list_rule, lorafusion_order, measure, mlora_order
from scheduling import AdapterJob, make_plan
from scheduling.types import Limits

SMALL = (0, 17, 23, 33, 68)  # one with mixed batches and 605 slots where begun batches first take 825


@pytest.mark.parametrize("seed", mostly_nightly(SEEDS, SMALL))
def test_no_plan_is_longer_than_a_simple_rule(seed):
    row = measure(seed)
    assert row["bound"] <= row["slots"] <= min(row[name] for name in FLOORS)


def test_a_chain_of_small_batches_does_not_wait_for_a_large_one():
    """A batch of 128, once begun, lets a job with more updates go first; so it is done with the last of them."""
    jobs = [AdapterJob("long", [512] * 32, 1), AdapterJob("large", [512] * 128, 128)]
    limits = Limits(capacity_tokens=1024, num_stages=2)
    plan = make_plan(jobs, capacity_tokens=1024, num_stages=2, time_limit_s=0)
    assert plan.num_slots == list_rule(jobs, limits) == 80  # two samples in every slot


def test_rules_of_others_on_a_case_by_hand():
    jobs = [AdapterJob("a", [500] * 4, 2), AdapterJob("b", [600] * 4, 2)]
    limits = Limits(capacity_tokens=1024, num_stages=2)
    assert mlora_order(jobs, limits) == 1 + 2 + 1 + 2
    assert lorafusion_order(jobs, limits) == 3 + 1 + 3
    assert draw_instance(3)[0] == draw_instance(3)[0]
