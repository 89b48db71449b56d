"""Few jobs are open at a time: the others wait, and where jobs rest, all come to the rest before one goes on."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lorafusion_jax.planning.turns import NextUses
from scheduling import AdapterJob, make_plan, replan

LENGTHS = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=12), min_size=2, max_size=8)


def plan_of(lengths, most, stages=1, rests=()):
    jobs = [AdapterJob(f"a{number}", row, 3) for number, row in enumerate(lengths)]
    settings = {"capacity_tokens": 128, "num_stages": stages, "tile_tokens": 16, "most_open": most}
    return make_plan(jobs, rests=rests, **settings)


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
@given(LENGTHS, st.integers(1, 4), st.sampled_from([(1,), (2,), (1, 2)]))
def test_all_come_to_a_rest_before_one_goes_on(lengths, most, rests):
    plan = plan_of(lengths, most, rests=rests)

    def part(ref):
        return ref.adapter, sum(rest <= ref.batch for rest in rests)

    assert most_open(plan, parts=part) <= most
    levels = [part(ref)[1] for slot in plan.slots for ref in slot.samples]
    assert levels == sorted(levels)


@settings(max_examples=30)
@given(LENGTHS, st.integers(1, 3), st.integers(0, 6))
def test_the_rest_of_a_plan_keeps_to_it(lengths, most, slot):
    plan = plan_of(lengths, most)
    at_slot = min(slot, plan.num_slots)
    changed = replan(plan, at_slot=at_slot, cancel=["a0"], most_open=most)
    assert changed.slots[:at_slot] == plan.slots[:at_slot]
    if changed.num_slots > at_slot:
        assert most_open(changed, at_slot) <= most
