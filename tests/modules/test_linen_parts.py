"""Linen modules whose own call multiplies by several weights, or by parts of one."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_models import draw_params
from flax import linen as nn
from host_arrays import filled, normal, on_device

import lorafusion_jax as lf
from lorafusion_jax import AdapterSpec, LinenLoRA
from lorafusion_jax.errors import ConfigError

SPECS = [
    AdapterSpec(name="law", rank=8, alpha=16, dropout=0.3, seed=1),
    AdapterSpec(name="med", rank=3, alpha=6, dropout=0.1, seed=2),
]
X = normal(7, (4, 5, 6))
TABLE = on_device([0, 1, 1, 0], np.int32)


class ThreeInOne(nn.Module):
    """Three matrices in one parameter, read in another order than they lie in, and a second parameter."""

    loop: bool = False

    @nn.compact
    def __call__(self, x):
        mixed = self.param("mixed", nn.initializers.lecun_normal(in_axis=-2), (3, 6, 10))
        back = self.param("back", nn.initializers.lecun_normal(), (10, 6))
        first, second, third = mixed if self.loop else (mixed[0], mixed[-2], mixed[2])
        return (x @ third + jnp.tanh(x @ first) * jnp.einsum("bsk,kn->bsn", x, second)) @ back


class Odd(nn.Module):
    """Uses its weight as `way` says."""

    way: str

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.lecun_normal(), (2, 6, 6))
        match self.way:
            case "twice":
                return x @ w[0] + jnp.tanh(x) @ w[0]
            case "turned":
                return x @ w[0] + x @ w[1].T
            case "both":
                return x @ w[0:2].reshape(12, 6)[:6]
            case _:
                return jnp.einsum("bsk,ikn->bsn", x, w[0:1])


def setup(model, names, targets="all-linear"):
    params = draw_params(model, X)
    lora = LinenLoRA(SPECS, targets=targets, modules=[(type(model), names)])
    adapters, draw = lora.init(model, {"params": params}, X), np.random.default_rng(3)
    for spec in SPECS:
        arrays = lora.adapter_arrays(adapters, spec.name)
        drawn = {key: 0.3 * draw.standard_normal(array.shape, np.float32) for key, array in arrays.items()}
        adapters = lora.put_adapter_arrays(adapters, spec.name, drawn)
    return lora, params, adapters


def run(lora, model, params, adapters, table=None, **options):
    @jax.jit
    def forward(adapters):
        with lora.use(table, **options):
            return model.apply({"params": params, "LoRAParam": adapters}, X)

    return np.asarray(forward(adapters))


@pytest.mark.parametrize("loop", [False, True])
def test_each_part_has_an_adapter_of_its_own(loop):
    model = ThreeInOne(loop)
    lora, params, adapters = setup(model, ("mixed", "back"))
    assert adapters["mixed"]["lora_a"].shape == (3, 2, 6, 8)
    assert adapters["back"]["lora_b"].shape == (2, 8, 6)
    merged = lora.merge(model, {"params": params}, adapters, "med", X)
    adapters, params = jax.device_get((adapters, params))
    for part in range(3):
        low_rank = adapters["mixed"]["lora_a"][part, 1, :, :3] @ adapters["mixed"]["lora_b"][part, 1, :3]
        np.testing.assert_allclose(np.asarray(merged["mixed"])[part] - params["mixed"][part], 2 * low_rank, atol=1e-5)
    alone = run(lora, model, params, adapters, only="med", train=False)
    np.testing.assert_allclose(model.apply({"params": merged}, X), alone, atol=1e-4)
    joint = run(lora, model, params, adapters, TABLE, train=False)
    np.testing.assert_allclose(joint[1:3], alone[1:3], atol=1e-5)


def test_parts_draw_dropout_of_their_own_and_the_same_in_every_mixture():
    model = ThreeInOne()
    lora, params, adapters = setup(model, ("mixed", "back"))
    options = {"step": on_device(4, np.uint32), "examples": on_device(np.arange(4), np.int32)}
    joint = run(lora, model, params, adapters, TABLE, **options)
    alone = run(lora, model, params, adapters, on_device(np.zeros(4, np.int32)), **options)
    np.testing.assert_allclose(joint[np.asarray(TABLE) == 0], alone[np.asarray(TABLE) == 0], atol=1e-5)
    # Equal matrices and adapters: what differs between x @ first and x @ third is their dropout alone.
    same = jax.tree.map(lambda leaf: np.broadcast_to(np.asarray(leaf)[:1], leaf.shape), adapters["mixed"])

    class Watched(ThreeInOne):
        @nn.compact
        def __call__(self, x):
            mixed = self.param("mixed", nn.initializers.lecun_normal(in_axis=-2), (3, 6, 10))
            return jnp.stack([x @ mixed[0], x @ mixed[1], x @ mixed[2]])

    params = {"mixed": on_device(np.broadcast_to(np.asarray(params["mixed"])[:1], (3, 6, 10)))}
    lora = LinenLoRA(SPECS, targets="all-linear", modules=[(Watched, "mixed")])
    lora.init(Watched(), {"params": params}, X)
    seen = run(lora, Watched(), params, same, TABLE, **options)
    assert all(np.abs(seen[a] - seen[b]).max() > 1e-2 for a, b in ((0, 1), (0, 2), (1, 2)))


def test_one_of_several_weights_can_be_the_target():
    model = ThreeInOne()
    lora, params, adapters = setup(model, ("mixed", "back"), targets="back")
    assert set(adapters) == {"back"}
    merged = lora.merge(model, {"params": params}, adapters, "law", X)
    np.testing.assert_array_equal(merged["mixed"], params["mixed"])
    alone = run(lora, model, params, adapters, only="law", train=False)
    np.testing.assert_allclose(model.apply({"params": merged}, X), alone, atol=1e-4)


def test_a_stored_base_keeps_the_parts_as_they_are():
    model = ThreeInOne()
    lora, params, adapters = setup(model, ("mixed", "back"))
    small = lora.quantize_base(model, {"params": params}, "int8", X)
    assert small["mixed"] is params["mixed"]
    assert not isinstance(small["back"], jax.Array)
    close = run(lora, model, params, adapters, TABLE, train=False)
    np.testing.assert_allclose(run(lora, model, small, adapters, TABLE, train=False), close, atol=0.2)


def test_peft_folders_name_the_parts(tmp_path):
    model = ThreeInOne()
    lora, _, adapters = setup(model, ("mixed", "back"))
    lf.save_peft(lora.hold(adapters), "law", tmp_path / "law")
    held = lora.hold(jax.tree.map(lambda leaf: filled(0.0, *leaf.shape), adapters))
    lf.load_peft(held, "law", tmp_path / "law")
    for key, array in lora.adapter_arrays(held.tree(), "law").items():
        np.testing.assert_array_equal(array, lora.adapter_arrays(adapters, "law")[key])


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("twice", "multiplies by the weight 2 times"),
        ("turned", r"sums over other axes of w\[1\]"),
        ("both", "does more with the weight than one product"),
        ("whole", "does more with the weight than one product"),
    ],
)
def test_a_weight_that_is_used_otherwise_is_refused(way, why):
    with pytest.raises(ConfigError, match="cannot carry LoRA") as caught:
        setup(Odd(way), "w")
    assert re.search(why, caught.value.why), caught.value.why


def test_the_warning_prints_the_line_that_adapts_the_module():
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(6)(ThreeInOne()(x))

    params = draw_params(Outer(), X)
    with pytest.warns(UserWarning, match=r'modules=\[\(ThreeInOne, \("back", "mixed"\)\)\]'):
        LinenLoRA(SPECS, targets="all-linear").init(Outer(), {"params": params}, X)
    lora = LinenLoRA(SPECS, targets="all-linear", modules=[(ThreeInOne, ("mixed", "back"))])
    assert set(lora.init(Outer(), {"params": params}, X)) == {"Dense_0", "ThreeInOne_0"}


class Heads(nn.Module):
    """A projection to heads, with a bias of as many axes."""

    equation: str = "btd,dnh->btnh"
    shapes: tuple = ((6, 2, 4), (2, 4))
    bias: str = "b"

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.normal(), self.shapes[0])
        return jnp.einsum(self.equation, x, w) + self.param(self.bias, nn.initializers.normal(), self.shapes[1])


class DenseHeads(nn.DenseGeneral):
    """A subclass of another package."""


@pytest.mark.parametrize(
    "layer",
    [
        Heads(name="heads"),
        Heads(bias="offset", name="heads"),
        Heads("btd,cdf->cbtf", ((2, 6, 5), (2, 1, 1, 5)), name="heads"),
        DenseHeads((2, 4), name="heads"),
    ],
    ids=["heads", "other name", "parts", "subclass"],
)
def test_a_bias_of_several_axes_is_no_second_weight(layer):
    lora, x = LinenLoRA([AdapterSpec(name="law", rank=2, alpha=4)], targets="all-linear"), jnp.ones((3, 5, 6))
    variables = layer.init(jax.random.key(0), x)
    adapters = lora.init(layer, variables, x)  # warns of nothing
    report = lora.report(layer, variables, x)
    assert len(report.adapted) == 1
    assert report.skipped == ()
    adapters = jax.tree.map(lambda leaf: leaf + 0.1, adapters)

    def outputs(params):
        with lora.use(only="law", train=False):
            return layer.apply({"params": params, "LoRAParam": adapters}, x)

    merged = lora.merge(layer, variables, adapters, "law", x)
    np.testing.assert_allclose(layer.apply({"params": merged}, x), outputs(variables["params"]), atol=1e-5)
