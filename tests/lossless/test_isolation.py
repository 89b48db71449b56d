"""A broken adapter breaks nobody else, and an adapter without a step is not touched: bit for bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lorafusion_jax.checkpoint.peft import read_adapter
from lorafusion_jax.config import load_config
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.training import RunFolder, train
from lorafusion_jax.training import leaves as lv
from lorafusion_jax.training.optim import hyper
from lorafusion_jax.training.programs import Programs, Sums
from lorafusion_jax.training.run import adapter_specs

HEALTHY = {"optim": {"lr": 1e-3}, "batch": {"global_samples": 4}, "lora": {"rank": 4, "dropout": 0.1}}


def entries(write_rows, breaking_lr):
    broken = {
        "optim": {"name": "sgd", "lr": breaking_lr, "clip": 0, "schedule": "constant"},
        "batch": {"global_samples": 3},
        "lora": {"rank": 4, "dropout": 0.1},
    }
    return [
        {"name": "law", "data": {"train": write_rows("law", 12, longest=10)}, **HEALTHY},
        {"name": "bad", "data": {"train": write_rows("bad", 12, longest=10)}, **broken},
        {"name": "med", "data": {"train": write_rows("med", 12, longest=10)}, **HEALTHY},
    ]


def test_an_adapter_that_diverges_stops_alone(write_job, write_rows, tmp_path):
    healthy = train(load_config(write_job(entries(write_rows, 1e-3))), tmp_path / "healthy")
    broken = train(load_config(write_job(entries(write_rows, 1e30))), tmp_path / "broken")
    assert healthy.exit_code == 0
    assert broken.exit_code == 3
    assert {name: adapter.status for name, adapter in broken.adapters.items()} == {
        "law": "done",
        "bad": "failed",
        "med": "done",
    }
    for name in ("law", "med"):
        one, other = (read_adapter(RunFolder(tmp_path / run).latest(name))[1] for run in ("healthy", "broken"))
        for path in one:
            for a, b in zip(one[path], other[path], strict=True):
                np.testing.assert_array_equal(a, b)
    failed = [row for row in read_rows(tmp_path / "broken" / "events.jsonl") if row["kind"] == "adapter-failed"]
    assert [row["adapter"] for row in failed] == ["bad"]
    assert "not finite" in failed[0]["reason"]
    kept = broken.adapters["bad"].step
    if kept:  # its last good weights are exported and finite
        _, arrays = read_adapter(RunFolder(tmp_path / "broken").latest("bad"))
        assert all(np.isfinite(b).all() for _, b in arrays.values())


@pytest.fixture(scope="module")
def two():
    """Programs and random leaves of two adapters, without a model: updates need none."""
    from lorafusion_jax.config.schema import AdapterConfig, DataSettings, LoraSettings, TrainSettings

    configs = [
        AdapterConfig(name=name, data=DataSettings(train="x"), lora=LoraSettings(rank=rank, alpha=rank))
        for name, rank in (("law", 2), ("med", 3))
    ]
    shapes = {"layers.q_proj.lora_a": (2, 2, 8, 3), "layers.q_proj.lora_b": (2, 2, 3, 8)}
    keys = jax.random.split(jax.random.key(0), 4)
    lora = {name: jax.random.normal(key, shape) for (name, shape), key in zip(shapes.items(), keys, strict=False)}
    grads = {name: jax.random.normal(key, shape) for (name, shape), key in zip(shapes.items(), keys[2:], strict=False)}

    class Job:
        adapters = configs

    parts = lv.Parts(lora=lora, frozen=None, join=lambda *a: None)
    return Programs(parts, configs, adapter_specs(Job), TrainSettings()), lora, grads, configs


def copy(tree):
    return jax.tree.map(jnp.copy, tree)


def test_a_step_touches_its_own_adapter_only(two):
    programs, lora, grads, configs = two
    before = jax.tree.map(np.asarray, lora)
    sums = Sums(copy(grads), jnp.array([1.0, 2.0]))
    numbers = hyper(configs[0].optim, 1e-2)
    after, left, _, report = programs.update(0, copy(lora), sums, programs.init_optimizer(0, lora), numbers)
    assert float(report.loss) == 1.0
    for name in lora:
        np.testing.assert_array_equal(after[name][:, 1], before[name][:, 1])
        np.testing.assert_array_equal(left.grads[name][:, 1], grads[name][:, 1])
        assert not np.any(left.grads[name][:, 0])
        own = np.asarray(after[name][:, 0])
        rank = 2
        inside = own[..., :rank] if name.endswith("a") else own[..., :rank, :]
        assert np.any(
            inside != (before[name][:, 0][..., :rank] if name.endswith("a") else before[name][:, 0][..., :rank, :])
        )
        outside = own[..., rank:] if name.endswith("a") else own[..., rank:, :]
        np.testing.assert_array_equal(
            outside, before[name][:, 0][..., rank:] if name.endswith("a") else before[name][:, 0][..., rank:, :]
        )
    np.testing.assert_array_equal(left.loss, [0.0, 2.0])


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_changes_no_weight_and_no_moment(two, poison):
    programs, lora, grads, configs = two
    bad = {name: leaf.at[0, 0, 0, 0].set(poison) if name.endswith("lora_b") else leaf for name, leaf in grads.items()}
    state = programs.init_optimizer(0, lora)
    before = jax.tree.map(np.asarray, (lora, state))
    after, _, kept, report = programs.update(
        0, copy(lora), Sums(copy(bad), jnp.ones(2)), state, hyper(configs[0].optim, 1e-2)
    )
    jax.tree.map(np.testing.assert_array_equal, (after, kept), before)
    names = programs.leaf_names(0, lora)
    assert [name for name, good in zip(names, np.asarray(report.finite), strict=True) if not good] == [
        "layers.q_proj.lora_b"
    ]
