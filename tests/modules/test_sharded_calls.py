"""Layers that are called with `out_sharding=`, as models for explicit meshes are: x and W move as without LoRA."""

import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import H200, num_kernels
from drawn_models import draw_module
from flax import nnx
from host_arrays import filled, normal, on_device
from jax.sharding import AbstractMesh, AxisType, use_abstract_mesh
from jax.sharding import PartitionSpec as P
from more_cases import mostly_nightly

from lorafusion_jax.errors import ConfigError
from lorafusion_jax.modules import AdapterSpec, apply_lora, merge_adapter, register_linear, use_adapters

SPECS = [AdapterSpec(name="law", rank=4, alpha=8), AdapterSpec(name="med", rank=2, alpha=4)]
TABLE = on_device([0, 1, 1, 0, 0, 1, 0, 1], np.int32)
D, F, HEADS, C = 32, 48, 4, 12
MOVED = re.compile(r"= \w+\[([\d,]+)\]\S* (all-gather|collective-permute|all-to-all)")


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Mesh axes of the rows and of a layer's features; None: whole."""

    rows: str | None = None
    features: str | None = None

    def __call__(self, *words):
        spec = P(*({"rows": self.rows, "features": self.features}.get(word) for word in words))
        return None if self == ALONE else spec


ALONE = Axes()
LAYOUTS = {
    "fsdp": Axes(rows="fsdp"),
    "tensor": Axes(features="tp"),
    "fsdp and tensor": Axes(rows="fsdp", features="tp"),
}


class Matrix(nnx.Module):
    """A linear class of a package, which says at its call how its output is split."""

    def __init__(self, shape, spec, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), shape) * shape[0] ** -0.5, out_sharding=spec)

    def __call__(self, x, *, out_sharding=None):
        return jnp.matmul(x, self.w[...], out_sharding=out_sharding)


register_linear(Matrix, weight="w", equation="btd,df->btf")


class Block(nnx.Module):
    """Attention and a gated MLP. Activations are split over their features between layers, as Bonsai's are."""

    def __init__(self, axes, rngs):
        self.axes = axes
        heads = {"kernel_metadata": {"out_sharding": axes("rows", "features", None)}, "rngs": rngs}
        self.query = nnx.Einsum("btd,dhc->bthc", (D, HEADS, C), **heads)
        self.value = nnx.LinearGeneral(D, (HEADS, C), use_bias=False, **heads)
        back = {"kernel_metadata": {"out_sharding": axes("features", None, "rows")}, "rngs": rngs}
        self.out = nnx.Einsum("bthc,hcd->btd", (HEADS, C, D), **back)
        self.up = nnx.Linear(D, F, rngs=rngs, kernel_metadata={"out_sharding": axes("rows", "features")},
                             bias_metadata={"out_sharding": axes("features")})  # fmt: skip
        self.down = Matrix((F, D), axes("features", "rows"), rngs)

    def __call__(self, x):
        by_head, by_feature = self.axes("rows", None, "features", None), self.axes("rows", None, "features")
        q, v = self.query(x, out_sharding=by_head), self.value(x, out_sharding=by_head)
        weights = jax.nn.softmax(jnp.einsum("bthc,bshc->bhts", q, q) * C**-0.5)
        x = x + self.out(jnp.einsum("bhts,bshc->bthc", weights, v), out_sharding=by_feature)
        return x + self.down(nnx.gelu(self.up(x, out_sharding=by_feature)), out_sharding=by_feature)


class Probe(nnx.Variable):
    """A trainable input, so that the model without LoRA has a backward pass."""


class Net(nnx.Module):
    def __init__(self, axes, rngs):
        self.axes = axes
        self.probe = Probe(jnp.zeros(D))
        self.blocks = nnx.List([Block(axes, rngs)])

    def __call__(self, x):
        x = x + self.probe[...]
        for block in self.blocks:
            x = block(x)
        return x


def inputs(axes):
    return jax.device_put(np.asarray(normal(1, (8, 6, D))), axes("rows", None, "features"))


def with_adapters(model):
    model = apply_lora(model, SPECS, targets="all-linear")
    for number, (_, layer) in enumerate(nnx.iter_modules(model)):
        if hasattr(layer, "lora_plan"):
            b = np.array(normal(number, layer.lora_b.shape, 0.1))
            b[1, 2:] = 0
            layer.lora_b[...] = jax.device_put(b, layer.lora_b[...].sharding)
    return model


def step_of(specs, wrt):
    @nnx.jit
    def step(model, x, table):
        def loss(model):
            if specs is None:
                return jnp.mean(model(x) ** 2)
            with use_adapters(specs, table):
                return jnp.mean(model(x) ** 2)

        return nnx.value_and_grad(loss, argnums=nnx.DiffState(0, wrt))(model)

    return step


@pytest.fixture(scope="module")
def reference():
    model = with_adapters(draw_module(lambda: Net(ALONE, nnx.Rngs(0))))
    return jax.device_get(step_of(SPECS, nnx.LoRAParam)(model, inputs(ALONE), TABLE))


@pytest.fixture(params=mostly_nightly(LAYOUTS, ["fsdp and tensor"]))  # it splits both ways
def axes(request):
    """An explicit mesh in scope."""
    with jax.set_mesh(jax.make_mesh((2, 2), ("fsdp", "tp"), devices=jax.devices()[:4])):
        yield LAYOUTS[request.param]


def received(program):
    """Elements of x and W that a device gets from another one: by a gather over two devices, or piece by piece.

    Tensors of LoRA itself are smaller than the least part of an activation or a weight.
    """
    moved = [(kind, np.prod([int(size) for size in dims.split(",")])) for dims, kind in MOVED.findall(program)]
    return sum(size // (2 if kind == "all-gather" else 1) for kind, size in moved if size >= D * F // 2)


def test_a_model_for_an_explicit_mesh_trains_as_on_one_device_and_moves_no_more_than_without_lora(reference, axes):
    model, x = draw_module(lambda: Net(axes, nnx.Rngs(0))), inputs(axes)
    without = step_of(None, Probe).lower(model, x, TABLE).compile().as_text()
    model = with_adapters(model)
    compiled = (step := step_of(SPECS, nnx.LoRAParam)).lower(model, x, TABLE).compile().as_text()
    assert 0 < received(compiled) <= received(without)
    # the products of a row-parallel layer leave each device its part of the sum
    assert ("reduce-scatter(" in compiled) == (axes.features is not None)
    loss, gradients = step(model, x, TABLE)
    want_loss, want = reference
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)  # sums in another order
    for ours, theirs in zip(jax.tree.leaves(gradients), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.nightly  # eight seconds for ten kernels of Mosaic
def test_the_same_model_is_lowered_for_cuda(monkeypatch):
    """In bfloat16 and at a width that kernels are for, each layer has Mosaic's products forward and backward."""
    for name, size in {"D": 2048, "F": 4096, "HEADS": 16, "C": 128}.items():
        monkeypatch.setitem(globals(), name, size)
    explicit, axes = (AxisType.Explicit, AxisType.Explicit), LAYOUTS["fsdp and tensor"]
    mesh = AbstractMesh((2, 2), ("fsdp", "tp"), axis_types=explicit, abstract_device=H200)
    with use_abstract_mesh(mesh):
        model = nnx.eval_shape(lambda: apply_lora(Net(axes, nnx.Rngs(0)), SPECS, targets="all-linear"))
        graph, state = nnx.split(model)
        state = jax.tree.map(lambda leaf: in_bfloat16(leaf) if leaf.dtype == jnp.float32 else leaf, state)
        spec = jax.NamedSharding(mesh, axes("rows", None, "features"))
        x = jax.ShapeDtypeStruct((8, 1024, D), jnp.bfloat16, sharding=spec)

        def loss(state, x):
            with use_adapters(SPECS, TABLE):
                return jnp.mean(nnx.merge(graph, state)(x) ** 2)

        traced = jax.jit(jax.grad(loss, allow_int=True)).trace(state, x)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    _, mosaic = num_kernels(text)
    assert mosaic == 2 * 5
    assert text.count("manual_computation") == 2 * 5  # each layer computes what a device has


def in_bfloat16(leaf):
    return jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=leaf.sharding)


def test_a_merged_model_on_a_mesh_computes_what_its_adapter_computes(axes):
    model, x = with_adapters(draw_module(lambda: Net(axes, nnx.Rngs(0)))), inputs(axes)

    @nnx.jit
    def adapted(model, x):
        with use_adapters(SPECS, only="med"):
            return model(x)

    y = adapted(model, x)
    merged = merge_adapter(model, "med")
    assert merged.blocks[0].down.w.get_value().sharding.spec == axes("features", "rows")
    np.testing.assert_allclose(nnx.jit(lambda model, x: model(x))(merged, x), y, rtol=0, atol=1e-5 * np.abs(y).max())


def test_a_layer_gives_the_sharding_that_its_call_asks_for():
    """A replicated result, rows split by positions, and a sum that is split over them: weights of all kinds."""
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    with jax.set_mesh(mesh):
        layer = draw_module(lambda: nnx.Linear(D, F, rngs=nnx.Rngs(0)))
        plain = normal(2, (8, 4, D))
        alone = with_adapters(nnx.Dict(up=nnx.clone(layer)))
        with use_adapters(SPECS, TABLE):
            want = np.asarray(alone.up(plain)) + 1
        for kernel, bias, x_spec, y_spec in (
            (P(None, "model"), P(), P("data"), P("data")),
            (P("model"), P(), P("data", None, "model"), P("data", "model", None)),
            (P("data", "model"), P("model"), P("data", "model"), P("data", None, "model")),
            (P("model", "data"), P(), P(None, None, "model"), P(("data", "model"))),
        ):
            model = nnx.Dict(up=nnx.clone(layer))
            model.up.kernel = nnx.Param(jax.device_put(np.asarray(layer.kernel[...]), kernel))
            model.up.bias = nnx.Param(jax.device_put(np.asarray(layer.bias[...]) + 1, bias))
            model, x = with_adapters(model), jax.device_put(np.asarray(plain), x_spec)

            @jax.jit
            def call(x, model=model, y_spec=y_spec):
                with use_adapters(SPECS, TABLE):
                    return model.up(x, out_sharding=y_spec)

            y = call(x)
            assert y.sharding.is_equivalent_to(jax.NamedSharding(mesh, y_spec), 3)
            np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_kept_is_refused_by_name():
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"))):
        heads = nnx.Einsum("btd,dhc->bthc", (D, HEADS, C), kernel_metadata={"out_sharding": P(None, None, "model")},
                           rngs=nnx.Rngs(0))  # fmt: skip
        model = with_adapters(nnx.Dict(query=heads))
        x = jax.device_put(filled(1.0, 8, 6, D), P("data"))
        with use_adapters(SPECS, TABLE), pytest.raises(ConfigError, match=r"no device has neighbouring out features"):
            model.query(x)
