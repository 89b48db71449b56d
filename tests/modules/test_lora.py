"""LoRALinear: the equation, the rows of each adapter, what stays zero, Linen."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.nnx import bridge
from host_arrays import filled, normal, on_device
from more_cases import mostly_nightly

from lorafusion_jax.errors import ConfigError
from lorafusion_jax.modules import AdapterSpec, LoRAContext, LoRALinear, init_bank, lora_mlp, lora_siblings
from pallas_kernels.mlp.xla import silu_gate

WIDE = AdapterSpec(name="wide", rank=4, alpha=8)
THIN = AdapterSpec(name="thin", rank=2, alpha=3, rslora=True, targets=("k_proj",), seed=1)
SPECS = (WIDE, THIN)
TABLE = [1, 0, -1, 1]  # tiles of 3 rows
ADAPTED = ("gate up down", "gate up", "gate", "up down", "down", "", "no context")


def layer_of(name, *, out_features=6, seed=0, **more):
    layer = LoRALinear(8, out_features, num_adapters=2, rank=4, rngs=nnx.Rngs(seed), **more)
    a, b = init_bank(SPECS, f"layers.0.self_attn.{name}", 8, out_features, rank=4).values()
    layer.lora_a[...], layer.lora_b[...] = on_device(a), on_device(b)
    return layer


@pytest.fixture(scope="module")
def x():
    return normal(1, (12, 8))


def with_b(layer):
    """Gives B numbers where the adapters have rank."""
    used = np.any(np.asarray(layer.lora_a[...]) != 0, axis=1)[:, :, None]
    layer.lora_b[...] = on_device(np.where(used, normal(2, layer.lora_b.shape), 0))
    return layer


def test_each_row_gets_its_own_adapter(x):
    layer = with_b(layer_of("k_proj", use_bias=True))
    layer.bias[...] = on_device(np.arange(6.0), np.float32)
    expected = np.asarray(x, np.float64) @ np.asarray(layer.kernel[...], np.float64) + np.arange(6.0)
    for tile, adapter in enumerate(TABLE):
        if adapter >= 0:
            rows = slice(3 * tile, 3 * tile + 3)
            a, b = (np.asarray(bank[...], np.float64)[adapter] for bank in (layer.lora_a, layer.lora_b))
            expected[rows] += SPECS[adapter].scale * np.asarray(x, np.float64)[rows] @ a @ b
    # float32 sums of 8 products each: a few units of 2^-24 relative to values of about 10
    np.testing.assert_allclose(layer(x, LoRAContext.of(SPECS, TABLE)), expected, rtol=1e-5, atol=1e-5)


def test_without_context_adapters_are_left_out(x):
    layer = with_b(layer_of("k_proj"))
    np.testing.assert_array_equal(layer(x), x @ layer.kernel[...])


def test_rank_zero_has_no_lora_leaves_and_ignores_the_context(x):
    layer = LoRALinear(8, 6, num_adapters=2, rank=0, rngs=nnx.Rngs(0))
    assert not nnx.to_flat_state(nnx.state(layer, nnx.LoRAParam))
    np.testing.assert_array_equal(layer(x, LoRAContext.of(SPECS, TABLE)), layer(x))


def test_computes_in_its_dtype_and_keeps_float32_master_weights(x):
    layer = layer_of("k_proj", dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    assert layer(x, LoRAContext.of(SPECS, TABLE)).dtype == layer.kernel[...].dtype == jnp.bfloat16
    assert layer.lora_a[...].dtype == layer.lora_b[...].dtype == jnp.float32
    assert isinstance(layer.lora_a, nnx.LoRAParam)
    assert not isinstance(layer.kernel, nnx.LoRAParam)


def test_siblings_equal_separate_layers_bit_for_bit(x):
    layers = (
        with_b(layer_of("q_proj")),
        with_b(layer_of("k_proj", out_features=4, seed=1, use_bias=True)),
        LoRALinear(8, 4, num_adapters=2, rank=0, rngs=nnx.Rngs(2)),
    )
    specs = [AdapterSpec(name=spec.name, rank=spec.rank, alpha=spec.alpha, dropout=0.25) for spec in SPECS]
    context = LoRAContext.of(specs, TABLE, row_key=on_device(np.arange(12), np.uint32))
    for together, linear in zip(lora_siblings(x, layers, context, site=2), layers, strict=True):
        np.testing.assert_array_equal(together, linear(x, context, site=2))


@pytest.mark.parametrize(
    ("adapted", "dropout"),
    mostly_nightly(
        [(who, dropout) for who in ADAPTED for dropout in (False, True)],
        [("gate up down", True), ("gate up", False), ("gate", True), ("up down", False), ("down", True), ("", False),
         ("no context", True)],
    ),
)  # fmt: skip
def test_mlp_equals_separate_layers_bit_for_bit(x, adapted, dropout):
    shapes = {"gate": (8, 6), "up": (8, 6), "down": (6, 8)}
    ranks = {name: 4 * (adapted == "no context" or name in adapted.split()) for name in shapes}
    layers = {
        name: LoRALinear(*shape, num_adapters=2, rank=ranks[name], use_bias=name != "up", rngs=nnx.Rngs(seed))
        for seed, (name, shape) in enumerate(shapes.items())
    }
    layers = {name: with_b(layer) if ranks[name] else layer for name, layer in layers.items()}
    specs = [AdapterSpec(name=spec.name, rank=4, alpha=8, dropout=0.25) for spec in SPECS]
    row_key = on_device(np.arange(12), np.uint32) if dropout else None
    context = None if adapted == "no context" else LoRAContext.of(specs, TABLE, row_key=row_key, train=dropout)
    graph, lora, frozen = nnx.split(nnx.Dict(layers), nnx.LoRAParam, ...)

    def one_by_one(gate, up, down):
        gate_TF, up_TF = (layer(x, context, site=2) for layer in (gate, up))
        return down(silu_gate(gate_TF, up_TF), context, site=3)

    def together(gate, up, down):
        return lora_mlp(x, gate, up, down, context, sites=(2, 3))

    def run(mlp):
        def loss(lora):
            y = mlp(**nnx.merge(graph, lora, frozen))
            return jnp.sum(y**2), y

        return jax.tree.leaves(jax.grad(loss, has_aux=True)(lora))  # operation by operation: equal to the last bit

    for got, want in zip(run(together), run(one_by_one), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kinds", [("dora", "dora"), ("lora", "dora"), ("dora", "lora")])
@pytest.mark.parametrize("scaled", ["gate up", "gate", "up"])
@pytest.mark.parametrize("use_bias", [False, True])
def test_factors_of_columns_are_applied_with_the_gate(x, kinds, scaled, use_bias):
    """As in the separate layers, to the rounding of another compilation."""
    specs = [AdapterSpec(name=spec.name, rank=4, alpha=8, kind=kind) for spec, kind in zip(SPECS, kinds, strict=True)]
    shapes = {"gate": (8, 6), "up": (8, 6), "down": (6, 8)}
    layers = {
        name: LoRALinear(
            *shape, num_adapters=2, rank=4 * (name in scaled), kinds=kinds, use_bias=use_bias, rngs=nnx.Rngs(3)
        )
        for name, shape in shapes.items()
    }
    context = LoRAContext.of(specs, [-1, 0, 1, 0])
    for name in scaled.split():
        layers[name] = with_b(layers[name])
        layers[name].magnitude[...] = on_device(np.asarray(layers[name].magnitude[...]) * np.float32(1.25))
    graph, lora, frozen = nnx.split(nnx.Dict(layers), nnx.LoRAParam, ...)

    def one_by_one(gate, up, down):
        return down(silu_gate(gate(x, context), up(x, context)), context)

    def run(mlp):
        def loss(lora):
            y = mlp(**nnx.merge(graph, lora, frozen))
            return jnp.sum(y**2), y

        return jax.tree.leaves(jax.jit(jax.grad(loss, has_aux=True))(lora))

    together = run(lambda gate, up, down: lora_mlp(x, gate, up, down, context, sites=(0, 0)))
    for got, want in zip(together, run(one_by_one), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("context", [None, LoRAContext.of(SPECS, TABLE)], ids=["plain", "adapted"])
def test_policies_find_what_enters_the_gate(x, context):
    gate, up = (with_b(layer_of("k_proj", seed=seed)) for seed in (0, 1))
    down = LoRALinear(6, 8, num_adapters=2, rank=4, rngs=nnx.Rngs(2))
    text = str(jax.make_jaxpr(lambda x: lora_mlp(x, gate, up, down, context, sites=(0, 1)))(x))
    assert "name[name=gate]" in text
    assert "name[name=up]" in text


def test_dropout_differs_between_layers_and_sites_and_repeats(x):
    layer = with_b(layer_of("k_proj"))
    specs = [AdapterSpec(name=name, rank=4, alpha=8, dropout=0.5) for name in "ab"]
    context = LoRAContext.of(specs, [0, 1, 0, 1], row_key=on_device(np.arange(12), np.uint32))
    draws = [np.asarray(layer(x, context.at_layer(number), site=site)) for number, site in ((0, 0), (1, 0), (0, 1))]
    assert all((draws[i] != draws[j]).any() for i, j in ((0, 1), (0, 2), (1, 2)))
    np.testing.assert_array_equal(draws[0], layer(x, context.at_layer(jnp.int32(0)), site=0))


def test_padding_stays_zero_over_steps_and_each_adapter_trains_its_targets_only(x):
    layer = layer_of("q_proj")  # not a target of "thin"
    other = layer_of("k_proj", seed=1)
    graph, lora, frozen = nnx.split(nnx.List([layer, other]), nnx.LoRAParam, ...)
    tx = optax.adamw(0.1, weight_decay=0.1)

    @jax.jit
    def step(lora, state):
        def loss(lora):
            outputs = lora_siblings(x, nnx.merge(graph, lora, frozen), LoRAContext.of(SPECS, TABLE))
            return sum(jnp.sum((y - 1) ** 2) for y in outputs)

        changes, state = tx.update(jax.grad(loss)(lora), state, lora)
        return optax.apply_updates(lora, changes), state

    trained, state = lora, tx.init(lora)
    for _ in range(3):
        trained, state = step(trained, state)
    q, k = nnx.merge(graph, trained, frozen)
    assert not q.lora_a[...][1].any()
    assert not q.lora_b[...][1].any()
    assert not k.lora_a[...][1, :, 2:].any()
    assert not k.lora_b[...][1, 2:].any()
    assert k.lora_b[...][1, :2].all()
    assert q.lora_b[...][0].all()
    assert k.lora_b[...][0].all()


def test_linen_users_wrap_it_and_find_adapters_in_their_own_collection(x):
    linen = bridge.to_linen(LoRALinear, 8, 6, num_adapters=2, rank=4)
    context = LoRAContext.of(SPECS, TABLE)
    variables = linen.init(jax.random.key(0), x, context)
    assert set(variables) == {"LoRAParam", "params"}
    assert variables["LoRAParam"]["lora_b"].shape == (2, 4, 6)

    def loss(adapters):
        return jnp.sum(linen.apply({**variables, "LoRAParam": adapters}, x, context) ** 2)

    grads = jax.grad(loss)(variables["LoRAParam"])
    assert grads["lora_b"].any()
    assert not grads["lora_a"].any()


def test_linen_adapters_of_different_rank_are_trained_at_their_own():
    specs = [AdapterSpec(name="wide", rank=8, alpha=16), AdapterSpec(name="thin", rank=4, alpha=4)]
    layer, x = bridge.to_linen(LoRALinear, 8, 4, adapters=specs), filled(1.0, 2, 3, 8)
    context = LoRAContext.of(specs, [0, 1])
    variables = layer.init(jax.random.key(0), x, context)
    lora = dict(variables["LoRAParam"])
    optimizer = optax.adam(1e-2)
    state = optimizer.init(lora)

    def loss(lora):
        return jnp.sum((layer.apply({**variables, "LoRAParam": lora}, x, context) - 1) ** 2)

    for _ in range(3):
        grads = jax.grad(loss)(lora)
        updates, state = optimizer.update(grads, state)
        lora = optax.apply_updates(lora, updates)
    assert lora["lora_b"][1, :4].all()
    assert not lora["lora_a"][1, :, 4:].any()
    assert not lora["lora_b"][1, 4:].any()
    with pytest.raises(ConfigError, match="not both"):
        LoRALinear(8, 4, adapters=specs, rank=8, rngs=nnx.Rngs(0))
