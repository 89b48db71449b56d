"""What an adapted Linen layer sows and counts, and weights that something else reads than their layer."""

from __future__ import annotations

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_models import draw_params
from flax import linen as nn
from host_arrays import normal

from lorafusion_jax import AdapterSpec, LinenLoRA
from lorafusion_jax.errors import ConfigError

X = normal(3, (4, 5, 6))


class Counting(nn.Module):
    """A projection that sows its output, counts its calls and reads a factor that is no parameter."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.lecun_normal(), (6, 6))
        calls = self.variable("counts", "calls", lambda: jnp.zeros((), jnp.int32))
        if self.is_mutable_collection("counts"):
            calls.value += 1
        y = x @ w * self.variable("factors", "factor", lambda: jnp.full((), 2.0)).value
        self.sow("intermediates", "output", y)
        return y


class Twice(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = Counting(name="layer")
        return layer(jnp.tanh(layer(x)))


class Reader(nn.Module):
    """Reads the kernel of its child as `way` says."""

    way: str

    @nn.compact
    def __call__(self, x):
        up, down = nn.Dense(8, name="up"), nn.Dense(6, name="down")
        y = jnp.tanh(up(x))
        match self.way:
            case "parent":
                return down(y) + y @ up.variables["params"]["kernel"].T
            case "lifted":
                call = nn.remat(lambda module, y: y @ module.variables["params"]["up"]["kernel"].T)
                return down(y) + call(self, y)
            case "penalty":
                return down(y) + jnp.square(up.variables["params"]["kernel"]).sum()
            case "WeightNorm":
                return nn.WeightNorm(nn.Dense(6, name="last"))(y)
            case _:
                return down(y)


def lora_of(model, specs, **options):
    lora = LinenLoRA(specs, targets="all-linear", heads=(), **options)
    params = draw_params(model, X)
    return lora, params, lambda: jax.tree.map(lambda leaf: leaf + 0.1, lora.init(model, {"params": params}, X))


def test_what_an_adapted_layer_sows_and_counts_comes_back():
    model, spec = Twice(), AdapterSpec(name="law", rank=2, alpha=4)
    variables = {
        "params": draw_params(model, X),
        "counts": {"layer": {"calls": jnp.asarray(3)}},
        "factors": {"layer": {"factor": jnp.asarray(2.0)}},
    }
    lora = LinenLoRA([spec], targets="layer", modules=[(Counting, "w")])
    adapters = jax.tree.map(lambda leaf: leaf + 0.1, lora.init(model, variables, X))

    def call(params, **mutable):
        return model.apply({**variables, "params": params, "LoRAParam": adapters}, X, **mutable)

    merged = lora.merge(model, variables, adapters, "law", X)
    wanted, wanted_changes = call(merged, mutable=["counts", "intermediates"])
    with lora.use(only="law", train=False):
        y, changes = call(variables["params"], mutable=["counts", "intermediates"])
        assert jax.tree.structure(changes) == jax.tree.structure(wanted_changes)
        np.testing.assert_allclose(call(variables["params"]), wanted, rtol=1e-5, atol=1e-5)
    assert int(changes["counts"]["layer"]["calls"]) == 5
    for actual, expected in zip(jax.tree.leaves((y, changes)), jax.tree.leaves((wanted, wanted_changes)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("way", "layer"), [("parent", "up"), ("lifted", "up"), ("penalty", "up"), ("WeightNorm", "last")]
)
def test_a_weight_that_something_else_reads_is_named_and_not_merged(way, layer):
    model, specs = Reader(way), [AdapterSpec(name="law", rank=2, alpha=4)]
    lora, params, adapters = lora_of(model, specs)
    with pytest.warns(UserWarning, match=rf"\[lora.uncalled\] something else reads .*: {layer}\. .*exclude="):
        leaves = adapters()
    with pytest.raises(ConfigError, match=rf"read their weights: {layer}\.") as problem:
        lora.merge(model, {"params": params}, leaves, "law", X)
    assert "LinenLoRA.merge(…, allow_uncalled=True)" in problem.value.fix
    merged = lora.merge(model, {"params": params}, leaves, "law", X, allow_uncalled=True)
    assert not np.array_equal(merged[layer]["kernel"], params[layer]["kernel"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the fix works
        lora_of(model, specs, exclude=re.escape(layer))[2]()


def test_a_weight_that_only_its_layer_reads_is_merged():
    model = Reader("")
    lora, params, adapters = lora_of(model, [AdapterSpec(name="law", rank=2, alpha=4)])
    lora.merge(model, {"params": params}, adapters(), "law", X)
