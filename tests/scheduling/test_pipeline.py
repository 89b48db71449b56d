"""Pipeline events: 1F1B and GPipe orders, updates in time, no deadlock."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import jobs

from scheduling import (
    AdapterJob,
    CostModel,
    Event,
    PassCost,
    PlanError,
    StageCost,
    batch_by_batch,
    forward_then_backward,
    make_plan,
    one_after_another,
    one_forward_one_backward,
    simulate,
)

UNIT = CostModel(stages=(StageCost(forward=PassCost(fixed_s=1), backward=PassCost(fixed_s=1)),))


def short(events):
    return " ".join(f"{event.kind[0].upper()}{event.slot}" for event in events)


def test_textbook_order():
    plan = make_plan([AdapterJob("a", [128] * 5, 5)], capacity_tokens=128, num_stages=3)
    first, middle, last = one_forward_one_backward(plan)
    assert short(first) == "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4 U4"
    assert short(middle) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4 U4"
    assert short(last) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 U4"
    assert first[-1] == Event("update", 0, 4, ("a",))


def test_gpipe_order():
    plan = make_plan([AdapterJob("a", [128] * 4, 2)], capacity_tokens=128, num_stages=2)
    assert [short(stage) for stage in forward_then_backward(plan)] == ["F0 F1 B0 B1 U1 F3 F4 B3 B4 U4"] * 2


def test_noops_take_a_slot_without_events():
    plan = make_plan([AdapterJob("a", [128] * 2, 1)], capacity_tokens=128, num_stages=3)
    assert [slot.is_noop for slot in plan.slots] == [False, True, True, False]
    assert short(one_forward_one_backward(plan)[0]) == "F0 B0 U0 F3 B3 U3"


def test_flush_drains_between_batches():
    plan = one_after_another([AdapterJob("a", [128] * 4, 2)], capacity_tokens=128, num_stages=2)
    assert short(one_forward_one_backward(plan, flush=True)[0]) == "F0 F1 B0 B1 U1 F3 F4 B3 B4 U4"


def test_ideal_pipeline_time():
    plan = make_plan([AdapterJob("a", [128] * 20, 20)], capacity_tokens=128, num_stages=4)
    timeline = simulate(plan, UNIT)
    assert timeline.duration_s == (20 + 3) * 2
    assert timeline.bubble_share == 0
    assert timeline.fill_drain_s == 3 * 2
    assert timeline.finish_s == {"a": 46.0}


def test_gpipe_takes_as_long_as_1f1b_but_holds_more():
    plan = make_plan([AdapterJob("a", [128] * 20, 20)], capacity_tokens=128, num_stages=4)
    assert simulate(plan, UNIT, program=forward_then_backward(plan)).duration_s == 46


@settings(max_examples=60, deadline=None)
@given(jobs(most_tokens=128), st.sampled_from([1, 2, 3, 4, 8]), st.booleans())
def test_updates_come_before_the_next_batch_on_every_stage(jobs, num_stages, flush):
    plan = make_plan(jobs, capacity_tokens=256, num_stages=num_stages, time_limit_s=0)
    batches = {(ref.adapter, ref.batch): [] for slot in plan.slots for ref in slot.samples}
    for index, slot in enumerate(plan.slots):
        for ref in slot.samples:
            batches[ref.adapter, ref.batch].append(index)
    program = one_forward_one_backward(plan, flush=flush)
    for stage, events in enumerate(program):
        order_of = {(event.kind, event.slot): position for position, event in enumerate(events)}
        assert len(order_of) == len(events)
        in_flight = 0
        for event in events:
            in_flight += {"forward": 1, "backward": -1, "update": 0}[event.kind]
            assert 0 <= in_flight <= num_stages - stage
        for (adapter, batch), slots in batches.items():
            following = batches.get((adapter, batch + 1))
            if following:
                assert order_of["update", max(slots)] < order_of["forward", min(following)]
    spans = simulate(plan, UNIT, program=program).spans  # also proves that nothing waits forever
    assert len(spans) == sum(map(len, program))
    check_times(spans, num_stages)


def check_times(spans, num_stages):
    end = {(span.kind, span.stage, span.slot): span for span in spans}
    for span in spans:
        if span.kind == "forward" and span.stage:
            assert span.start_s >= end["forward", span.stage - 1, span.slot].end_s
        if span.kind == "backward" and span.stage < num_stages - 1:
            assert span.start_s >= end["backward", span.stage + 1, span.slot].end_s
    for stage in range(num_stages):
        mine = sorted((span for span in spans if span.stage == stage), key=lambda span: (span.start_s, span.end_s))
        assert all(before.end_s <= after.start_s for before, after in pairwise(mine))


def test_deadlock_names_the_positions():
    plan = make_plan([AdapterJob("a", [128] * 2, 2)], capacity_tokens=128, num_stages=2)
    first, last = one_forward_one_backward(plan)
    with pytest.raises(PlanError, match=r"plan\.deadlock"):
        simulate(plan, UNIT, program=(first[::-1], last))


def test_baselines_keep_batches_apart():
    jobs = [AdapterJob("a", [100] * 8, 4), AdapterJob("b", [100] * 8, 4)]
    limits = {"capacity_tokens": 256, "num_stages": 4}
    alone, turns, ours = one_after_another(jobs, **limits), batch_by_batch(jobs, **limits), make_plan(jobs, **limits)
    for plan in (alone, turns):
        assert all(len({ref[0:3:2] for ref in slot.samples}) <= 1 for slot in plan.slots)
    assert ours.num_slots <= turns.num_slots < alone.num_slots
    order = [ref.adapter for slot in alone.slots for ref in slot.samples]
    assert order == sorted(order)


def test_gpipe_refuses_plans_in_which_a_batch_would_miss_an_update():
    law = AdapterJob("law", [128, 128, 64, 128, 200, 128, 128, 128], 2)
    med = AdapterJob("med", [128, 128, 200, 64, 200, 64, 128, 64], 3)
    limits = {"capacity_tokens": 256, "num_stages": 1, "tile_tokens": 16, "time_limit_s": 0}
    with pytest.raises(PlanError, match=r"plan\.stale.*law would train on old weights") as caught:
        forward_then_backward(make_plan([law, med], **limits))
    assert "one_forward_one_backward" in str(caught.value)
    forward_then_backward(make_plan([law], **limits))
