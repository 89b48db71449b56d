"""The verifier finds and names every kind of broken rule."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import jobs

from scheduling import AdapterJob, Plan, PlanError, SampleRef, Slot, find_violations, make_plan, verify_plan

JOBS = [AdapterJob("law", [300, 200, 250, 100, 90, 80], 2), AdapterJob("med", [400, 30, 20, 500], 1)]
PLAN = make_plan(JOBS, capacity_tokens=640, num_stages=3, time_limit_s=0)


def codes(plan: Plan, jobs=None) -> list[str]:
    return [violation.code for violation in find_violations(plan, jobs)]


def with_slot(plan: Plan, index: int, *replicas) -> Plan:
    slots = list(plan.slots)
    slots[index] = Slot(replicas=tuple(map(tuple, replicas)))
    return replace(plan, slots=tuple(slots))


def first_used(plan: Plan, adapter: str, batch: int) -> int:
    return next(i for i, slot in enumerate(plan.slots) if any(r[0] == adapter and r[2] == batch for r in slot.samples))


def test_unchanged_plan_is_valid():
    assert codes(PLAN, JOBS) == []


def test_drop():
    assert codes(with_slot(PLAN, 0, PLAN.slots[0].samples[1:]), JOBS) == ["plan.missing"]


def test_duplicate():
    ref = PLAN.slots[0].samples[0]
    assert "plan.duplicate" in codes(replace(PLAN, slots=(*PLAN.slots, Slot(replicas=((ref,),)))), JOBS)


def test_reversed_order_is_not_just_a_distance():
    violations = codes(replace(PLAN, slots=PLAN.slots[::-1]), JOBS)
    assert "plan.order" in violations


def test_two_batches_in_one_slot():
    first, second = first_used(PLAN, "med", 1), first_used(PLAN, "med", 2)
    ref = next(r for r in PLAN.slots[second].samples if r.adapter == "med")
    moved = with_slot(PLAN, second, [r for r in PLAN.slots[second].samples if r != ref])
    assert "plan.order" in codes(with_slot(moved, first, [*PLAN.slots[first].samples, ref]), JOBS)


def test_closer_by_one_slot():
    plan = make_plan([AdapterJob("law", [100] * 3, 1)], capacity_tokens=128, num_stages=4, time_limit_s=0)
    assert plan.num_noops == 6
    closer = replace(plan, slots=plan.slots[:1] + plan.slots[2:])
    assert codes(closer) == ["plan.distance"]
    with pytest.raises(PlanError, match="batch 1 starts in slot 3, batch 0 ends in slot 0"):
        verify_plan(closer)


def test_over_full_counts_tiles():
    plan = make_plan([AdapterJob("a", [1], 1), AdapterJob("b", [129], 1)], capacity_tokens=384, num_stages=1)
    assert plan.num_slots == 1
    assert codes(replace(plan, capacity_tokens=383)) == ["plan.capacity"]
    assert codes(replace(plan, tile_tokens=200)) == ["plan.capacity"]


def test_scattered_adapter():
    a, b, c = (SampleRef("a", 0, 0, 0), SampleRef("b", 0, 0, 0), SampleRef("a", 0, 0, 1))
    jobs = (AdapterJob("a", [10, 10], 2), AdapterJob("b", [10], 1))
    plan = Plan(jobs=jobs, slots=(Slot(replicas=((a, b, c),)),), capacity_tokens=512, num_stages=1)
    assert codes(plan) == ["plan.scattered"]


def test_wrong_number_of_replicas():
    assert codes(with_slot(PLAN, 0, PLAN.slots[0].samples, ()), JOBS) == ["plan.replicas"]


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (SampleRef("nobody", 0, 0, 0), "plan.unknown-adapter"),
        (SampleRef("law", 0, 0, 6), "plan.unknown-sample"),
        (SampleRef("law", 0, 0, -1), "plan.unknown-sample"),
        (SampleRef("law", 1, 3, 0), "plan.unknown-sample"),
        (SampleRef("law", 0, 2, 0), "plan.unknown-sample"),
    ],
)
def test_unknown_references(wrong, code):
    assert code in codes(replace(PLAN, slots=(*PLAN.slots, Slot(replicas=((wrong,),)))), JOBS)


def test_every_violation_is_listed():
    empty = replace(PLAN, slots=())
    with pytest.raises(PlanError) as caught:
        verify_plan(empty, JOBS)
    assert len(caught.value.problems) == 10
    assert caught.value.code == "plan.invalid"


def test_other_jobs():
    assert "plan.other-jobs" in codes(PLAN, [replace(JOBS[0], global_batch=3), JOBS[1]])


def test_stopped_adapter_runs_on():
    assert codes(replace(PLAN, stopped=(("law", 1),))) == ["plan.stopped"]


def test_verifying_does_not_mutate_the_plan():
    before = PLAN.digest
    find_violations(with_slot(PLAN, 0, ()))
    assert replace(PLAN).digest == before


@settings(max_examples=120, deadline=None)
@given(jobs(most_tokens=200), st.sampled_from([1, 2, 4]), st.data())
def test_random_mutations_are_caught(jobs, num_stages, data):
    plan = make_plan(jobs, capacity_tokens=400, num_stages=num_stages, tile_tokens=16, time_limit_s=0)
    kind = data.draw(st.sampled_from(["drop", "duplicate", "swap batches", "reverse", "remove a slot"]))
    used = [index for index, slot in enumerate(plan.slots) if not slot.is_noop]
    at = data.draw(st.sampled_from(used))
    refs = list(plan.slots[at].samples)
    pick = data.draw(st.integers(0, len(refs) - 1))
    if kind == "drop":
        broken = with_slot(plan, at, refs[:pick] + refs[pick + 1 :])
    elif kind == "duplicate":
        broken = with_slot(plan, at, [*refs[: pick + 1], *refs[pick:]])
    elif kind == "swap batches":
        job = plan.job_of[refs[pick].adapter]
        assume(job.num_batches > 1)
        broken = replace(plan, slots=tuple(_exchange(slot, job) for slot in plan.slots))
    elif kind == "reverse":
        assume(any(job.num_batches > 1 for job in jobs))
        broken = replace(plan, slots=plan.slots[::-1])
    else:
        broken = replace(plan, slots=plan.slots[:at] + plan.slots[at + 1 :])
    assert codes(broken, jobs)


def _exchange(slot: Slot, job: AdapterJob) -> Slot:
    """Moves the first sample of the job into the place of its last one and the other way round."""
    ends = {job.ref(0): job.ref(job.num_samples - 1), job.ref(job.num_samples - 1): job.ref(0)}
    return Slot(replicas=tuple(tuple(ends.get(ref, ref) for ref in part) for part in slot.replicas))


def test_nothing_may_run_in_the_slot_from_which_an_adapter_is_stopped():
    plan = make_plan([AdapterJob(name, [100] * 6, 2) for name in ("law", "med")], capacity_tokens=256, num_stages=1)
    last = max(
        slot
        for slot, slot_content in enumerate(plan.slots)
        if any(ref.adapter == "law" for ref in slot_content.samples)
    )
    verify_plan(replace(plan, stopped=(("law", last + 1),)))
    with pytest.raises(PlanError, match="stopped before"):
        verify_plan(replace(plan, stopped=(("law", last),)))
