"""Few jobs are open at a time: the others wait, and where jobs rest, all come to the rest before one goes on."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorafusion_jax.planning.turns import NextUses
from scheduling import AdapterJob, PlanError, make_plan, replan

LENGTHS = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=12), min_size=2, max_size=8)


def plan_of(lengths, most, stages=1, rests=()):
    jobs = [AdapterJob(f"a{number}", row, 3) for number, row in enumerate(lengths)]
    settings = {"capacity_tokens": 128, "num_stages": stages, "tile_tokens": 16, "most_open": most}
    return make_plan(jobs, rests={job.name: rests for job in jobs}, **settings)


def most_open(plan, begin=0, parts=lambda ref: ref.adapter):
    slots = {}
    for index, slot in enumerate(plan.slots[begin:]):
        for ref in slot.samples:
            slots.setdefault(parts(ref), []).append(index)
    return max(sum(used[0] <= index <= used[-1] for used in slots.values()) for index in range(len(plan.slots)))


@settings(max_examples=30)
@given(LENGTHS, st.integers(1, 4), st.integers(1, 3))
def test_no_more_are_open_than_allowed(lengths, most, stages):
    plan = plan_of(lengths, most, stages)  # verified
    assert most_open(plan) <= most
    assert NextUses.of(plan).count_moves(most) == len(lengths), "each comes once, and leaves at its end"


def test_many_come_at_a_time():
    """Places of those that have ended stand empty for a while: a pause for each would drain the devices each time."""
    plan = plan_of([[16] * 3] * 96, 24)
    uses, resident, pauses, moves = NextUses.of(plan), set(), 0, 0
    for slot in range(plan.num_slots):
        if not uses.adapters(slot) <= resident:
            coming = uses.coming(slot, resident, 24)
            wanted = set(uses.wanted(slot, resident, 24))
            assert set(coming) == wanted - resident
            pauses, moves, resident = pauses + 1, moves + len(coming), wanted
    assert plan.num_slots > 30
    assert pauses <= plan.num_slots / 4
    assert moves <= 1.1 * 96


def test_who_stays_is_not_sent_away():
    uses = NextUses([{"law"}, {"med"}, {"ore"}, {"tax"}])
    assert set(uses.wanted(2, ["law", "med"], 2)) == {"ore", "tax"}
    assert set(uses.wanted(2, ["law", "med"], 2, ["law"])) == {"ore", "law"}


@settings(max_examples=30)
@given(LENGTHS, st.integers(1, 4) | st.none(), st.integers(1, 3), st.sampled_from([(1,), (2,), (1, 2)]))
def test_all_come_to_a_rest_before_one_goes_on(lengths, most, stages, rests):
    plan = plan_of(lengths, most, stages, rests=rests)

    def part(ref):
        return ref.adapter, sum(rest <= ref.batch for rest in rests)

    assert most is None or most_open(plan, parts=part) <= most
    levels = {}
    for index, slot in enumerate(plan.slots):
        for ref in slot.samples:
            levels.setdefault(part(ref)[1], []).append(index)
    used = [slots for _, slots in sorted(levels.items())]
    assert all(above[0] >= below[-1] + stages for below, above in pairwise(used)), "who ends is known before"


@settings(max_examples=30)
@given(LENGTHS, st.integers(1, 3), st.integers(0, 6))
def test_the_rest_of_a_plan_keeps_to_it(lengths, most, slot):
    plan = plan_of(lengths, most)
    at_slot = min(slot, plan.num_slots)
    changed = replan(plan, at_slot=at_slot, cancel=["a0"], most_open=most)
    assert changed.slots[:at_slot] == plan.slots[:at_slot]
    if changed.num_slots > at_slot:
        assert most_open(changed, at_slot) <= most


def compared_after(share, batches):
    """The batch after which a job of so many is compared."""
    return max(1, math.ceil(share * batches))


@pytest.mark.parametrize("others", [0, 2])
def test_a_search_spares_what_halving_ends(others):
    """64 points of one data set, batches of 1 to 16 rows. Those that end have trained as little as the others.

    Without rests a plan lets all end together: batches of 16 come to their first step when batches of 1 have taken half
    of theirs, and 0.9 of all samples are trained.
    """
    tokens = np.random.default_rng(0).lognormal(5.4, 0.6, 32).clip(8, 1080).astype(int).tolist()
    points = [AdapterJob(f"p{batch}-{number}", tokens, batch) for batch in (1, 4, 8, 16) for number in range(16)]
    more = [AdapterJob(f"other-{number}", tokens * 8, 4) for number in range(others)]  # are compared with nobody
    steps = {job.name: job.num_batches for job in points}
    rests = {name: [compared_after(share, count) for share in (1 / 8, 1 / 4, 1 / 2)] for name, count in steps.items()}
    shape = {"time_limit_s": 0, "rests": rests}
    plan = make_plan([*points, *more], capacity_tokens=8192, num_stages=1, **shape)
    running = list(steps)
    for level in range(3):
        ends = {(name, batch): slot for slot, name, batch in plan.batches_ending()}
        at_slot = 1 + max(ends[name, rests[name][level] - 1] for name in running)
        for job in more:  # fill what the points leave in each part
            assert any(slot < at_slot for (name, _), slot in ends.items() if name == job.name)
            assert any(slot >= at_slot for (name, _), slot in ends.items() if name == job.name)
        running, ended = running[::2], running[1::2]
        plan = replan(plan, at_slot=at_slot, finish=ended, **shape)
        taken = {
            name
            for name, batch in ends
            if name in ended and ends[name, batch] < at_slot and batch >= rests[name][level]
        }
        assert not taken, "who ends has gone on while others came to the comparison"
    assert all(job.num_batches == steps[job.name] for job in plan.jobs if job.name in running)
    assert sum(ref.adapter in steps for slot in plan.slots for ref in slot.samples) <= 0.45 * 64 * 32


def slots_of(plan, name):
    return [index for index, slot in enumerate(plan.slots) if any(ref.adapter == name for ref in slot.samples)]


def test_nobody_waits_for_one_that_has_come_later():
    jobs = [AdapterJob(name, [16] * 12, 1) for name in "abc"]
    rests = dict.fromkeys("abc", (2, 6))
    plan = make_plan(jobs, capacity_tokens=64, num_stages=1, tile_tokens=16, rests=rests)
    later = replan(plan, at_slot=4, add=[AdapterJob("d", [16] * 12, 1)], rests=rests | {"d": (2, 6)})
    assert slots_of(later, "d")[0] == slots_of(later, "a")[4] == 4
    assert slots_of(later, "a")[-1] < slots_of(later, "d")[-1]


@pytest.mark.parametrize("at_slot", [1, 2, 3, 4])
def test_who_is_at_a_rest_waits_for_those_that_are_not(at_slot):
    jobs = [AdapterJob("short", [16] * 8, 4), AdapterJob("long", [16] * 8, 1)]
    shape = {"num_stages": 1, "rests": {"short": (1,), "long": (4,)}}
    plan = make_plan(jobs, capacity_tokens=64, tile_tokens=16, **shape)
    plan = replan(plan, at_slot=at_slot, **shape)
    ends = {(name, batch): slot for slot, name, batch in plan.batches_ending()}
    assert ends["long", 3] < min(slot for slot in slots_of(plan, "short") if slot > ends["short", 0])


@pytest.mark.parametrize(
    ("rests", "says"),
    [
        ({"b": (1,)}, "there is no such job"),
        ({"a": (0, 2)}, "from 1 on"),
        ({"a": (4, 2)}, "ascending"),
        ({"a": (1.5,)}, "1.5"),
    ],
)
def test_odd_rests_are_refused(rests, says):
    with pytest.raises(PlanError, match=says):
        make_plan([AdapterJob("a", [16] * 8, 2)], capacity_tokens=64, num_stages=1, tile_tokens=16, rests=rests)
