"""The public contract of plans."""

import json
from dataclasses import replace

import pytest

from scheduling import AdapterJob, Plan, PlanError, lower_bound, make_plan, outline_from_lines, replan, verify_plan

JOBS = [
    AdapterJob("law", [700, 300, 512, 40], global_batch=2, epochs=2),
    AdapterJob("med", [900, 100, 128], global_batch=3),
    AdapterJob("chat", [64] * 7, global_batch=4, epochs=3, weight=2),
]
LIMITS = {"capacity_tokens": 1024, "num_stages": 3}


def test_plan_trains_every_sample_once():
    plan = make_plan(JOBS, **LIMITS)
    refs = [ref for slot in plan.slots for ref in slot.samples]
    assert len(refs) == len(set(refs)) == 8 + 3 + 21
    verify_plan(plan, JOBS)
    assert plan.num_slots >= lower_bound(JOBS, **LIMITS) == plan.lower_bound
    assert plan.tokens == 2 * 1552 + 1128 + 21 * 64
    assert plan.density == pytest.approx(plan.tokens / (plan.num_slots * 1024))


def test_batches_run_over_the_epochs():
    job = AdapterJob("a", [10, 20, 30], global_batch=2, epochs=2, max_batches=2)
    refs = [ref for slot in make_plan([job], **LIMITS).slots for ref in slot.samples]
    assert [tuple(ref) for ref in refs] == [("a", 0, 0, 0), ("a", 0, 0, 1), ("a", 0, 1, 2), ("a", 1, 1, 0)]


def test_a_batch_that_an_adapter_never_completes_does_not_end():
    plan = make_plan([AdapterJob("a", [64] * 4, global_batch=2)], capacity_tokens=64, num_stages=1, tile_tokens=64)
    assert [(name, batch) for _, name, batch in plan.batches_ending()] == [("a", 0), ("a", 1)]
    stopped = replace(plan, slots=plan.slots[:3], stopped=(("a", 3),))
    assert [(name, batch) for _, name, batch in stopped.batches_ending()] == [("a", 0)]


def test_round_trip_is_exact():
    plan = make_plan(JOBS, data_parallel=2, **LIMITS)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.digest == plan.digest
    assert again.to_json() == plan.to_json()


def test_changed_plan_is_refused():
    text = make_plan(JOBS, **LIMITS).to_json()
    with pytest.raises(PlanError, match=r"plan\.digest"):
        Plan.from_json(text.replace('"num_stages":3', '"num_stages":2'))
    with pytest.raises(PlanError, match=r"plan\.format"):
        Plan.from_json(text[:-20])
    half, none = text.replace('"law"', r'"\ud83d"'), text.replace('"num_stages":3', '"num_stages":0')
    endless = text.replace('"global_batch":', f'"global_batch":{2**60}', 1)  # beyond what numpy counts
    many = text.replace('"epochs":1', f'"epochs":{2**31}', 1)  # samples that no memory holds
    for absurd in (half, none, endless, many):
        assert absurd != text
        with pytest.raises(PlanError, match=r"plan\.format"):
            Plan.from_json(absurd)
    with pytest.raises(PlanError, match=r"plan\.schema"):
        Plan.from_json(text.replace("lorafusion.plan/1", "lorafusion.plan/0"))


def test_an_outline_says_what_the_plan_says_and_reads_no_slots():
    plan = replan(make_plan(JOBS, **LIMITS), at_slot=1, cancel=["med"])
    lines = plan.to_json().splitlines(keepends=True)
    first = lines.index('"slots": [\n')

    def until_slots():
        yield from lines[: first + 1]
        raise AssertionError("a slot was read")

    outline = outline_from_lines(until_slots())
    assert (outline.digest, outline.num_slots, outline.jobs) == (plan.digest, plan.num_slots, plan.jobs)
    reformatted = json.dumps(json.loads(plan.to_json()), indent=1)
    assert outline_from_lines(reformatted.splitlines(keepends=True)) == outline
    for text, code in (("[]", "plan.schema"), ("{", "plan.format"), ("".join(lines[:3]), "plan.format")):
        with pytest.raises(PlanError, match=code):
            outline_from_lines(text.splitlines(keepends=True))


def test_a_plan_that_lacks_millions_of_samples_is_refused_at_once():
    plan = make_plan(JOBS, **LIMITS)
    jobs = (replace(plan.jobs[0], epochs=100_000), *plan.jobs[1:])
    with pytest.raises(PlanError) as caught:
        verify_plan(replace(plan, jobs=jobs))
    assert len(caught.value.problems) == 1
    assert "samples are not planned" in caught.value.problems[0]


def test_equal_inputs_give_equal_plans():
    assert make_plan(JOBS, **LIMITS).digest == make_plan(JOBS, **LIMITS).digest


def test_replicas_share_a_slot():
    plan = make_plan(JOBS, data_parallel=2, **LIMITS)
    verify_plan(plan, JOBS)
    assert all(len(slot.replicas) == 2 for slot in plan.slots)
    assert plan.num_slots <= make_plan(JOBS, **LIMITS).num_slots
