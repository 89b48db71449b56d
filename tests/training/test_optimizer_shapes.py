"""Shapes of optimizer states: those of packages, of joined leaves, and of checkpoints."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lorafusion_jax.adapters.lora import BIAS, LORA_A, LORA_B
from lorafusion_jax.config.schema import AdapterConfig, DataSettings, LoraSettings, OptimSettings
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.optim import step, table
from lorafusion_jax.optim.table import OPTIMIZERS, Optimizer
from lorafusion_jax.session.adapter_state import AdapterState, check_optimizer
from lorafusion_jax.session.joined_leaves import JoinedLeaves
from lorafusion_jax.session.leaves import Columns, by_path

WEIGHTS = {"a": jnp.ones((2, 130, 140)), "b": jnp.ones((2, 4, 3))}


def update(name):
    settings = OptimSettings(name=name)
    built = step.transformation(settings, step.hyper(settings, 1e-3))
    state = built.init(WEIGHTS)
    return state, *jax.jit(built.update)(WEIGHTS, state, WEIGHTS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ours_return_what_they_were_given(name):
    state, changes, stepped = update(name)
    chex.assert_trees_all_equal_shapes_and_dtypes(changes, WEIGHTS)
    chex.assert_trees_all_equal_shapes_and_dtypes(stepped, state)
    chex.assert_tree_all_finite((changes, stepped))


@pytest.mark.parametrize(
    ("what", "broken"),
    [
        ("changes", lambda changes, state: (jax.tree.map(jnp.bfloat16, changes), state)),
        ("changes", lambda changes, state: (jax.tree.map(lambda leaf: leaf[:1], changes), state)),
        ("changes", lambda changes, state: ({"a": changes["a"]}, state)),
        ("state", lambda changes, state: (changes, (state, jnp.zeros(())))),
    ],
    ids=["dtype", "shape", "leaf", "state"],
)
def test_an_optimizer_that_changes_them_is_named(monkeypatch, what, broken):
    def build(lr, weight_decay, options):
        good = optax.sgd(lr)
        return optax.GradientTransformation(good.init, lambda *given: broken(*good.update(*given)))

    monkeypatch.setattr(table, "OPTIMIZERS", {"tiger": Optimizer(build=build, states_per_weight=0)})
    settings = OptimSettings(name="tiger")
    with pytest.raises(ConfigError, match=rf"plugin.broken.*'tiger' returns {what} of another") as problem:
        update(settings.name)
    assert "update" in problem.value.fix


RATIO = OptimSettings.model_validate({"lr_ratio": {"b": 4.0}})
SHAPES = {
    f"layers.q_proj.{leaf}": shape
    for leaf, shape in {"lora_a": (2, 8, 3), "lora_b": (2, 3, 6), "lora_bias": (2, 1, 6)}.items()
}


def joined_leaves(lr_groups, apart=()):
    columns = {
        f"layers.q_proj.{leaf.name}": Columns(leaf=leaf, first=(0,), width=(1 if leaf is BIAS else 3,))
        for leaf in (LORA_A, LORA_B, BIAS)
    }
    widths = tuple((name, at.width[0]) for name, at in columns.items())
    return JoinedLeaves.of(columns, widths, SHAPES, lr_groups=lr_groups, apart=apart)


@pytest.mark.parametrize("ratios", [{}, {"b": 4.0}])
@pytest.mark.parametrize("name", [name for name, optimizer in OPTIMIZERS.items() if optimizer.elementwise])
def test_joined_leaves_step_as_each_alone(name, ratios):
    settings = OptimSettings.model_validate({"name": name} | ({"lr_ratio": ratios} if ratios else {}))
    joined, draw = joined_leaves(ratios), np.random.default_rng(0)
    leaves = {leaf: jnp.array(draw.normal(size=shape), jnp.float32) for leaf, shape in joined.shapes.items()}
    groups = {leaf: joined.groups[vector] for vector, names in joined.names.items() for leaf in names}
    alone, together = (step.transformation(settings, step.hyper(settings, 0.5), by) for by in (groups, joined.groups))
    vectors = joined.join(leaves)
    state, states = alone.init(leaves), together.init(vectors)
    for _ in range(2):
        with jax.disable_jit():  # optax compiles parts, which XLA contracts by the size of arrays
            changes, state = alone.update(leaves, state, leaves)
            of_vectors, states = together.update(vectors, states, vectors)
        chex.assert_trees_all_equal(joined.split(of_vectors), changes)
    chex.assert_trees_all_equal(joined.split_state(by_path(states)), by_path(state))


@pytest.mark.parametrize(("where", "number"), [(None, 4), ("layers.q_proj.lora_b", 1), ("state", 3)])
def test_the_first_leaf_that_is_not_finite_is_found(where, number):
    joined = joined_leaves(())
    leaves = {leaf: np.zeros(shape, np.float32) for leaf, shape in joined.shapes.items()}
    moment = {leaf: np.zeros_like(array) for leaf, array in leaves.items()}
    if where in leaves:
        leaves[where][1, 2, 5] = np.inf
        leaves["layers.q_proj.lora_bias"][0, 0] = np.nan  # another one after it
    elif where:
        moment["layers.q_proj.lora_a"][0, 0, 1] = np.nan
    assert joined.first_not_finite(joined.join(leaves), {"mu": joined.join(moment)}) == number


def test_states_of_leaves_with_rates_of_their_own_are_read():
    lora = LoraSettings(rank=3, lora_bias=True)
    adapter = AdapterConfig(name="law", data=DataSettings.model_validate({"train": "x"}), lora=lora, optim=RATIO)
    joined = joined_leaves(RATIO.lr_ratios)
    weights = {name: np.zeros(shape, np.float32) for name, shape in joined.shapes.items()}
    states = step.transformation(RATIO, step.zero_hyper(RATIO), joined.groups).init(joined.join(weights))
    optimizer = joined.split_state(jax.tree.map(np.asarray, by_path(states)))
    check_optimizer(adapter, AdapterState(step=0, data="", weights=weights, optimizer=optimizer), "here")
