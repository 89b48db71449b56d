"""Baseline of a plan: the same jobs one after another."""

from __future__ import annotations

from scheduling import Plan, make_plan


def plans_one_after_another(plan: Plan) -> list[Plan]:
    """Plans every adapter separately, with the same planner, capacities and stages as `plan`."""
    return [
        make_plan(
            [job],
            capacity_tokens=plan.sizes,
            num_stages=plan.num_stages,
            data_parallel=plan.data_parallel,
            tile_tokens=plan.tile_tokens,
            time_limit_s=0.2,
            seed=plan.seed,
        )
        for job in plan.jobs
    ]


def slots_one_after_another(plan: Plan) -> int:
    """Counts the slots of all adapters, planned separately.

    Every slot of a capacity costs the same, full or not: with one capacity the ratio of slots is the ratio of times.
    """
    return sum(single.num_slots for single in plans_one_after_another(plan))
