"""A run whose microbatches have several capacities learns what any other packing of the same batches learns."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from small_jobs import write_job, write_rows

from lorafusion_jax.config import load_config
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.peft.folder import read_adapter
from lorafusion_jax.planning.training_plan import train_jobs
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.training import Interrupted, RunFolder, resume, train
from scheduling import CostModel, PassCost, StageCost, make_plan

TOLERANCE = 1e-5  # relative, float32: sums in another order, carried along by optimizer steps
SIZES = [64, 96]
PER_TOKEN = PassCost(token_s=1.0)  # without fixed costs, which favour the largest microbatches of a tiny model
COSTS = CostModel(stages=(StageCost(forward=PER_TOKEN, backward=PER_TOKEN),))
ADAPTERS = {
    "law": {"lora": {"rank": 4, "dropout": 0.1}, "optim": {"lr": 1e-3}, "batch": {"global_samples": 3}, "seed": 1},
    "med": {"lora": {"rank": 4, "dropout": 0.3}, "optim": {"lr": 3e-3}, "batch": {"global_samples": 5}, "seed": 2},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sizes")
    for name in ADAPTERS:
        write_rows(folder, name, 14, longest=10)
    return folder


def config_of(home, base, names, capacity_tokens, **sections):
    entries = [{"name": name, "data": {"train": f"{name}.jsonl"}, **ADAPTERS[name]} for name in names]
    batch = {"capacity_tokens": capacity_tokens, "tile_tokens": 16}
    return load_config(write_job(home, base, entries, batch=batch, **sections))


@pytest.fixture(scope="module")
def mixed(home, tiny_base):
    """(configuration, plan, folder) of both adapters on two stages, in microbatches of several capacities."""
    config = config_of(home, tiny_base, ADAPTERS, SIZES, mesh={"stages": 2}, save={"every_steps": 2})
    jobs = train_jobs(config, prepare(config))
    plan = make_plan(jobs, capacity_tokens=SIZES, num_stages=2, tile_tokens=16, cost_model=COSTS)
    assert train(config, home / "mixed", plan=plan).exit_code == 0
    return config, plan, home / "mixed"


def weights_of(folder, name):
    return read_adapter(RunFolder(folder).latest(name))[1]


def worst_difference(a, b):
    pairs = [pair for key in a for pair in zip(a[key], b[key], strict=True)]
    return max(float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in pairs)


def test_capacities_are_mixed_in_the_pipeline(mixed):
    _, plan, folder = mixed
    assert RunFolder(folder).read_plan() == plan
    assert plan.sizes == tuple(SIZES)
    changes = [a != b for a, b in zip(plan.slot_capacities, plan.slot_capacities[1:], strict=False)]
    assert sum(changes) > 2, "slots of different capacities follow each other"
    started = next(row for row in read_rows(folder / "events.jsonl") if row["kind"] == "started")
    assert Counter(started["sizes"]) == {str(size): many for size, many in plan.slots_of_size.items()}


def test_joint_in_mixed_capacities_equals_alone_in_one(mixed, home, tiny_base):
    config = config_of(home, tiny_base, ["law"], 128)
    assert train(config, home / "alone").exit_code == 0
    alone = weights_of(home / "alone", "law")
    assert worst_difference(weights_of(mixed[2], "law"), alone) < TOLERANCE
    assert max(float(np.abs(b).max()) for _, b in alone.values()) > 1e-4, "it learned nothing"


def test_resumed_in_mixed_capacities_equals_uninterrupted(mixed, home, monkeypatch):
    config, plan, whole = mixed

    def cut(event):
        if event.kind == "step" and event.step == 4:
            raise RuntimeError("power cut")

    with pytest.raises((RuntimeError, Interrupted)):
        train(config, home / "cut", plan=plan, listeners=[cut])
    assert resume(home / "cut").exit_code == 0
    for name in ADAPTERS:
        actual, other = weights_of(whole, name), weights_of(home / "cut", name)
        for path in actual:
            for a, b in zip(actual[path], other[path], strict=True):
                np.testing.assert_array_equal(a, b)
    losses = [
        [row["loss"] for row in read_rows(out / "metrics.jsonl") if row["kind"] == "step"]
        for out in (whole, home / "cut")
    ]
    assert losses[0] == losses[1]
