"""The same jobs, limits and seed make the same plan on a busy machine, and on any other."""

import os
import random
import subprocess
import sys
from hashlib import sha256

from scheduling import AdapterJob, make_plan, replan

JOBS = 10
DIGEST = "94d7afe3078ca110"  # of all plans, on every machine; another planner or format of plans has another one


def random_plans():
    """Plans of random jobs, every second one planned again from its middle."""
    for number in range(JOBS):
        draw = random.Random(number)
        capacity = draw.choice((1024, [768, 1024, 2048], 2048))
        weights = draw.choice(([1.0], [1.0], [1.0, 2.0]))
        jobs = [
            AdapterJob(
                name,
                [draw.randint(10, 700) for _ in range(draw.randint(8, 90))],
                draw.randint(1, 12),
                epochs=draw.randint(1, 2),
                weight=draw.choice(weights),
            )
            for name in "abcde"[: draw.randint(1, 5)]
        ]
        plan = make_plan(
            jobs,
            capacity_tokens=capacity,
            num_stages=draw.choice((1, 2, 4)),
            data_parallel=draw.choice((1, 1, 2)),
            time_limit_s=0.05,
            seed=number,
        )
        yield plan
        if number % 2:
            yield replan(plan, at_slot=plan.num_slots // 2, time_limit_s=0.05, seed=number)


def test_neither_load_nor_the_order_of_sets_changes_a_plan():
    """Another hash seed gets the order of sets; `make test-loaded` gives the cores to other processes."""
    plans = [plan.digest for plan in random_plans()]
    others = subprocess.run(
        [sys.executable, __file__],
        env=os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert len(set(plans)) >= JOBS
    assert others == plans
    assert sha256(" ".join(plans).encode()).hexdigest()[:16] == DIGEST


if __name__ == "__main__":
    print(*(plan.digest for plan in random_plans()))
