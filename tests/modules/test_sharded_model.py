"""A model of two layers with LoRA, whole on one device and split over data and tensor devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from more_cases import nightly

from lorafusion_jax.modules import AdapterSpec, LoRAContext, apply_lora, use_adapters

ADAPTERS = [AdapterSpec(name="law", rank=4, alpha=8), AdapterSpec(name="med", rank=2, alpha=4)]
SPECS = {("gate", "kernel"): P(None, "tensor"), ("down", "kernel"): P("tensor", None)}


class Block(nnx.Module):
    def __init__(self, rngs):
        self.gate, self.down = nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x):
        mesh = jax.sharding.get_abstract_mesh()  # on explicit axes, this sum over devices needs an output sharding
        y = P("data") if AxisType.Explicit in mesh.axis_types else None
        return x + self.down(nnx.gelu(self.gate(x)), out_sharding=y)


class Chain(nnx.Module):
    def __init__(self, layers, width):
        self.layers = nnx.List([nnx.Linear(width, width, use_bias=False, rngs=nnx.Rngs(i)) for i in range(layers)])

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def loss_and_gradients(mesh):
    graph, lora, frozen = nnx.split(apply_lora(Block(nnx.Rngs(0)), ADAPTERS, targets="all-linear"), nnx.LoRAParam, ...)
    lora = jax.tree.map(lambda leaf: leaf + 0.1, lora)  # B is not zero: every gradient counts
    x, table = jax.random.normal(jax.random.key(1), (8, 4, 16)), jnp.array([0, 1, 1, 0] * 2)
    if mesh is not None:
        on = lambda spec: NamedSharding(mesh, spec)  # noqa: E731
        frozen = nnx.map_state(lambda path, leaf: jax.device_put(leaf, on(SPECS.get(path, P()))), frozen)
        lora, x, table = (jax.device_put(v, on(s)) for v, s in ((lora, P()), (x, P("data")), (table, P("data"))))

    @jax.jit
    def step(lora, frozen, x, table):
        def loss(lora):
            with use_adapters(LoRAContext.of(ADAPTERS, table)):
                return (nnx.merge(graph, lora, frozen)(x) ** 2).mean()

        return jax.value_and_grad(loss)(lora)

    return jax.device_get(step(lora, frozen, x, table))


@pytest.mark.parametrize("kind", [AxisType.Explicit, nightly(AxisType.Auto)])
def test_a_sharded_model_trains_as_on_one_device(kind):
    want_loss, want = loss_and_gradients(None)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        loss, gradients = loss_and_gradients(mesh)
    assert abs(loss - want_loss) < 1e-6 * want_loss
    for actual, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(want), strict=True):
        assert np.abs(actual - other).max() < 1e-5 * np.abs(other).max()


def test_a_step_over_fsdp_keeps_no_gathered_weight_for_backward():
    layers, width = 3, 64
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Explicit,))
    on = lambda spec: NamedSharding(mesh, spec)  # noqa: E731
    with jax.set_mesh(mesh):
        model = Chain(layers, width)
        for layer in model.layers:
            layer.kernel = nnx.Param(jax.device_put(layer.kernel[...], on(P("fsdp"))))
        graph, lora, frozen = nnx.split(apply_lora(model, ADAPTERS, targets="all-linear"), nnx.LoRAParam, ...)
        x = jax.ShapeDtypeStruct((8, 4, width), jnp.float32, sharding=on(P("fsdp")))
        table = jax.ShapeDtypeStruct((8,), jnp.int32, sharding=on(P("fsdp")))

        def loss(lora, frozen, x, table):
            with use_adapters(LoRAContext.of(ADAPTERS, table)):
                return (nnx.merge(graph, lora, frozen)(x) ** 2).mean()

        text = jax.jit(jax.grad(loss)).lower(lora, frozen, x, table).compile().as_text()
    gathers = re.findall(rf"= f32\[{width},{width}\]\S* all-gather\(", text)
    assert len(gathers) == 2 * layers - 1  # in both passes, but for the first layer, whose x needs no gradient
