"""Property tests: for any jobs, capacity and depth, the plan is valid or an error gives the reason."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import jobs, limits

from scheduling import Plan, PlanError, find_violations, formula_bound, lower_bound, make_plan, replan

EVALUATIONS = {"search_evaluations": 300}


@settings(max_examples=150, deadline=None)
@given(jobs(), limits())
def test_plan_verifies_or_names_the_sample(jobs, limits):
    room = limits["capacity_tokens"] // limits["tile_tokens"] * limits["tile_tokens"]
    too_long = [(job, i, n) for job in jobs for i, n in enumerate(job.sample_tokens) if n > room]
    if too_long:
        with pytest.raises(PlanError) as caught:
            make_plan(jobs, **limits, **EVALUATIONS)
        assert caught.value.code == "plan.sample-too-long"
        job, index, length = too_long[0]
        assert f"{job.name}: sample {index} has {length} tokens" in str(caught.value)
        assert len(caught.value.problems) == len(too_long)
        return
    plan = make_plan(jobs, **limits, **EVALUATIONS)
    assert find_violations(plan, jobs) == []
    assert sum(len(slot.samples) for slot in plan.slots) == sum(job.num_samples for job in jobs)
    formula = formula_bound(
        jobs, capacity_tokens=limits["capacity_tokens"] * limits["data_parallel"], num_stages=limits["num_stages"]
    )
    assert formula <= lower_bound(jobs, **limits) == plan.lower_bound <= plan.num_slots
    assert not plan.slots[-1].is_noop


@settings(max_examples=40, deadline=None)
@given(jobs(most_tokens=128), limits())
def test_search_is_never_worse_than_greedy_and_deterministic(jobs, limits):
    once = make_plan(jobs, **limits, time_limit_s=0)
    plan = make_plan(jobs, **limits, **EVALUATIONS)
    assert plan.num_slots <= once.num_slots
    assert make_plan(jobs, **limits, **EVALUATIONS).digest == plan.digest
    assert Plan.from_json(plan.to_json()) == plan


@settings(max_examples=80, deadline=None)
@given(jobs(most_tokens=128), jobs(most_tokens=128, most_jobs=2), limits(), st.data())
def test_replan_keeps_what_ran_and_verifies(jobs, added, limits, data):
    plan = make_plan(jobs, **limits, time_limit_s=0)
    names = [job.name for job in jobs]
    action = {name: data.draw(st.sampled_from(["keep", "cancel", "finish", "pause", "weight"])) for name in names}
    chosen = {
        verb: [name for name in names if action[name] == verb] for verb in ("cancel", "finish", "pause", "weight")
    }
    at_slot = data.draw(st.integers(0, plan.num_slots))
    again = replan(
        plan,
        at_slot=at_slot,
        add=[type(job)(f"new-{job.name}", job.sample_tokens, job.global_batch) for job in added],
        cancel=chosen["cancel"],
        finish=chosen["finish"],
        pause=chosen["pause"],
        weights=dict.fromkeys(chosen["weight"], 3.0),
        **EVALUATIONS,
    )
    assert again.slots[:at_slot] == plan.slots[:at_slot]
    assert find_violations(again) == []
    assert again.lower_bound <= again.num_slots
    after = {ref.adapter for slot in again.slots[at_slot:] for ref in slot.samples}
    assert after.isdisjoint(chosen["cancel"] + chosen["pause"])
    for name in chosen["finish"]:  # its last batch is whole, or it never began
        count = sum(ref.adapter == name for slot in again.slots for ref in slot.samples)
        assert count in (0, again.job_of[name].num_samples)
    later = data.draw(st.integers(at_slot, again.num_slots))
    back = replan(again, at_slot=later, resume=chosen["pause"], **EVALUATIONS)
    for name in chosen["pause"]:
        assert sum(ref.adapter == name for slot in back.slots for ref in slot.samples) == back.job_of[name].num_samples
