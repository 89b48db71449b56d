"""Optimizers and schedules: the chain a user would write by hand, and nothing shared between adapters."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lorafusion_jax.config.schema import OptimSettings
from lorafusion_jax.optim.schedules import learning_rates
from lorafusion_jax.optim.step import clipped, hyper, transformation

BY_HAND = {
    "adamw": optax.adamw(3e-3, b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.1),
    "lion": optax.lion(3e-3, b1=0.8, b2=0.95, weight_decay=0.1),
    "sgd": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(3e-3, momentum=0.9)),
    "adafactor": optax.adafactor(3e-3, multiply_by_parameter_scale=False, weight_decay_rate=3e-3 * 0.1),
}


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("name", BY_HAND)
def test_traced_numbers_give_the_optax_chain(name, clip):
    """Leaves have an axis of layers in front; by hand, each layer is a parameter of its own."""
    settings = OptimSettings(name=name, lr=3e-3, b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.1, momentum=0.9, clip=clip)
    by_hand = optax.chain(*([optax.clip_by_global_norm(clip)] if clip else []), BY_HAND[name])
    weights = {"a": jax.random.normal(jax.random.key(0), (2, 130, 140)), "b": jnp.ones((2, 4, 3))}
    ours = weights, transformation(settings, hyper(settings, 3e-3)).init(weights)
    theirs = layers_of(weights), by_hand.init(layers_of(weights))

    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)  # the numbers are arguments: another rate compiles nothing
    def step(weights, state, grads, numbers):
        if clip:
            norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in grads.values()))
            grads = clipped(grads, norm, numbers.clip)
        changes, state = transformation(settings, numbers).update(grads, state, weights)
        return optax.apply_updates(weights, changes), state

    step(*ours, weights, hyper(settings, 1e-4))
    for seed in range(3):
        grads = jax.tree.map(lambda leaf, seed=seed: jax.random.normal(jax.random.key(seed), leaf.shape), weights)
        ours = step(*ours, grads, hyper(settings, 3e-3))
        changes, state = by_hand.update(layers_of(grads), theirs[1], theirs[0])
        theirs = optax.apply_updates(theirs[0], changes), state
    for key, layer, by_hand_leaf in [(*key, leaf) for key, leaf in theirs[0].items()]:
        # the same formula in another order of float32 operations
        np.testing.assert_allclose(ours[0][key][layer], by_hand_leaf, rtol=2e-5, atol=1e-6)
        assert float(jnp.abs(ours[0][key][layer] - weights[key][layer]).max()) > 1e-4


def layers_of(leaves):
    return {(key, layer): leaf[layer] for key, leaf in leaves.items() for layer in range(2)}


@pytest.mark.parametrize("name", BY_HAND)
def test_the_state_of_some_layers_is_part_of_the_state_of_all(name):
    """Stages hold some of the layers each; checkpoints put their states side by side."""
    settings = OptimSettings(name=name)
    optimizer = transformation(settings, hyper(settings, 1e-3))
    weights = {"a": jax.random.normal(jax.random.key(0), (3, 130, 140))}
    grads = jax.tree.map(jnp.cos, weights)
    whole = optimizer.update(grads, optimizer.init(weights), weights)
    first, last = (
        jax.tree.map(lambda leaf, layers=layers: leaf[layers], (grads, weights)) for layers in (np.s_[:1], np.s_[1:])
    )
    parts = [optimizer.update(grads, optimizer.init(weights), weights) for grads, weights in (first, last)]
    joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves) if leaves[0].ndim else leaves[0], *parts)
    chex.assert_trees_all_equal(joined, whole)


def test_lion_and_adamw_have_their_own_second_momentum_by_default():
    assert hyper(OptimSettings(name="lion"), 0.1).options["b2"] == np.float32(0.99)
    assert hyper(OptimSettings(name="adamw"), 0.1).options["b2"] == np.float32(0.999)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("steps", [1, 2, 10, 100])
def test_schedules_rise_hold_or_fall_and_end_where_they_should(schedule, steps):
    rates = learning_rates(OptimSettings(lr=1e-3, schedule=schedule, warmup=0.1, min_lr_ratio=0.2), steps)
    assert rates.shape == (steps,)
    assert rates.min() > 0
    assert np.isclose(rates.max(), 1e-3)
    warm = round(0.1 * steps)
    rounding = np.spacing(np.float32(1e-3)) * 2  # optax computes in float32
    assert np.all(np.diff(rates[: warm + 1]) >= -rounding)
    assert np.all(np.diff(rates[warm:]) <= rounding)
    if schedule == "constant":
        assert np.isclose(rates[-1], 1e-3)
    elif steps > 2:  # one step above the end, which lies after the last step
        assert 2e-4 < rates[-1] <= 2e-4 + 8e-4 / (steps - warm) + rounding


def test_no_warm_up_starts_at_the_full_rate():
    assert learning_rates(OptimSettings(lr=1e-3, warmup=0.0), 5)[0] == np.float32(1e-3)


def test_warm_up_is_a_number_of_steps_or_a_share_rounded_to_the_nearest():
    def rates(warmup, steps):
        return learning_rates(OptimSettings(lr=1.0, schedule="constant", warmup=warmup), steps).tolist()

    assert rates(4, 10) == rates(0.4, 10) == [0.25, 0.5, 0.75, *[1.0] * 7]
    assert rates(0.2, 7) == rates(1, 7) == [1.0] * 7  # 1.4 steps are one, at the full rate
    assert rates(8, 4) == [0.25, 0.5, 0.75, 1.0]  # of a run that is shorter
