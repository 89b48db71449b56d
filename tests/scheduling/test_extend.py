"""An extended adapter: what was planned of it stays, and its stream goes on with a batch of its own."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduling import AdapterJob, Plan, PlanError, make_plan, replan

LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=12)
QUICK = {"time_limit_s": 0}


@settings(max_examples=60, deadline=None)
@given(first=LENGTHS, more=LENGTHS, again=LENGTHS, batch=st.integers(1, 5), stages=st.integers(1, 3), data=st.data())
def test_batches_that_were_planned_stay(first, more, again, batch, stages, data):
    before = AdapterJob("law", first, batch)
    once = AdapterJob("law", first + more, batch, cuts=(len(first),))
    twice = AdapterJob("law", first + more + again, batch, cuts=(len(first), len(first + more)))
    for shorter, longer in ((before, once), (once, twice)):
        assert list(longer.batch_sizes())[: shorter.num_batches] == list(shorter.batch_sizes())
    plan = make_plan([before, AdapterJob("med", [300] * 5, 2)], capacity_tokens=512, num_stages=stages, **QUICK)
    for longer in (once, twice):
        at = data.draw(st.integers(0, plan.num_slots))
        after = replan(plan, at_slot=at, extend=[longer], **QUICK)  # which verifies it
        assert after.slots[:at] == plan.slots[:at]
        assert Plan.from_json(after.to_json()) == after
        plan = after
    steps = [ref for _, name, ref in plan.batches_ending() if name == "law"]
    assert steps == list(range(twice.num_batches))


def test_an_adapter_that_ended_early_goes_on_from_there():
    plan = make_plan([AdapterJob("law", [200] * 10, 2)], capacity_tokens=256, num_stages=1, **QUICK)
    plan = replan(plan, at_slot=3, finish=["law"], **QUICK)
    assert plan.job_of["law"].num_samples == 4
    longer = replan(plan, at_slot=plan.num_slots, extend=[AdapterJob("law", [200] * 7, 2, cuts=(4,))], **QUICK)
    assert [size for _, size in longer.job_of["law"].batch_sizes()] == [2, 2, 2, 1]


@pytest.mark.parametrize(
    "longer",
    [
        AdapterJob("law", [200] * 6, 2),
        AdapterJob("law", [200] * 3 + [100, 100], 2, cuts=(4,)),
        AdapterJob("law", [200] * 6, 3, cuts=(4,)),
        AdapterJob("law", [200] * 4, 2),
    ],
    ids=["no cut", "other samples", "other batches", "no longer"],
)
def test_another_stream_is_refused(longer):
    plan = make_plan([AdapterJob("law", [200] * 4, 2)], capacity_tokens=256, num_stages=1, **QUICK)
    with pytest.raises(PlanError, match=r"plan\.extend"):
        replan(plan, at_slot=0, extend=[longer], **QUICK)


@pytest.mark.parametrize("cuts", [(0,), (4,), (2, 2), (1.5,)])
def test_cuts_lie_inside_the_stream_and_ascend(cuts):
    with pytest.raises(PlanError, match=r"plan\.cuts"):
        AdapterJob("law", [200] * 4, 2, cuts=cuts)


@pytest.mark.parametrize("at_slot", range(1, 7))
def test_a_change_of_plan_wastes_no_slot(at_slot):
    """A batch may run as soon as its predecessor is as many slots away as there are stages."""
    plan = make_plan([AdapterJob("law", [100] * 4, 1)], capacity_tokens=128, num_stages=2, **QUICK)
    assert replan(plan, at_slot=at_slot, **QUICK).slots == plan.slots


def test_a_stopped_adapter_takes_no_step_of_an_incomplete_batch():
    plan = make_plan([AdapterJob("law", [100] * 8, 4)], capacity_tokens=128, num_stages=1, **QUICK)
    stopped = replan(plan, at_slot=6, cancel=["law"], **QUICK)  # its second batch has two of four samples
    assert [batch for _, _, batch in stopped.batches_ending()] == [0]
