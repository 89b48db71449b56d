"""Adapters whose ranks, scales and layers differ between projections, in places that hold their largest rank."""

from __future__ import annotations

import json

import numpy as np
import pytest
from live_sessions import assert_same, open_session, run, run_window, start
from more_cases import nightly
from safetensors.numpy import load_file
from small_jobs import exported, write_job, write_rows

from lorafusion_jax.config import load_config
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.session import AdapterState, Task
from lorafusion_jax.session.compiles import CompileCounter
from lorafusion_jax.session.export import export_task
from lorafusion_jax.training import train

pytestmark = pytest.mark.usefixtures("quick_compiles")

TARGETS = ["v_proj", "o_proj", "up_proj"]
ADAPTERS = {
    "narrow": {
        "rank": 2,
        "alpha": 7.0,
        "dropout": 0.2,
        "targets": TARGETS,
        "rank_pattern": {"1.self_attn.v_proj": 5, ".*mlp.up_proj": 1},
        "alpha_pattern": {"layers.[1-7].self_attn.o_proj": 3.5},
    },
    "middle": {
        "kind": "dora",
        "rank": 3,
        "targets": TARGETS,
        "layers_to_transform": [1],
        "alpha_pattern": {"v_proj": 4},
    },
    "shifted": {
        "lora_bias": True,
        "rank": 2,
        "rslora": True,
        "targets": TARGETS,
        "exclude": ["o_proj", "0.mlp.up_proj"],
    },
    "even": {"rank": 5, "dropout": 0.1, "targets": ["o_proj"]},
}


@pytest.fixture(scope="module")
def configure(tmp_path_factory, tiny_base):
    folder = tmp_path_factory.mktemp("jobs")

    def make(name: str):
        entry = {
            "name": name,
            "data": {"train": write_rows(folder, name, 9, longest=9)},
            "batch": {"global_samples": 4},
        }
        entry |= {"lora": ADAPTERS[name], "seed": len(name)}
        optim = {"lr": 5e-3, "schedule": "constant", "warmup": 0, "eps": 1e-4, "weight_decay": 0.1}
        return load_config(write_job(folder, tiny_base, [entry], optim=optim))

    return make


@pytest.fixture(scope="module")
def session(configure):
    opened = open_session(configure("even"), {"dora:3": 1, 5: 2, "lora-bias:4": 1}, TARGETS, reproducible=True)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def task(configure):
    def make(name: str) -> Task:
        config = configure(name)
        return Task.of(config, prepare(config))

    return make


@pytest.fixture(scope="module")
def alone(session, task) -> dict[str, AdapterState]:
    """Each trained alone; those that moved between places after a step ended with the same bits."""
    states = {}
    for name in reversed(ADAPTERS):
        start(session, task(name))
        states |= run(session)
    return states


def test_company_and_moves_change_no_bit_and_compile_nothing(session, task, alone, tmp_path):
    with CompileCounter() as programs:
        first = start(session, task("even"))
        for name in ("middle", "narrow", "shifted"):
            start(session, task(name))
        run_window(session, 2)
        moved = session.index["narrow"]
        saved = session.stop("narrow").write(tmp_path / "state")
        waiting = session.stop("even")
        again = task("narrow")
        session.start(first, again, AdapterState.read(saved, again.adapter))
        session.start(moved, task("even"), waiting)
        ended = run(session)
    assert ended.keys() == alone.keys()
    for name, state in ended.items():
        assert_same(state, alone[name])
    assert programs.compiled + programs.from_cache == 0


def test_what_patterns_leave_out_stays_zero(alone):
    """Ranks below the place's and layers without the adapter: no step and no decay reaches them."""
    narrow = alone["narrow"].weights
    a, b = narrow["layers.self_attn.v_proj.lora_a"], narrow["layers.self_attn.v_proj.lora_b"]
    ranks = [int((np.abs(a[layer]).sum(0) > 0).sum()) for layer in range(len(a))]
    assert ranks == [int((np.abs(b[layer]).sum(1) > 0).sum()) for layer in range(len(b))] == [2, 5]
    up = narrow["layers.mlp.up_proj.lora_b"]
    assert [int((np.abs(layer).sum(1) > 0).sum()) for layer in up] == [1, 1]
    middle = alone["middle"].weights["layers.self_attn.o_proj.lora_b"]
    assert [bool(np.any(layer)) for layer in middle] == [False, True]
    shifted = alone["shifted"].weights
    assert not np.any(shifted["layers.self_attn.o_proj.lora_b"])
    assert [bool(np.any(layer)) for layer in shifted["layers.mlp.up_proj.lora_b"]] == [False, True]


@pytest.mark.parametrize("name", ["narrow", nightly("middle"), nightly("shifted")])
def test_each_equals_one_of_a_run(configure, task, alone, tmp_path, name):
    """The files of the adapter, also their names: PEFT has tensors of adapted projections only."""
    assert train(configure(name), tmp_path / "run").exit_code == 0
    folder = export_task(task(name), alone[name], tmp_path / "session")
    ours, theirs = load_file(folder / "adapter_model.safetensors"), exported(tmp_path / "run", name)
    assert ours.keys() == theirs.keys()
    for key, array in theirs.items():
        assert ours[key].shape == array.shape
        assert np.linalg.norm(ours[key] - array) <= 1e-5 * np.linalg.norm(array), key
    folders = (folder, tmp_path / "run" / "adapters" / name / "latest")
    described = [json.loads((path / "adapter_config.json").read_text()) for path in folders]
    assert described[0] == described[1]
