"""Layers that get the same input share one op: the same results, fewer reads, no other effect."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_models import draw_module
from flax import nnx
from host_arrays import normal, on_device

from lorafusion_jax.modules import AdapterSpec, apply_lora, quantize_base, share_inputs, use_adapters

SPECS = [AdapterSpec(name="law", rank=2, alpha=4), AdapterSpec(name="med", rank=3, alpha=3, seed=5)]
TABLE = on_device([0, 1, 1, 0], np.int32)
X, OTHER = (normal(seed, (4, 3, 8)) for seed in (0, 1))


class Layer(nnx.Module):
    """Attention without softmax, and a counter that its calls change."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        for name in ("q", "k", "v", "gate", "up"):
            setattr(self, name, nnx.Linear(8, 16, use_bias=name == "q", rngs=rngs))
        self.down = nnx.Linear(16, 8, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.noise = nnx.Rngs(7)

    def __call__(self, x, context=None):
        self.calls[...] += 1
        context = x if context is None else context
        y = self.q(x) * self.k(context) + self.v(context)
        return self.down(y) + self.down(self.gate(x) * self.up(x))


class Remat(Layer):
    def __call__(self, x):
        y = jax.checkpoint(lambda x: self.q(x) * self.k(x))(x)
        return self.down(y + self.v(x))


def adapted(model, specs=SPECS):
    model, rng = apply_lora(model, specs, targets="all-linear"), np.random.default_rng(0)
    for _, layer in nnx.iter_modules(model):
        if hasattr(layer, "lora_plan"):
            layer.lora_b[...] = on_device(rng.normal(size=layer.lora_b.shape), np.float32)
    return model


def run(model, *inputs, specs=SPECS, **options):
    """(loss, gradients)"""

    def loss(model):
        with use_adapters(specs, TABLE, **options):
            return (model(*inputs) ** 2).mean()

    return nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)


def count_ops(model, *inputs, **options):
    graph, state = nnx.split(model)
    step = jax.make_jaxpr(lambda state: jax.tree.leaves(run(nnx.merge(graph, state), *inputs, **options)))
    return str(step(state)).count("name=_compute")


def drawn(make):
    return draw_module(make) if isinstance(make, type) else make()


@pytest.mark.parametrize(
    ("make", "inputs", "ops"),
    [
        pytest.param(Layer, (X,), 3, id="self-attention"),  # the five of x; down twice
        pytest.param(Layer, (X, OTHER), 4, id="cross-attention"),
        pytest.param(lambda: quantize_base(adapted(draw_module(Layer)), "int8"), (X,), 3, id="stored"),
        pytest.param(Remat, (X,), 6, id="another-trace"),  # q and k once more for backward
    ],
)
def test_layers_of_one_input_run_as_one_op(make, inputs, ops):
    plain, shared = (model if hasattr(model.q, "lora_plan") else adapted(model) for model in (drawn(make), drawn(make)))
    assert count_ops(share_inputs(shared), *inputs) == ops
    (loss, mine), (expected, other) = (nnx.jit(run)(model, *inputs) for model in (shared, plain))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(mine), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * np.abs(theirs).max())
    assert shared.calls[...] == plain.calls[...]


def test_dropout_and_eager_calls_run_one_by_one():
    specs = [AdapterSpec(name=name, rank=2, alpha=4, dropout=0.5) for name in ("law", "med")]
    plain, shared = adapted(draw_module(Layer), specs), share_inputs(adapted(draw_module(Layer), specs))
    assert count_ops(shared, X, specs=specs, step=3) == count_ops(plain, X, specs=specs, step=3) == 7
    with use_adapters(specs, TABLE, train=False):
        np.testing.assert_array_equal(shared(X), plain(X))


def test_weights_are_cast_as_their_layers_cast_them():
    """Weights in float32 under rows in bfloat16: the group gets what each layer would have multiplied by."""

    class Gated(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.gate, self.up = (nnx.Linear(8, 16, dtype=jnp.bfloat16, rngs=rngs) for _ in range(2))

        def __call__(self, x):
            return self.gate(x) * self.up(x)

    def call(model, x):
        with use_adapters(SPECS, TABLE):
            return model(x)

    x = on_device(X, jnp.bfloat16)
    plain, shared = (adapted(draw_module(Gated)) for _ in range(2))
    plain, shared = (nnx.jit(call)(model, x) for model in (plain, share_inputs(shared)))
    np.testing.assert_array_equal(shared, plain)


def test_model_without_adapters_left_is_called_as_it_was():
    model = draw_module(Layer)
    assert type(share_inputs(model)) is Layer
