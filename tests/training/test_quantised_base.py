"""Training on a base that is stored as fp8 or nf4, beside what the tests of stored kinds say of int8."""

from __future__ import annotations

import json
import shutil

import chex
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from lorafusion_jax.cli.main import run
from lorafusion_jax.config.load import load_config
from lorafusion_jax.config.specs import adapter_specs
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.models import load_frozen
from lorafusion_jax.pipeline.base import load_stages
from lorafusion_jax.training.verify import verify_exports

KINDS = ("fp8", "nf4")
ADAPTERS = ("law", "med")


@pytest.fixture(autouse=True)
def _shared_programs(kept_programs):
    pass


@pytest.fixture
def job(write_rows, write_job):
    rows = {name: write_rows(f"{name}.jsonl", 12, seed, 20) for seed, name in enumerate(ADAPTERS)}

    def make(kind: str, names=ADAPTERS, model: str | None = None, **sections):
        adapters = [
            {
                "name": name,
                "data": {"train": rows[name], "eval": rows[name]},
                "batch": {"global_samples": 4},
                "lora": {"rank": 2 + 2 * (name == "med"), "dropout": 0.1},
                "optim": {"lr": 0.02, "schedule": "constant"},
            }
            for name in names
        ]
        path = write_job(adapters, **sections)
        settings = json.loads(path.read_text())
        settings["base"] |= {"dtype": "float32", "quantize": kind} | ({"model": model} if model else {})
        path.write_text(json.dumps(settings))
        return path

    return make


@pytest.fixture
def train(tmp_path, capsys):
    def to(name: str, path, *overrides: str):
        code = run(["train", str(path), "--out", str(tmp_path / name), *overrides])
        assert code == 0, capsys.readouterr().err
        return tmp_path / name

    return to


def weights(folder, name="law"):
    return load_file(folder / "adapters" / name / "latest" / "adapter_model.safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_joint_is_alone_and_a_run_that_goes_on_never_stopped(job, train, tmp_path, capsys, kind):
    """Alone, the same samples lie in other rows of other microbatches: float32 sums come in another order."""
    whole = train("whole", job(kind), "save.every_steps=1", "save.keep=9")
    alone = train("alone", job(kind, names=["law"]))
    ours, theirs = weights(whole), weights(alone)
    assert ours.keys() == theirs.keys()
    for key, wanted in theirs.items():
        np.testing.assert_allclose(ours[key], wanted, atol=1e-5 * np.abs(wanted).max(), rtol=0, err_msg=key)
    assert verify_exports(whole)["law"].same
    half = tmp_path / "half"
    shutil.copytree(whole, half, symlinks=True)
    for slot in sorted(int(slot.name) for slot in (half / "state").iterdir())[2:]:
        shutil.rmtree(half / "state" / str(slot))
    shutil.rmtree(half / "adapters")
    assert run(["resume", str(half)]) == 0, capsys.readouterr().err
    for name in ADAPTERS:
        chex.assert_trees_all_equal(weights(half, name), weights(whole, name))
    noted = whole / "adapters" / "law" / "latest" / "adapter_config.json"
    assert json.loads(noted.read_text())["base_quantize"] == kind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", [{}, {"fsdp": 2}], ids=str)
def test_the_plan_counts_the_bytes_that_lie_on_the_devices(job, capsys, kind, mesh):
    plans = {}
    for quantize in ("none", kind):
        path = job(quantize, mesh=mesh)
        assert run(["plan", str(path), "--json"]) == 0
        plans[quantize] = json.loads(capsys.readouterr().out)["memory"]["stages"]
    config = load_config(path)
    (stage,) = load_stages(config, prepare(config), adapter_specs(config))
    arrays = {id(leaf): leaf for leaf in jax.tree.leaves(stage.weights.arrays())}  # a tied table comes twice
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in arrays.values())
    assert plans[kind][0]["frozen"] == held < plans["none"][0]["frozen"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_base_is_stored_alike_every_time(tiny_base, kind):
    chex.assert_trees_all_equal(*(load_frozen(tiny_base, quantize=kind) for _ in range(2)))


def test_kernels_that_a_kind_cannot_store_are_refused_before_anything_is_read(job, make_base, tmp_path, capsys):
    odd = str(make_base(tmp_path / "odd", intermediate_size=47))
    for command in ("check", "train"):
        assert run([command, str(job("nf4", model=odd))]) == 2
        shown = capsys.readouterr().err
        assert "error[base.quantize-shape]" in shown
        assert "mlp.down_proj.kernel [47, 32]" in " ".join(shown.split())
