"""LinenLoRA.quantize_base: the frozen weights of a Linen model in fewer bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_models import draw_params
from flax import linen as nn
from flax.errors import ScopeParamShapeError
from host_arrays import normal
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lorafusion_jax.errors import ConfigError
from lorafusion_jax.modules import AdapterSpec, LinenLoRA
from lorafusion_jax.modules.stored_weight import StoredWeight
from lorafusion_jax.weights.table import KINDS

SPECS = [AdapterSpec(name="law", rank=2, alpha=4), AdapterSpec(name="med", rank=4, alpha=4, seed=5)]
TABLE = np.array([0, 1, 1, 0])


class Mix(nn.Module):
    """A linear module of a package, with its weight [out, in]."""

    @nn.compact
    def __call__(self, x):
        return jnp.einsum("btd,cd->btc", x, self.param("w", nn.initializers.lecun_normal(), (64, 64)))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.DenseGeneral((2, 32), name="query")(x)
        x = nn.DenseGeneral(64, axis=(-2, -1), name="out")(x)
        x = Mix(name="mix")(nn.relu(nn.Dense(64, name="up")(x)))
        return nn.Dense(3, name="head")(x)


IN_AXES = {"query": 1, "out": 2, "up": 1}  # of a kernel, its first ones
X = normal(0, (4, 5, 64))


@pytest.fixture(scope="module")
def params():
    return draw_params(Net(), X)


@pytest.fixture(scope="module")
def lora():
    return LinenLoRA(SPECS, targets=["query", "mix"], modules=[(Mix, "w")])


@pytest.fixture(scope="module")
def adapters(lora, params):
    drawn = lora.init(Net(), {"params": params}, X)
    for number, name in enumerate(("query", "mix")):  # B is zero at first
        drawn[name]["lora_b"] = normal(number, drawn[name]["lora_b"].shape, 1 / 8)
    return drawn


def rounded(params, kind):
    """The same tree with arrays that have the values of the stored weights."""

    @jax.jit
    def stored(matrix):
        return KINDS[kind].dequantise(KINDS[kind].quantise(matrix), jnp.float32)

    def values(matrix):
        return np.asarray(stored(matrix))

    params = jax.device_get(params)
    tree = {name: dict(layer) for name, layer in params.items()}
    for name, count in IN_AXES.items():
        kernel = params[name]["kernel"]
        tree[name]["kernel"] = values(kernel.reshape(np.prod(kernel.shape[:count]), -1)).reshape(kernel.shape)
    tree["mix"]["w"] = values(params["mix"]["w"].T).T
    return jax.device_put(tree)


def outputs_and_gradients(lora, params, adapters):
    @jax.jit
    def step(adapters, params):
        def loss(adapters):
            with lora.use(TABLE, train=False):
                y = Net().apply({"params": params, "LoRAParam": adapters}, X)
            return (y**2).mean(), y

        return jax.grad(loss, has_aux=True)(adapters)

    return jax.device_get(step(adapters, params))


@pytest.mark.parametrize("kind", ["nf4", pytest.param("int8", marks=pytest.mark.nightly)])
def test_a_stored_base_computes_with_the_stored_values(kind, lora, params, adapters):
    stored = lora.quantize_base(Net(), {"params": params}, kind, X)
    assert isinstance(stored["up"]["kernel"], StoredWeight)  # a layer without adapters
    assert not isinstance(stored["head"]["kernel"], StoredWeight)
    got, want = (outputs_and_gradients(lora, tree, adapters) for tree in (stored, rounded(params, kind)))
    for actual, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(actual, other, rtol=1e-5, atol=1e-6)
    assert np.abs(want[0]["query"]["lora_a"]).max() > 1e-3


def test_adapters_of_a_stored_base_are_those_of_the_base(lora, params):
    stored = lora.quantize_base(Net(), {"params": params}, "int8", X)
    before, after = (lora.init(Net(), {"params": tree}, X) for tree in (params, stored))
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_the_given_parameters_do_not_change(lora, params):
    shapes = jax.tree.map(jnp.shape, params)
    lora.quantize_base(Net(), {"params": params}, "int8", X)
    assert jax.tree.map(jnp.shape, params) == shapes
    assert lora.quantize_base(Net(), {"params": params}, "none", X) is params


def test_weights_on_a_mesh_are_stored_there(lora, params):
    mesh = jax.make_mesh((2,), ("tensor",))
    whole = jax.device_put(jax.device_get(params), NamedSharding(mesh, P()))
    kernel = np.asarray(params["query"]["kernel"])
    whole["query"]["kernel"] = jax.device_put(kernel, NamedSharding(mesh, P(None, "tensor")))
    stored = lora.quantize_base(Net(), {"params": whole}, "nf4", X)["query"]["kernel"]
    assert stored.arrays["codes"].sharding.spec == P("tensor", None)
    assert stored.arrays["first_block"].sharding.spec == P("tensor")


def test_misuse_is_refused_by_name(lora, params, adapters):
    stored = lora.quantize_base(Net(), {"params": params}, "int8", X)
    with pytest.raises(ConfigError) as caught:
        lora.quantize_base(Net(), {"params": stored}, "int8", X)
    assert (caught.value.code, caught.value.where) == ("lora.quantized", "mix")  # the first of the tree
    with pytest.raises(ConfigError) as caught:
        lora.merge(Net(), {"params": stored}, adapters, "law", X)
    assert caught.value.code == "lora.merge-quantized"
    with pytest.raises(ScopeParamShapeError):  # Flax's own: outside of `use` nobody reads stored weights
        Net().apply({"params": stored}, X)
