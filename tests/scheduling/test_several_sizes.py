"""Plans whose slots have several capacities."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import jobs

from benchmarks.workloads import sample_lengths
from scheduling import AdapterJob, Plan, PlanError, default_cost_model, find_violations, make_plan, replan, simulate
from scheduling.cost_model import CostModel, PassCost, StageCost
from scheduling.simulate import slot_squares

EFFORT = {"search_evaluations": 300}
SIZES = (256, 512, 1024)


def rows(plan: Plan, part) -> int:
    """Rows of a microbatch, with each adapter padded to whole tiles."""
    tokens: dict[str, int] = {}
    for ref in part:
        tokens[ref.adapter] = tokens.get(ref.adapter, 0) + plan.job_of[ref.adapter].sample_tokens[ref.sample]
    return sum(-(-count // plan.tile_tokens) * plan.tile_tokens for count in tokens.values())


@settings(max_examples=40, deadline=None)
@given(jobs(most_tokens=512), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from([16, 128]))
def test_every_slot_takes_the_smallest_capacity_that_holds_it(jobs, stages, replicas, tile):
    limits = {"capacity_tokens": SIZES, "num_stages": stages, "data_parallel": replicas, "tile_tokens": tile}
    plan = make_plan(jobs, **limits, **EFFORT)
    assert find_violations(plan, jobs) == []
    for slot, capacity in zip(plan.slots, plan.slot_capacities, strict=True):
        needed = max(rows(plan, part) for part in slot.replicas)
        assert capacity == min(size for size in SIZES if size >= needed)
    assert plan.room == sum(slot.capacity_tokens * replicas for slot in plan.slots)
    assert Plan.from_json(plan.to_json()) == plan
    assert make_plan(jobs, **limits, **EFFORT).digest == plan.digest


@pytest.mark.parametrize("stages", [1, 4])
def test_several_sizes_are_predicted_no_slower_than_the_best_single_one(stages):
    draw, costs = np.random.default_rng(3), default_cost_model(num_stages=stages)
    jobs = [AdapterJob(f"a{n}", sample_lengths(draw, "mix", n, 80, 1.0, 4096), 8) for n in range(3)]

    def seconds(sizes):
        return simulate(make_plan(jobs, capacity_tokens=sizes, num_stages=stages, time_limit_s=0), costs).duration_s

    assert seconds((4096, 6144, 8192)) <= min(map(seconds, (4096, 6144, 8192)))


def test_an_adapter_on_its_own_leaves_less_room_empty():
    lengths = sample_lengths(np.random.default_rng(1), "mix", 0, 160, 1.0, 4096)
    job, costs = AdapterJob("law", lengths, 8), default_cost_model()
    single, several = (
        make_plan([job], capacity_tokens=sizes, num_stages=1) for sizes in (4096, (3072, 4096, 6144, 8192))
    )
    assert several.density > 0.93 > 0.84 > single.density
    assert simulate(several, costs).tokens_per_s > 1.12 * simulate(single, costs).tokens_per_s


def test_costs_decide_which_sizes_are_taken():
    """Where a slot costs the same whatever its size, the fewest slots win."""
    per_slot, per_token = PassCost(fixed_s=1.0), PassCost(token_s=1.0)
    slots = {}
    for name, cost in (("slot", per_slot), ("token", per_token)):
        costs = CostModel(stages=(StageCost(forward=cost, backward=cost),))
        job = AdapterJob("law", [300, 100] * 8, 3)
        slots[name] = make_plan([job], capacity_tokens=SIZES, num_stages=1, cost_model=costs)
    assert slots["slot"].num_slots == slots["slot"].job_of["law"].num_batches < slots["token"].num_slots
    assert slots["token"].room < slots["slot"].room or slots["token"].density >= slots["slot"].density


def test_one_size_is_planned_as_ever():
    jobs = [AdapterJob(name, [700, 300, 512] * 8, 4) for name in "ab"]
    single, listed = (make_plan(jobs, capacity_tokens=size, num_stages=2, **EFFORT) for size in (1024, [1024]))
    assert listed == single
    assert listed.sizes == (1024,)
    assert all(slot.capacity_tokens is None for slot in single.slots)
    assert "slot_capacities" not in single.to_json()


def test_long_samples_get_the_size_that_holds_them():
    plan = make_plan([AdapterJob("law", [1000, 100, 90, 80, 70, 60], 6)], capacity_tokens=SIZES, num_stages=1)
    assert sorted(plan.slot_capacities) == [512, 1024]


def test_padding_and_times_follow_the_slot():
    plan = make_plan([AdapterJob("law", [200, 1000], 1)], capacity_tokens=SIZES, num_stages=1, tile_tokens=8)
    assert plan.slot_capacities == (256, 1024)
    assert slot_squares(plan) == [200**2 + 2 * 28**2, 1000**2 + 24**2]
    costs = CostModel(stages=(StageCost(forward=PassCost(token_s=1.0), backward=PassCost()),), transfer_token_s=9.0)
    assert simulate(plan, costs).duration_s == 256 + 1024


def test_a_new_plan_keeps_the_sizes_and_what_ran():
    jobs = [AdapterJob(name, [300, 200, 90] * 6, 4) for name in "ab"]
    plan = make_plan(jobs, capacity_tokens=SIZES, num_stages=2, **EFFORT)
    again = replan(plan, at_slot=3, cancel=["b"], **EFFORT)
    assert again.sizes == plan.sizes
    assert again.slots[:3] == plan.slots[:3]
    assert set(again.slot_capacities[3:]) <= set(SIZES)


def test_the_verifier_finds_slots_that_overflow_or_have_another_size():
    job = AdapterJob("law", [900, 200], 1)
    plan = make_plan([job], capacity_tokens=SIZES, num_stages=1)
    for capacity in (512, 1000, 2048):
        slots = (replace(plan.slots[0], capacity_tokens=capacity), *plan.slots[1:])
        assert {violation.code for violation in find_violations(replace(plan, slots=slots))} == {"plan.capacity"}


@pytest.mark.parametrize("sizes", [(), (256, 256), (1, 2, 3, 4, 5), (256, 0), (256, True), (256, 1.5), ("256",)])
def test_refused_sizes(sizes):
    with pytest.raises(PlanError) as caught:
        make_plan([AdapterJob("law", [64], 1)], capacity_tokens=sizes, num_stages=1)
    assert caught.value.code == "plan.setting"


def test_every_size_has_room_for_a_tile():
    with pytest.raises(PlanError) as caught:
        make_plan([AdapterJob("law", [64], 1)], capacity_tokens=(64, 256), num_stages=1)
    assert caught.value.code == "plan.capacity"
