"""quantize_base on weights that lie on a mesh: the results of one device, and only stored bytes are gathered."""

import re
from functools import cache

import jax
import numpy as np
import pytest
from drawn_models import draw_module
from flax import nnx
from host_arrays import filled, normal, on_device
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from more_cases import mostly_nightly

from lorafusion_jax.errors import ConfigError, RunError
from lorafusion_jax.modules import AdapterSpec, apply_lora, quantize_base, use_adapters

SPECS = [AdapterSpec(name="law", rank=4, alpha=8), AdapterSpec(name="med", rank=2, alpha=4)]
TABLE = np.array([0, 1, 1, 0])
MESHES = {  # devices by axis, axis of the examples, axes of the weights
    "tensor": ({"data": 2, "tensor": 2}, "data", {"query": P(None, "tensor"), "down": P("tensor")}),
    "fsdp": (
        {"fsdp": 4},
        "fsdp",
        {"query": P("fsdp"), "down": P(None, "fsdp"), "layers": P(None, None, "fsdp")},
    ),
    "both": (
        {"fsdp": 2, "tensor": 2},
        "fsdp",
        {"query": P("fsdp", "tensor"), "down": P("tensor", "fsdp"), "layers": P(None, "fsdp")},
    ),
}
TYPES = {"explicit": AxisType.Explicit, "automatic": AxisType.Auto}
KINDS = {"nf4": {"u8"}, "int8": {"s8"}, "fp8": {"f8e4m3fn", "f16"}}  # CPUs send 8-bit floats as 16-bit ones
WAYS = [(kind, mesh, axes) for kind in KINDS for mesh in MESHES for axes in TYPES]
HARDEST = [("nf4", "both", "explicit"), ("int8", "fsdp", "automatic")]
A_WEIGHT = 64 * 64  # fewer elements than any device has of a weight, more than of activations and adapters


class Net(nnx.Module):
    """Heads, a layer without adapters, and layers in a scan."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.query, self.down = nnx.LinearGeneral(256, (4, 32), rngs=rngs), nnx.Linear(128, 256, rngs=rngs)
        self.layers = nnx.vmap(lambda rngs: nnx.Linear(256, 256, use_bias=False, rngs=rngs))(rngs.split(2))

    def __call__(self, x):
        y = self.query(x)
        x = x + self.down(y.reshape(*y.shape[:-2], 128))
        return nnx.scan(lambda x, layer: (x + layer(x), None))(x, self.layers)[0]


def adapted():
    model = apply_lora(draw_module(Net), SPECS, targets=("query", "layers"))
    for number, layer in enumerate((model.query, model.layers)):  # B is zero at first
        layer.lora_b[...] = normal(number, layer.lora_b.shape, 1 / 8)
    return model


def placed(model, mesh, specs):
    """The model on a mesh; what `specs` does not name is whole on every device."""

    def put(path, leaf):
        return jax.device_put(leaf, NamedSharding(mesh, specs.get(path[0], P()) if path[-1] == "kernel" else P()))

    graph, state = nnx.split(model)
    return nnx.merge(graph, nnx.map_state(put, state))


def step(model, x, table):
    def loss(model):
        with use_adapters(SPECS, table, train=False):
            y = model(x)
        return (y**2).mean(), y

    (_, y), grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam), has_aux=True)(model)
    return y, grads


def inputs():
    return normal(0, (4, 3, 256)), on_device(TABLE, np.int32)


@cache
def on_one_device(kind):
    return jax.device_get(nnx.jit(step)(quantize_base(adapted(), kind), *inputs()))


def gathered(compiled):
    """(dtype, number of elements) of what the compiled program gathers."""
    heads = re.findall(r"= \(?(\w+)\[([\d,]*)\]\S* all-(?:gather|to-all)(?:-start)?\(", compiled)
    return [(dtype, np.prod([int(size) for size in shape.split(",") if size])) for dtype, shape in heads]


@pytest.mark.parametrize(("kind", "mesh", "axes"), mostly_nightly(WAYS, HARDEST))
def test_a_mesh_changes_no_result_and_gathers_stored_bytes_only(kind, mesh, axes):
    want_y, want = on_one_device(kind)
    sizes, rows, specs = MESHES[mesh]
    grid = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(TYPES[axes],) * len(sizes))
    with jax.set_mesh(grid):
        model = quantize_base(placed(adapted(), grid, specs), kind)
        x, table = (jax.device_put(value, NamedSharding(grid, P(rows))) for value in inputs())
        compiled = nnx.jit(step).lower(model, x, table).compile()
        y, grads = compiled(model, x, table)
    weights = [dtype for dtype, size in gathered(compiled.as_text()) if size >= A_WEIGHT]
    assert set(weights) <= (KINDS[kind] if "fsdp" in sizes else set())
    assert len(weights) <= 5  # of three layers in forward, and again in backward where x has a gradient
    np.testing.assert_allclose(y, want_y, rtol=0, atol=1e-5 * np.abs(want_y).max())
    for actual, other in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(actual, other, rtol=0, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize(
    ("kind", "shape", "spec", "why"),
    [
        ("nf4", (128, 8), P("tensor"), "cuts blocks of 64"),
        ("nf4", (96, 8), P(None, "tensor"), "run over the ends of channels"),
        ("int8", (64, (4, 2)), P(None, None, "tensor"), "no device has neighbouring out features"),
        ("nf4_single", (64, 8), P(), "do not follow the axes of a weight"),
    ],
)
def test_what_a_mesh_cannot_hold_is_refused_by_name(kind, shape, spec, why):
    mesh = jax.make_mesh((4,), ("tensor",)) if kind == "nf4" else jax.make_mesh((2,), ("tensor",))
    model = draw_module(lambda: nnx.Dict(up=nnx.LinearGeneral(*shape, rngs=nnx.Rngs(0))))
    model["up"].kernel = nnx.Param(jax.device_put(np.asarray(model["up"].kernel[...]), NamedSharding(mesh, spec)))
    with pytest.raises(ConfigError, match=why) as caught:
        quantize_base(apply_lora(model, SPECS, targets="up"), kind)
    assert (caught.value.code, caught.value.where) == ("lora.quantize-mesh", "up")
    assert caught.value.fix
    assert isinstance(model["up"].kernel, nnx.Param)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_base_that_was_stored_on_one_device_runs_on_a_mesh_or_says_how(kind):
    model = apply_lora(draw_module(lambda: nnx.Dict(up=nnx.Linear(64, 8, rngs=nnx.Rngs(0)))), SPECS[:1], targets="up")
    x, mesh = filled(1.0, 2, 64), jax.make_mesh((2,), ("data",))
    want = quantize_base(model, kind)["up"](x)
    with jax.set_mesh(mesh):
        moved, x = placed(model, mesh, {}), jax.device_put(x, P("data"))
        if kind == "nf4":
            with pytest.raises(NotImplementedError, match="quantise it where it lies on the mesh"):
                moved["up"](x)
        else:
            np.testing.assert_allclose(moved["up"](x), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["fp8", "nf4"])
def test_a_part_of_a_stored_weight_inside_shard_map_is_refused_by_name(kind):
    make = lambda: nnx.Dict(up=nnx.Linear(64, 8, use_bias=False, rngs=nnx.Rngs(0)))  # noqa: E731
    model = apply_lora(draw_module(make), SPECS[:1], targets="up")
    mesh = jax.make_mesh((2,), ("tensor",))
    with jax.set_mesh(mesh):
        model = quantize_base(placed(model, mesh, {"up": P(None, "tensor")}), kind)
        graph, state = nnx.split(model)
        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, state)

        @jax.shard_map(in_specs=(specs, P()), out_specs=P(None, "tensor"))
        def local(state, x):
            return nnx.merge(graph, state)["up"](x)

        with pytest.raises(RunError, match=r"shard_map") as caught:
            local(state, filled(1.0, 2, 64))
    assert caught.value.code == "lora.quantized-part"


def test_layers_of_a_plain_base_over_fsdp_run_on_explicit_axes():
    """A weight that lies on the axis of the rows is gathered, so its product is split as its rows are."""
    make = lambda: nnx.Dict(up=nnx.Linear(8, 16, use_bias=False, rngs=nnx.Rngs(0)))  # noqa: E731
    model = apply_lora(draw_module(make), SPECS[:1], targets="up")
    x = normal(0, (4, 8))
    want, mesh = model["up"](x), jax.make_mesh((4,), ("fsdp",))
    with jax.set_mesh(mesh):
        y = placed(model, mesh, {"up": P(None, "fsdp")})["up"](jax.device_put(x, P("fsdp")))
    assert y.sharding.spec[0] == "fsdp"
    np.testing.assert_allclose(y, want, rtol=1e-6, atol=1e-6)
