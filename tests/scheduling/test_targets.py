"""Plans of the shared workloads are close to the lower bound and shorter than the reference solver's."""

import json
from pathlib import Path

import pytest

from scheduling import AdapterJob, default_cost_model, formula_bound, make_plan, simulate

DATA = Path(__file__).parents[2] / "benchmarks" / "data"
WORKLOADS = json.loads((DATA / "scheduling_workloads.json").read_text())["lengths"]
REFERENCE = json.loads((DATA / "scheduling_reference.json").read_text())["rows"]
LIMITS = {"capacity_tokens": 6144, "num_stages": 4}
SEARCH = {"search_evaluations": 20_000}


def jobs_of(size: int, name: str) -> list[AdapterJob]:
    adapters = WORKLOADS[f"g{size}"][name]
    return [
        AdapterJob(f"{name}-{i}", [n for batch in batches for n in batch], size) for i, batches in enumerate(adapters)
    ]


@pytest.fixture(scope="module")
def plans():
    return {
        (row["global_batch"], row["workload"]): make_plan(
            jobs_of(row["global_batch"], row["workload"]), **LIMITS, **SEARCH
        )
        for row in REFERENCE
    }


@pytest.mark.parametrize(("size", "most"), [(8, 1.045), (16, 1.018)])
def test_slots_over_the_bound(plans, size, most):
    mine = {name: plan for (g, name), plan in plans.items() if g == size}
    slots = sum(plan.num_slots for plan in mine.values())
    bound = sum(formula_bound(plan.jobs, **LIMITS) for plan in mine.values())
    assert slots <= most * bound


@pytest.mark.parametrize("row", REFERENCE, ids=lambda row: f"g{row['global_batch']}-{row['workload']}")
def test_fewer_slots_than_the_reference(plans, row):
    assert plans[row["global_batch"], row["workload"]].num_slots < row["slots"]


def test_one_pass_is_already_good():
    plans = [make_plan(jobs_of(16, name), **LIMITS, time_limit_s=0) for name in WORKLOADS["g16"]]
    assert sum(plan.num_slots for plan in plans) <= 1.02 * sum(formula_bound(plan.jobs, **LIMITS) for plan in plans)


@pytest.mark.parametrize("name", WORKLOADS["g16"])
def test_predicted_bubbles(plans, name):
    timeline = simulate(plans[16, name], default_cost_model("h100", num_stages=4))
    assert timeline.bubble_share <= 0.04


def test_many_samples_stay_near_the_bound():
    lengths = [n for batches in WORKLOADS["g16"]["het"] for batch in batches for n in batch]
    jobs = [AdapterJob(f"a{i}", lengths[i * 7 :] + lengths[: i * 7], 64) for i in range(16)]
    plan = make_plan(jobs, **LIMITS, time_limit_s=0)
    assert plan.gap <= 0.02
