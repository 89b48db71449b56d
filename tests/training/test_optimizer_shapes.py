"""An optimizer of another package must not change the shapes or dtypes of weights or of its own state."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

from lorafusion_jax.config.schema import OptimSettings
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.optim import step, table
from lorafusion_jax.optim.table import OPTIMIZERS, Optimizer

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
