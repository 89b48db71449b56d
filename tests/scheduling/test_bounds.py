"""The lower bound, on known cases and against the exact solver."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from benchmarks.exact_solver import solve_exactly
from scheduling import AdapterJob, formula_bound, lower_bound, make_plan
from scheduling.packing.greedy import greedy
from scheduling.packing.problem import make_problem
from scheduling.types import Limits


def bound(*jobs, capacity_tokens=1024, num_stages=1, **others):
    return lower_bound(jobs, capacity_tokens=capacity_tokens, num_stages=num_stages, **others)


def test_chain_of_one_adapter():
    assert bound(AdapterJob("a", [10] * 5, 1), num_stages=4) == 5 + 4 * 3


def test_tokens():
    assert bound(AdapterJob("a", [128] * 17, 17)) == 3
    assert bound(AdapterJob("a", [128] * 17, 17), data_parallel=2) == 2


def test_tiles_count_not_tokens():
    jobs = [AdapterJob(f"a{i}", [1], 1) for i in range(9)]
    assert bound(*jobs) == 2  # nine tiles of 128, though only nine tokens
    assert formula_bound(jobs, capacity_tokens=1024, num_stages=1) == 1


def test_long_samples_cannot_share():
    assert bound(AdapterJob("a", [600] * 5, 5)) == 5
    assert bound(AdapterJob("a", [600] * 5, 5), data_parallel=2) == 3


def test_short_samples_in_the_room_next_to_long_ones():
    # 5 bins of 600 leave 424 each: none of the 500s fits beside one, and two of those fill a bin
    assert bound(AdapterJob("a", [600] * 5 + [500] * 4, 9)) == 7


def test_a_chain_counts_the_microbatches_that_each_batch_needs():
    # Two of 350 fit into 1024, so each batch of five needs three slots though its tokens need two.
    assert bound(AdapterJob("a", [350] * 10, 5), num_stages=4) == 3 + 3 + 3
    assert bound(AdapterJob("a", [350] * 10, 5), num_stages=4, data_parallel=2) == 2 + 3 + 2
    # None of the 260s fits beside a 800, and three of them fill a microbatch.
    assert bound(AdapterJob("a", [800] * 2 + [260] * 6 + [800] * 2 + [260] * 6, 8), num_stages=2) == 4 + 1 + 4


@pytest.mark.parametrize(
    ("long", "longs", "short", "shorts", "slots"),
    [
        (2402, 9, 1716, 55, 37),
        (1604, 50, 1212, 30, 33),
        (1427, 31, 1333, 11, 19),
        (910, 15, 615, 3, 5),
        (515, 22, 108, 5, 4),
    ],
)
def test_two_lengths_have_the_bound_of_their_best_fillings(long, longs, short, shorts, slots):
    """Against the linear program over all fillings of a microbatch."""
    fillings = [(count, (4096 - count * long) // short) for count in range(4096 // long + 1)]
    relaxed = linprog(np.ones(len(fillings)), -np.transpose(fillings), [-longs, -shorts])
    job = AdapterJob("a", [long] * longs + [short] * shorts, longs + shorts)
    assert bound(job, capacity_tokens=4096) == np.ceil(relaxed.fun - 1e-9) == slots


def test_first_batches_compete_for_slots():
    # Alone, each needs 4 slots (a, 2 waits, b); the four first batches fill four slots, so the last starts late.
    jobs = [AdapterJob(f"a{i}", [1024, 128], 1) for i in range(4)]
    assert bound(*jobs, num_stages=3) == 7


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000))
def test_no_exact_plan_beats_the_bound(seed):
    jobs, limits = small_instance(seed, samples=12)
    problem = make_problem(jobs, limits)
    first = greedy(problem)
    exact = solve_exactly(problem, incumbent=first, bound=1, time_limit_s=600)
    assert exact.proven
    assert bound_of(jobs, limits) <= len(exact.filling) <= len(first)


def bound_of(jobs, limits):
    return lower_bound(
        jobs,
        capacity_tokens=limits.capacity_tokens,
        num_stages=limits.num_stages,
        data_parallel=limits.data_parallel,
        tile_tokens=limits.tile_tokens,
    )


def small_instance(seed, *, samples):
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 4))
    capacity = int(random.choice([1024, 2048]))
    jobs = [
        AdapterJob(
            f"a{index}",
            random.lognormal(np.log(random.uniform(0.1, 0.45) * capacity), 0.6, max(1, samples // count))
            .clip(16, capacity)
            .astype(int),
            global_batch=int(random.integers(1, 7)),
        )
        for index in range(count)
    ]
    limits = Limits(
        capacity_tokens=capacity,
        num_stages=int(random.choice([1, 2, 4])),
        data_parallel=int(random.choice([1, 1, 2])),
    )
    return jobs, limits


@pytest.mark.parametrize("seed", range(20))
def test_search_is_at_most_one_slot_from_the_optimum(seed):
    jobs, limits = small_instance(seed, samples=16)
    plan = make_plan(
        jobs,
        capacity_tokens=limits.capacity_tokens,
        num_stages=limits.num_stages,
        data_parallel=limits.data_parallel,
        search_evaluations=4000,
    )
    problem = make_problem(jobs, limits)
    exact = solve_exactly(problem, incumbent=greedy(problem), bound=plan.lower_bound, time_limit_s=600)
    assert exact.proven
    assert plan.lower_bound <= len(exact.filling) <= plan.num_slots <= len(exact.filling) + 1


def test_halves_share_a_microbatch():
    assert bound(AdapterJob("a", [512] * 4, 4)) == 2  # two of exactly half fill one
    assert bound(AdapterJob("a", [513] * 4, 4)) == 4


def test_a_batch_may_start_as_soon_as_its_distance_allows():
    assert bound(AdapterJob("a", [16] * 8 + [1024] * 8, 8), num_stages=3) == 1 + 2 + 8
