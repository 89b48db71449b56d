"""per_adapter: each adapter's optimizer behaves as in separate training."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from lorafusion_jax.errors import ConfigError
from lorafusion_jax.modules import AdapterSpec, apply_lora, use_adapters
from lorafusion_jax.optim.per_adapter import active_adapters, per_adapter


def law():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.1))


def med():
    return optax.lion(1e-2, weight_decay=0.2)


def tree(seed):
    draw = np.random.default_rng(seed)
    shapes = {"lora_a": (2, 4, 3), "lora_b": (2, 3, 5)}
    return {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def own_leaves(tree, number):
    return jax.tree.map(lambda leaf: np.asarray(leaf)[number], tree)  # by numpy: jax compiles a program for each shape


def compiled(optimizer):
    """step(grads, state, params, …) → params, state: one program, where operations one by one compile one each."""

    @jax.jit
    def step(grads, state, params, **options):
        updates, state = optimizer.update(grads, state, params, **options)
        return optax.apply_updates(params, updates), state

    return step


def test_each_adapter_steps_as_in_separate_training():
    both, params = per_adapter({"law": law(), "med": med()}), tree(0)
    step, state = compiled(both), jax.jit(both.init)(params)
    alone = [own_leaves(params, number) for number in range(2)]
    steps = [compiled(optimizer) for optimizer in (law(), med())]
    states = [jax.jit(optimizer.init)(weights) for optimizer, weights in zip((law(), med()), alone, strict=True)]
    for number_of_step in range(3):
        grads = tree(number_of_step + 1)
        params, state = step(grads, state, params)
        for number in range(2):
            alone[number], states[number] = steps[number](own_leaves(grads, number), states[number], alone[number])
    for number, weights in enumerate(alone):
        chex.assert_trees_all_equal(own_leaves(params, number), weights)


@pytest.mark.parametrize("active", [["law"], "law", jnp.array([True, False]), [0]])
def test_adapters_without_rows_are_untouched_bit_for_bit(active):
    optimizer, params = per_adapter({"law": law(), "med": med()}), tree(0)
    params["lora_a"][1, 0, 0] = -0.0
    _, state = compiled(optimizer)(tree(1), jax.jit(optimizer.init)(params), params)

    @jax.jit
    def step(grads, state, params):
        updates, after = optimizer.update(grads, state, params, active=active)
        return optax.apply_updates(params, updates), after

    grads = tree(2)
    for leaf in grads.values():
        leaf[1] = np.nan
    stepped, after = step(grads, state, params)
    stepped = jax.tree.map(np.asarray, stepped)
    for name in params:
        assert stepped[name][1].tobytes() == params[name][1].tobytes()
    chex.assert_trees_all_equal(after.states["med"], state.states["med"])
    assert (stepped["lora_a"][0] != params["lora_a"][0]).all()


def test_nnx_optimizer_forwards_active():
    specs = [AdapterSpec(name=name, rank=2, alpha=4, targets=("up",)) for name in ("law", "med")]
    model = apply_lora(nnx.Dict(up=nnx.Linear(8, 4, rngs=nnx.Rngs(0))), specs)
    optimizer = nnx.Optimizer(model, per_adapter({"law": law(), "med": med()}), wrt=nnx.LoRAParam)

    @nnx.jit
    def step(model, optimizer, x, table):
        def loss(model):
            with use_adapters(specs, table):
                return jnp.mean((model.up(x) - 1) ** 2)

        grads = nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
        optimizer.update(model, grads, active=active_adapters(table, 2))

    x = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    before = np.asarray(model.up.lora_a[...])
    step(model, optimizer, x, jnp.array([1, 1, -1]))
    step(model, optimizer, x, jnp.array([1, 1, -1]))
    after = np.asarray(model.up.lora_a[...])
    np.testing.assert_array_equal(after[0], before[0])
    assert (after[1] != before[1]).any()


def test_stacked_layers_use_another_axis():
    params = {"lora_a": jnp.ones((3, 2, 4, 2)), "other": jnp.ones((2, 4, 2))}
    optimizer = per_adapter({"law": optax.sgd(1.0), "med": optax.sgd(2.0)})
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    assert updates["lora_a"].shape == (3, 2, 4, 2)
    np.testing.assert_array_equal(updates["lora_a"][:, 1], -2 * np.ones((3, 4, 2)))


def test_misuse_is_an_error_with_a_fix():
    optimizer, params = per_adapter({"law": optax.sgd(1.0), "med": optax.sgd(1.0)}), tree(0)
    with pytest.raises(ConfigError, match=r"wrt=nnx\.LoRAParam"):
        optimizer.init({"kernel": jnp.ones((4, 4))})
    with pytest.raises(ConfigError, match=r"active names \['lay'\]"):
        optimizer.update(params, optimizer.init(params), params, active=["lay"])
    with pytest.raises(ConfigError, match="active has shape"):
        optimizer.update(params, optimizer.init(params), params, active=jnp.ones(3, bool))
    with pytest.raises(ConfigError, match="at least"):
        per_adapter({})


def grads_of(numbers, seed):
    """The gradient of a microbatch that has rows of these adapters only."""
    has_rows = np.isin(np.arange(3), list(numbers))[:, None, None]
    return {name: np.where(has_rows, leaf, np.float32(0)) for name, leaf in three(seed).items()}


def three(seed):
    draw = np.random.default_rng(seed)
    shapes = {"lora_a": (3, 4, 3), "lora_b": (3, 3, 5)}
    return {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


ROWS = ({0}, {1})  # adapters with rows in each of two microbatches; the third has none


def stepped_in_scan(optimizer, params, state):
    """One update with the sum of the gradients of a scan, and the table that the scan ended with."""
    grads = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(grads_of(rows, n) for n, rows in enumerate(ROWS)))
    total, _ = jax.lax.scan(
        lambda total, part: (jax.tree.map(jnp.add, total, part), None), jax.tree.map(jnp.zeros_like, params), grads
    )
    updates, _ = optimizer.update(total, state, params, active=active_adapters(list(ROWS[-1]), 3))
    return optax.apply_updates(params, updates)


def stepped_one_by_one(optimizer, params, state):
    for number, rows in enumerate(ROWS):
        active = active_adapters(list(rows), 3)
        updates, state = optimizer.update(grads_of(rows, number), state, params, active=active)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize(
    ("around", "run"),
    [
        (lambda inner: optax.MultiSteps(inner, 2), stepped_one_by_one),
        (lambda inner: optax.chain(optax.apply_every(2), inner), stepped_one_by_one),
        (lambda inner: optax.apply_if_finite(inner, 1), stepped_one_by_one),
        (lambda inner: inner, stepped_in_scan),
    ],
    ids=["MultiSteps", "apply_every", "apply_if_finite", "scan"],
)
def test_a_gradient_of_several_microbatches_reaches_the_adapters_of_all(around, run):
    optimizer = around(per_adapter({name: optax.sgd(1.0) for name in ("law", "med", "bio")}))
    params = three(7)
    after = jax.jit(lambda params, state: run(optimizer, params, state))(params, optimizer.init(params))
    for name in params:
        moved = [float(np.abs(np.asarray(after[name])[n] - params[name][n]).max()) for n in range(3)]
        assert min(moved[:2]) > 0.1
        assert moved[2] == 0.0


def test_accumulation_inside_counts_the_microbatches_of_each_adapter():
    optimizer = per_adapter({name: optax.MultiSteps(optax.adamw(1e-2), 2) for name in ("law", "med", "bio")})
    alone, params = optax.MultiSteps(optax.adamw(1e-2), 2), three(7)
    step, step_alone = compiled(optimizer), compiled(alone)
    state, weights = jax.jit(optimizer.init)(params), own_leaves(params, 0)
    alone_state = jax.jit(alone.init)(weights)
    for number, rows in enumerate(({0}, {1, 2}, {0, 1})):
        grads = grads_of(rows, number)
        params, state = step(grads, state, params, active=np.isin(np.arange(3), list(rows)))
        if 0 in rows:
            weights, alone_state = step_alone(own_leaves(grads, 0), alone_state, weights)
    chex.assert_trees_all_equal(own_leaves(params, 0), weights)


@pytest.mark.parametrize("active", [[1, 0], [0, 1], jnp.array([1, 0]), np.array([1.0, 0.0]), [2], [-2, 0, 1]])
def test_masks_of_numbers_and_unknown_indices_are_refused(active):
    optimizer, params = per_adapter({"law": optax.sgd(1.0), "med": optax.sgd(1.0)}), tree(0)
    with pytest.raises(ConfigError, match="active"):
        optimizer.update(params, optimizer.init(params), params, active=active)


def test_a_traced_mask_of_integers_is_refused():
    optimizer, params = per_adapter({"law": optax.sgd(1.0), "med": optax.sgd(1.0)}), tree(0)
    with pytest.raises(ConfigError, match="a mask or indices"):
        jax.jit(lambda active: optimizer.update(params, optimizer.init(params), params, active=active))(
            jnp.ones(2, int)
        )
