"""Rates and times left: of wall time after the first slots, shared out to adapters by their tokens."""

from __future__ import annotations

import pytest

from lorafusion_jax.training import meter as module
from lorafusion_jax.training.meter import COMPILING, EVALUATING, SAVING, WARM_UP, Meter


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests move."""

    class Clock:
        now = 0.0

    monkeypatch.setattr(module.time, "perf_counter", lambda: Clock.now)
    return Clock


SLOTS = [{"law": 60, "med": 20}] * 10 + [{"law": 80}] * 10


def run(clock, meter: Meter, slots, seconds: float) -> None:
    for slot in slots:
        clock.now += seconds
        meter.slots_done([slot])


def test_rates_are_none_before_measurement(clock):
    meter = Meter(SLOTS, [100] * 20, {"law": 19, "med": 9})
    run(clock, meter, range(WARM_UP), 30.0)
    assert meter.snapshot(WARM_UP)["eta_s"] is None


def pause(clock, meter: Meter, what: str, seconds: float) -> None:
    with meter.paused(what):
        clock.now += seconds


def test_rates_leave_out_warm_up_and_count_pauses(clock):
    meter = Meter(SLOTS, [100] * 20, {"law": 19, "med": 9})
    pause(clock, meter, COMPILING, 100)
    run(clock, meter, range(WARM_UP), 30.0)
    run(clock, meter, range(WARM_UP, 7), 0.5)
    clock.now += 0.25  # slots that are under way
    pause(clock, meter, EVALUATING, 4.5)
    clock.now += 0.25
    meter.slots_done([7])
    seen = meter.snapshot(8, evaluations_left_s=9.0)
    assert seen["slot_seconds"] == 0.5
    assert seen["processed_tokens_per_s"] == 3 * 100 / 6
    assert seen["useful_tokens_per_s"] == 3 * 80 / 6
    assert seen["adapter_tokens_per_s"] == {"law": 3 * 60 / 6, "med": 3 * 20 / 6}
    assert seen["eta_s"] == 12 * 0.5 + 9.0
    assert seen["adapter_eta_s"] == {"law": 15, "med": 15 * 2 / 12}
    assert seen["paused_s"] == {EVALUATING: 4.5}
    assert seen["paused_share"] == 0.75
    assert meter.seconds == 30.0 * WARM_UP + 3 * 0.5


def test_rates_and_time_left_are_within_two_percent_of_wall_time(clock):
    """A save every 20 slots, an evaluation every 50; now and then a slot that is slow."""
    total = 400
    meter = Meter([{"law": 80}] * total, [100] * total, {"law": total - 1})
    at, shown = {}, {}
    for slot in range(total):
        clock.now += 0.6 if slot % 4 == 0 else 0.5
        meter.slots_done([slot])
        at[slot] = clock.now
        shown[slot] = meter.snapshot(slot + 1, evaluations_left_s=10.0 * (total // 50 - slot // 50))
        if slot % 20 == 19:
            pause(clock, meter, SAVING, 4.0)
        if slot % 50 == 49:
            pause(clock, meter, EVALUATING, 10.0)
    began = at[WARM_UP - 1]
    for slot in range(60, total, 7):
        wall = at[slot] - began
        assert shown[slot]["useful_tokens_per_s"] == pytest.approx((slot - WARM_UP + 1) * 80 / wall, rel=0.02)
    for slot in (100, 150, 200):
        assert shown[slot]["eta_s"] == pytest.approx(clock.now - at[slot], rel=0.02)


def test_what_nobody_has_measured_is_named(clock):
    meter = Meter(SLOTS, [100] * 20, {"law": 19, "med": 9})
    run(clock, meter, range(8), 0.5)
    assert meter.snapshot(8, evaluations_left_s=None)["eta_leaves_out"] == ["evaluations"]
    assert meter.snapshot(8, evaluations_left_s=0.0)["eta_leaves_out"] == []


def test_a_run_of_few_slots_is_measured_as_a_whole(clock):
    meter = Meter(SLOTS[:3], [100] * 3, {"law": 2, "med": 2})
    run(clock, meter, range(2), 0.5)
    pause(clock, meter, EVALUATING, 0.0)  # before the last slot
    assert meter.snapshot(2)["eta_s"] is None
    run(clock, meter, [2], 0.5)
    assert meter.snapshot(3)["processed_tokens_per_s"] == 200


def test_done_adapters_have_no_remaining_time(clock):
    meter = Meter(SLOTS, [100] * 20, {"law": 19, "med": 9})
    run(clock, meter, range(8, 20), 0.5)
    seen = meter.snapshot(20)
    assert seen["adapter_eta_s"] == {"law": 0, "med": 0}
    assert seen["eta_s"] == 0


def test_slow_slots_count_in_rates_and_time_left(clock):
    """One slot in three takes three times as long; the median of them would not know."""
    slots = [{"law": 1000}] * 90
    meter = Meter(slots, [2000] * len(slots), {"law": 89})
    for slot in range(50):
        run(clock, meter, [slot], 3.0 if slot % 3 == 0 else 1.0)
    seen = meter.snapshot(50)
    measured = [3.0 if slot % 3 == 0 else 1.0 for slot in range(WARM_UP, 50)]
    mean = sum(measured) / len(measured)
    assert seen["useful_tokens_per_s"] == pytest.approx(1000 / mean, abs=0.1)
    assert seen["processed_tokens_per_s"] == pytest.approx(2000 / mean, abs=0.1)
    assert seen["eta_s"] == pytest.approx(40 * mean, abs=0.01)
    assert seen["adapter_eta_s"]["law"] == pytest.approx(40 * mean, abs=0.01)
    assert mean == pytest.approx(5 / 3, rel=0.01)


def test_slots_without_work_take_no_time(clock):
    meter = Meter([{"law": 80}] * 10 + [{}] * 4 + [{"law": 80}] * 2, [100] * 16, {"law": 15})
    run(clock, meter, range(10), 0.5)
    assert meter.snapshot(10)["eta_s"] == 2 * 0.5


def test_failed_adapters_do_not_count_in_rates(clock):
    meter = Meter(SLOTS[:10] + [{"med": 80}] * 10, [100] * 20, {"law": 9, "med": 19})
    run(clock, meter, range(8), 0.5)
    meter.drop("med", 8)
    run(clock, meter, range(8, 10), 0.5)
    seen = meter.snapshot(10)
    assert seen["eta_s"] == 0
    assert seen["adapter_eta_s"] == {"law": 0, "med": 0}
    assert seen["adapter_tokens_per_s"] == {"law": 120, "med": 3 * 20 / 5 / 0.5}
    assert seen["useful_tokens_per_s"] == (3 * 80 + 2 * 60) / 5 / 0.5
