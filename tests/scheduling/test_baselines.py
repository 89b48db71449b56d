"""Baseline plans are valid, have the documented order, and can be tuned."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import jobs

from scheduling import (
    AdapterJob,
    PlanError,
    batch_by_batch,
    default_cost_model,
    issue_order,
    make_plan,
    one_after_another,
    one_forward_one_backward,
    simulate,
    tuned,
    verify_plan,
)

LIMITS = {"capacity_tokens": 1024, "num_stages": 4}
SHARDED = {"num_stages": 1, "data_parallel": 4}  # no pipeline: devices share the weights and split each batch
MAKERS = {
    "one after another": lambda jobs: one_after_another(jobs, **LIMITS),
    "mlora": lambda jobs: batch_by_batch(jobs, **LIMITS),
    "fsdp": lambda jobs: one_after_another(jobs, capacity_tokens=1024, **SHARDED),
    "replicas": lambda jobs: batch_by_batch(jobs, data_parallel=2, **LIMITS),
}


def batches(slot):
    return {(ref.adapter, ref.batch) for ref in slot.samples}


@settings(max_examples=40, deadline=None)
@given(jobs(), st.sampled_from(sorted(MAKERS)))
def test_plans_are_valid_and_never_mix_batches(jobs, name):
    plan = MAKERS[name](jobs)
    verify_plan(plan, jobs)
    assert all(len(batches(slot)) <= 1 for slot in plan.slots)
    order = issue_order(one_forward_one_backward(plan), plan.num_stages)
    assert {event.slot for event in order} == {index for index, slot in enumerate(plan.slots) if not slot.is_noop}


@settings(max_examples=40, deadline=None)
@given(jobs())
def test_baselines_have_the_documented_order(jobs):
    def order(plan):
        return list(dict.fromkeys((ref.adapter, ref.batch) for slot in plan.slots for ref in slot.samples))

    every = {job.name: job.num_batches for job in jobs}
    assert order(MAKERS["one after another"](jobs)) == [(name, n) for name in every for n in range(every[name])]
    assert order(MAKERS["fsdp"](jobs)) == order(MAKERS["one after another"](jobs))
    turns = [(name, n) for n in range(max(every.values())) for name in every if n < every[name]]
    assert order(MAKERS["mlora"](jobs)) == turns


def test_one_adapter_at_a_time_flushes_the_pipeline_at_every_step():
    plan = one_after_another([AdapterJob("a", [600] * 24, 3)], **LIMITS)
    costs = default_cost_model(num_stages=4)
    flushed = simulate(plan, costs, program=one_forward_one_backward(plan, flush=True))
    assert simulate(plan, costs).duration_s == pytest.approx(flushed.duration_s)
    assert max(simulate(plan, costs).bubble_shares) > 0.3


def test_shared_weights_have_no_stages_and_a_replica_per_device():
    plan = one_after_another([AdapterJob("a", [900] * 16, 8)], capacity_tokens=1024, **SHARDED)
    assert (plan.num_stages, plan.data_parallel, plan.num_slots, plan.num_noops) == (1, 4, 4, 0)
    assert all(len(part) == 1 for slot in plan.slots for part in slot.replicas)


def test_tuned_finds_the_fastest_capacity():
    jobs = [AdapterJob("a", [900] * 64, 8)]
    costs = default_cost_model()
    plans = {n: one_after_another(jobs, capacity_tokens=n, **SHARDED) for n in (1024, 2048, 8192)}
    seconds = {n: simulate(plan, costs).duration_s for n, plan in plans.items()}
    best = tuned(one_after_another, jobs, capacities=(8192, 512, 2048, 1024), cost_model=costs, **SHARDED)
    assert best == plans[min(seconds, key=seconds.get)]
    assert best.capacity_tokens == 2048  # two samples on each of four devices
    ours = tuned(make_plan, jobs, capacities=(1024, 2048), cost_model=costs, num_stages=1)
    verify_plan(ours, jobs)


def test_tuned_raises_the_cause_if_no_capacity_works():
    jobs = [AdapterJob("a", [900] * 4, 2)]
    with pytest.raises(PlanError, match=r"plan\.sample-too-long"):
        tuned(one_after_another, jobs, capacities=(256, 512), cost_model=default_cost_model(), num_stages=1)
    with pytest.raises(PlanError, match=r"plan\.setting"):
        tuned(one_after_another, jobs, capacities=(1024,), cost_model=default_cost_model(), num_stages=0)
    with pytest.raises(PlanError, match="no capacities"):
        tuned(one_after_another, jobs, capacities=(), cost_model=default_cost_model(), num_stages=1)
