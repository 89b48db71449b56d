"""Adapters of experts in places of their own, beside adapters of other projections; the routers have a loss."""

from __future__ import annotations

import numpy as np
import pytest
from live_sessions import assert_same, open_session, run, run_window, start
from more_cases import nightly
from safetensors.numpy import load_file
from small_jobs import exported, write_job, write_rows

from lorafusion_jax.config import load_config
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.families.experts import Experts, Router
from lorafusion_jax.session import AdapterState, Places, Task
from lorafusion_jax.session.compiles import CompileCounter
from lorafusion_jax.session.export import export_task
from lorafusion_jax.training import train

pytestmark = pytest.mark.usefixtures("quick_compiles")

ADAPTERS = {
    "ore": {"rank": 3, "dropout": 0, "targets": ["o_proj", "experts"]},  # all of its place: shared programs
    "salt": {"rank": 2, "dropout": 0, "targets": ["o_proj", "mlp.experts.down_proj"]},
    "clay": {"rank": 4, "dropout": 0.1, "targets": ["o_proj"]},
}


@pytest.fixture(scope="module")
def configure(make_base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    experts = Experts(width=32, inner=12, count=5, active=2, router=Router(normalise=False))
    base = make_base(folder / "base", family="qwen3_moe", qk_norm=True, experts=experts)

    def make(name: str):
        entry = {"name": name, "lora": ADAPTERS[name], "batch": {"global_samples": 4}, "seed": len(name)}
        entry["data"] = {"train": write_rows(folder, name, 10, longest=8)}
        optim = {"lr": 5e-3, "schedule": "constant", "warmup": 0, "eps": 1e-4}
        return load_config(write_job(folder, base, [entry], optim=optim, train={"router_aux": 0.05}))

    return make


@pytest.fixture(scope="module")
def session(configure):
    """Every place compiles programs of its own, so there is one of experts."""
    opened = open_session(configure("clay"), {"experts:3": 1, 4: 1}, ["o_proj"])
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def task(configure):
    def make(name: str) -> Task:
        config = configure(name)
        return Task.of(config, prepare(config))

    return make


def train_alone(session, task, names) -> dict[str, AdapterState]:
    states = {}
    for name in names:
        start(session, task(name))
        states |= run(session)
    return states


@pytest.fixture
def wide(configure):
    opened = open_session(configure("clay"), {"experts:3": 2, 4: 1}, ["o_proj"], reproducible=True)
    yield opened
    opened.close()


def test_company_and_moves_change_no_bit_and_compile_nothing(wide, task, tmp_path):
    """`salt` waits on the disk, between two places of experts."""
    session, alone = wide, train_alone(wide, task, ADAPTERS)
    with CompileCounter() as programs:
        first = start(session, task("salt"))
        start(session, task("clay"))
        run_window(session, 2)
        saved = session.stop("salt").write(tmp_path / "state")
        assert start(session, task("ore")) == first
        again = task("salt")
        assert start(session, again, AdapterState.read(saved, again.adapter)) != first
        ended = run(session)
    assert ended.keys() == alone.keys()
    for name, other in alone.items():
        assert_same(ended[name], other)
    assert programs.compiled + programs.from_cache == 0


def test_an_adapter_beside_another_place_is_as_alone(session, task):
    """Equal to rounding: where it begins in a microbatch depends on the other."""
    alone = train_alone(session, task, ("salt",))["salt"]
    start(session, task("clay"))
    start(session, task("salt"))
    beside = run(session)["salt"]
    assert any("experts" in name and name.endswith("_b") and leaf.any() for name, leaf in alone.weights.items())
    for name, leaf in alone.weights.items():
        assert np.linalg.norm(beside.weights[name] - leaf) <= 1e-5 * np.linalg.norm(leaf), name


@pytest.mark.parametrize("name", [nightly("salt"), nightly("ore")])  # test_session.py compares one with a run
def test_each_equals_one_of_a_run(session, configure, task, tmp_path, name):
    """In the session it trains beside an adapter of another place."""
    assert train(configure(name), tmp_path / "run").exit_code == 0
    start(session, task("clay"))
    start(session, task(name))
    folder = export_task(task(name), run(session)[name], tmp_path / "session")
    ours, theirs = load_file(folder / "adapter_model.safetensors"), exported(tmp_path / "run", name)
    assert ours.keys() == theirs.keys()
    assert any("experts" in key and array.any() for key, array in theirs.items())
    for key, array in theirs.items():
        assert np.linalg.norm(ours[key] - array) <= 1e-5 * np.linalg.norm(array), key


def test_places_of_one_kind_hold_no_other(task):
    assert Places.of({4: 1}).refuses(task("ore").spec) == "the session has no place for kind experts, only for lora"
    assert "rank 3 is above" in Places.of({"experts:2": 1, 8: 1}).refuses(task("ore").spec)
    with pytest.raises(LoraFusionError, match=r"places\.classes"):
        Places.of({"experts:0": 1})
