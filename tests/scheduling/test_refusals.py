"""Bad input raises an error with its own code and a message that says what to change."""

import math
import pickle

import numpy as np
import pytest

from scheduling import (
    AdapterJob,
    CostModel,
    Measurement,
    PassCost,
    PlanError,
    StageCost,
    default_cost_model,
    fit_cost_model,
    make_plan,
    replan,
    simulate,
)

GOOD = AdapterJob("law", [100, 200, 300], 2)
LIMITS = {"capacity_tokens": 512, "num_stages": 2}
PASS = PassCost(token_s=1e-6)


def job(**changes):
    return lambda: AdapterJob(**({"name": "law", "sample_tokens": [100, 200], "global_batch": 2} | changes))


def plan(*jobs, **changes):
    return lambda: make_plan(list(jobs), **(LIMITS | changes))


CASES = {
    "no jobs": (plan(), "plan.no-jobs", "no adapters"),
    "no samples": (job(sample_tokens=[]), "plan.no-samples", "law: no samples"),
    "length 0": (job(sample_tokens=[5, 0]), "plan.sample-length", "law: sample 1 has 0 tokens"),
    "negative length": (job(sample_tokens=[-3]), "plan.sample-length", "sample 0 has -3 tokens"),
    "half a token": (job(sample_tokens=[5, 2.5]), "plan.sample-length", "sample 1 has length 2.5"),
    "NaN length": (job(sample_tokens=[5, math.nan]), "plan.sample-length", "sample 1 has length nan"),
    "text as length": (job(sample_tokens=["5"]), "plan.sample-length", "sample 0 has length '5'"),
    "batch of 0": (job(global_batch=0), "plan.count", "law: global_batch .* not 0"),
    "batch of 1.5": (job(global_batch=1.5), "plan.count", "global_batch"),
    "batch of True": (job(global_batch=True), "plan.count", "global_batch"),
    "no epochs": (job(epochs=0), "plan.count", "epochs"),
    "no batches": (job(max_batches=0), "plan.count", "max_batches"),
    "negative weight": (job(weight=-1.0), "plan.weight", "law: weight .* not -1.0"),
    "no weight": (job(weight=0), "plan.weight", "weight"),
    "NaN weight": (job(weight=math.nan), "plan.weight", "weight"),
    "no name": (job(name=""), "plan.name", "non-empty"),
    "same name twice": (plan(GOOD, GOOD), "plan.duplicate-name", "'law'"),
    "capacity below a tile": (plan(GOOD, capacity_tokens=100), "plan.capacity", "100 tokens has no room"),
    "capacity 0": (plan(GOOD, capacity_tokens=0), "plan.setting", "capacity_tokens .* not 0"),
    "no stages": (plan(GOOD, num_stages=0), "plan.setting", "num_stages"),
    "no replicas": (plan(GOOD, data_parallel=0), "plan.setting", "data_parallel"),
    "tile 0": (plan(GOOD, tile_tokens=0), "plan.setting", "tile_tokens"),
    "negative time": (plan(GOOD, time_limit_s=-1), "plan.setting", "time_limit_s"),
    "NaN time": (plan(GOOD, time_limit_s=math.nan), "plan.setting", "time_limit_s"),
    "sample too long": (plan(GOOD, capacity_tokens=256), "plan.sample-too-long", "law: sample 2 has 300 tokens"),
    "auto without costs": (plan(GOOD, capacity_tokens="auto"), "plan.no-costs", "cost model"),
    "NaN cost": (lambda: PassCost(token_s=math.nan), "plan.cost", "token_s .* not nan"),
    "negative cost": (lambda: StageCost(forward=PASS, backward=PASS, update_s=-1.0), "plan.cost", "update_s"),
    "no stages in costs": (lambda: CostModel(stages=()), "plan.cost", "at least one stage"),
    "unknown device": (lambda: default_cost_model("abacus"), "plan.device", "'abacus'"),
    "not a cost model": (lambda: CostModel.from_json("{}"), "plan.cost-format", "not a cost model"),
    "no measurements": (lambda: fit_cost_model([]), "plan.cost", "forward and backward"),
    "NaN measured": (lambda: fit_cost_model([Measurement(0, "forward", 1, 1, math.nan)]), "plan.cost", "nan"),
    "costs of other stages": (
        lambda: simulate(make_plan([GOOD], **LIMITS), CostModel(stages=(StageCost(forward=PASS, backward=PASS),) * 3)),
        "plan.cost",
        "for 3 stages, the plan has 2",
    ),
    "costs of stages for one": (
        lambda: CostModel(stages=(StageCost(forward=PASS, backward=PASS),) * 2).check_stages(1),
        "plan.cost",
        "the costs are for 2 stages, the plan has 1\n",
    ),
    "costs of other settings": (
        lambda: CostModel(
            stages=(StageCost(forward=PASS, backward=PASS),), measured_with={"keep": "all", "mesh.fsdp": 2, "x": 1}
        ).check_measured_with({"keep": "none", "mesh.fsdp": 4, "y": 1}),
        "plan.cost",
        "measured with keep=all, mesh.fsdp=2, the job has keep=none, mesh.fsdp=4\n  fix: .*JOBS mesh.fsdp=4$",
    ),
    "what costs were measured with is no table": (
        lambda: CostModel.from_json('{"schema": "lorafusion.cost/1", "stages": [], "measured_with": 3}'),
        "plan.cost-format",
        "not a cost model",
    ),
    "replan nobody": (
        lambda: replan(make_plan([GOOD], **LIMITS), at_slot=0, cancel=["x"]),
        "plan.unknown-adapter",
        "law",
    ),
    "replan far away": (lambda: replan(make_plan([GOOD], **LIMITS), at_slot=99), "plan.slot", "not 99"),
    "resume the running": (
        lambda: replan(make_plan([GOOD], **LIMITS), at_slot=0, resume=["law"]),
        "plan.not-paused",
        "law is not paused",
    ),
    "add a known name": (
        lambda: replan(make_plan([GOOD], **LIMITS), at_slot=0, add=[GOOD]),
        "plan.duplicate-name",
        "law",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_is_refused(case):
    call, code, words = CASES[case]
    with pytest.raises(PlanError, match=words) as caught:
        call()
    assert caught.value.code == code
    assert str(caught.value).startswith(f"error[{code}]")


def test_numpy_integers_are_accepted():
    job = AdapterJob("law", np.array([100, 200], np.int32), np.int64(2), epochs=np.int64(2))
    plan = make_plan([job], capacity_tokens=np.int64(512), num_stages=np.int64(2))
    assert plan == type(plan).from_json(plan.to_json())


def test_errors_survive_pickling():
    error = PlanError("plan.x", "what", where="here", why="so", fix="that", problems=("one", "two"))
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.problems == error.problems


def test_a_long_list_of_problems_is_truncated():
    text = str(PlanError("plan.x", "what", problems=tuple(f"problem {i}" for i in range(1000))))
    assert "problem 19" in text
    assert "problem 20" not in text
    assert "980 more" in text
