"""A diverging adapter does not affect others, and an adapter without a step stays unchanged, bit for bit."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lorafusion_jax.config import load_config
from lorafusion_jax.config.schema import AdapterConfig, DataSettings, LoraSettings, TrainSettings
from lorafusion_jax.config.specs import adapter_spec
from lorafusion_jax.layout.extent import Extent
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.optim.step import hyper
from lorafusion_jax.peft.folder import read_adapter
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.session.leaves import own_columns, place_of
from lorafusion_jax.session.mesh import stage_meshes
from lorafusion_jax.session.parts import Parts
from lorafusion_jax.session.programs import StagePrograms
from lorafusion_jax.training import RunFolder, train

Q = "layers.self_attn.q_proj."
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
    ]


def test_only_the_diverging_adapter_stops(kept_programs, write_job, write_rows, tmp_path):
    batch = {"capacity_tokens": 64, "tile_tokens": 16}  # programs as those of test_resume.py
    healthy = train(load_config(write_job(entries(write_rows, 1e-3), batch=batch)), tmp_path / "healthy")
    broken = train(load_config(write_job(entries(write_rows, 1e30), batch=batch)), tmp_path / "broken")
    assert healthy.exit_code == 0
    assert broken.exit_code == 3
    assert {name: adapter.status for name, adapter in broken.adapters.items()} == {
        "law": "done",
        "bad": "failed",
    }
    from_healthy, other = (read_adapter(RunFolder(tmp_path / run).latest("law"))[1] for run in ("healthy", "broken"))
    for path in from_healthy:
        for a, b in zip(from_healthy[path], other[path], strict=True):
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
    """Update programs and random leaves of two adapters of a tiny model."""
    configs = [
        AdapterConfig(
            name=name,
            data=DataSettings(train="x"),
            lora=LoraSettings(rank=rank, alpha=rank, targets=["q_proj"]),
        )
        for name, rank in (("law", 2), ("med", 3))
    ]

    model = ModelConfig(
        family="llama", vocab_size=16, hidden_size=8, intermediate_size=8, num_layers=2, num_heads=2, num_kv_heads=2,
        head_dim=4,
    )  # fmt: skip
    parts = Parts(model=model, specs=tuple(map(adapter_spec, configs)), settings=TrainSettings(), dtype=jnp.float32)
    shapes = parts.leaves.lora_shapes(model.num_layers)
    assert shapes == {Q + "lora_a": (2, 8, 5), Q + "lora_b": (2, 5, 8)}
    draw = np.random.default_rng(0)
    lora = {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    grads = {name: draw.normal(size=(1, *shape)).astype(np.float32) for name, shape in shapes.items()}
    everything = Extent(0, 2 * model.num_layers)
    return StagePrograms(parts, stage_meshes()[0], everything, "everything"), lora, grads, configs


def of_law(leaf):
    """The first adapter's part of an array whose columns are the last axis but one, or the last: 2 of 5."""
    return np.asarray(leaf)[..., :2] if leaf.shape[-1] == 5 else np.asarray(leaf)[..., :2, :]


def of_med(leaf):
    return np.asarray(leaf)[..., 2:] if leaf.shape[-1] == 5 else np.asarray(leaf)[..., 2:, :]


def copy(tree):
    return jax.tree.map(jnp.copy, tree)


def step(two, grads, alive=(True, True)):
    """Steps the first adapter; returns weights, sums, losses, optimizer, who is alive, summary and the bad leaf."""
    programs, lora, _, configs = two
    law, optim = adapter_spec(configs[0]), configs[0].optim
    columns, window = own_columns(programs.columns.trained, 0, law), place_of(programs.columns.trained, 0, law)
    optimizer = programs.adapters.init_optimizer(columns, optim, window, lora)
    joined = programs.adapters.joined(columns, optim, lora)
    losses = {"loss": jnp.array([[1.0, 2.0]])}
    closed = programs.adapters.close_batch(columns, joined, window, copy(grads), losses, jnp.array(alive))
    gradient, summary, bad, sums, totals = closed
    after, optimizer, alive, *_ = programs.adapters.step(
        columns, joined, optim, window, copy(lora), gradient, optimizer, jnp.array(alive), [summary], hyper(optim, 1e-2)
    )
    return after, sums, totals["loss"], optimizer, alive, summary, bad


def test_a_step_touches_its_own_adapter_only(two):
    _, lora, grads, _ = two
    after, sums, loss, _, alive, summary, _ = step(two, grads)
    assert (float(summary.loss), float(summary.finite)) == (1.0, 1.0)
    np.testing.assert_array_equal(alive, [True, True])
    for name, before in lora.items():
        np.testing.assert_array_equal(of_med(after[name]), of_med(before))
        np.testing.assert_array_equal(of_med(sums[name]), of_med(grads[name]))
        assert not np.any(of_law(sums[name]))
        assert np.all(of_law(after[name]) != of_law(before))
    np.testing.assert_array_equal(loss, [[0.0, 2.0]])


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_changes_no_weight_and_no_moment(two, poison):
    programs, lora, grads, configs = two
    bad = {name: leaf.copy() for name, leaf in grads.items()}
    bad[Q + "lora_b"][0, 0, 0, 0] = poison
    law, trained = adapter_spec(configs[0]), programs.columns.trained
    state = programs.adapters.init_optimizer(
        own_columns(trained, 0, law), configs[0].optim, place_of(trained, 0, law), lora
    )
    after, _, _, kept, alive, summary, bad = step(two, bad)
    chex.assert_trees_all_equal((after, kept), (lora, state))
    np.testing.assert_array_equal(alive, [False, True])
    assert float(summary.finite) == 0.0
    assert int(bad) == 1  # in order of names: lora_a, lora_b


def test_a_failed_adapter_takes_no_further_step(two):
    _, lora, grads, _ = two
    after, sums, _, _, alive, _, _ = step(two, grads, alive=(False, True))
    chex.assert_trees_all_equal(after, lora)
    np.testing.assert_array_equal(alive, [False, True])
    assert not any(np.any(of_law(leaf)) for leaf in sums.values())
