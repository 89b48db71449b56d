"""The simulator gets arrivals and seconds per slot of a live run."""

from __future__ import annotations

import pytest

from benchmarks.live_simulated import Arrival, simulated_ends
from benchmarks.random_job import SMALL
from scheduling import AdapterJob, make_plan

SLOT_S = 3.0


def arrival(name: str, came_s: float, batches: int = 5) -> Arrival:
    """Each batch fills a microbatch of 512 tokens by itself, so a slot is a step."""
    return Arrival(job=AdapterJob(name, [256] * 2 * batches, 2), came_s=came_s, ended_s=0.0, rank=3)


@pytest.mark.parametrize("places", [1, 4])
def test_jobs_that_fill_slots_by_themselves_end_after_their_slots(places):
    arrivals = [arrival("early", 0.0), arrival("late", 40.0, batches=2)]
    offline = make_plan([one.job for one in arrivals], capacity_tokens=512, num_stages=1)
    ends = simulated_ends(arrivals, SMALL, offline, slot_s=SLOT_S, places=places)
    assert ends["early"] == pytest.approx(5 * SLOT_S, rel=0.02)
    assert ends["late"] == pytest.approx(40 + 2 * SLOT_S, rel=0.02)


def test_without_a_free_place_a_job_waits_for_the_one_before():
    arrivals = [arrival("first", 0.0), arrival("second", 1.0)]
    offline = make_plan([one.job for one in arrivals], capacity_tokens=512, num_stages=1)
    alone = simulated_ends(arrivals, SMALL, offline, slot_s=SLOT_S, places=1)
    shared = simulated_ends(arrivals, SMALL, offline, slot_s=SLOT_S, places=2)
    assert alone["first"] == pytest.approx(5 * SLOT_S, rel=0.02)
    assert alone["first"] < shared["first"]
    assert max(alone.values()) == pytest.approx(10 * SLOT_S, rel=0.05)
    assert max(shared.values()) == pytest.approx(10 * SLOT_S, rel=0.05)
