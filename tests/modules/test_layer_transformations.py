"""Adapted layers under jax's transformations: gradients of each against formulas in float64, or refused by name."""

import jax
import numpy as np
import pytest
from drawn_models import draw_module
from flax import nnx
from host_arrays import changed, filled, normal, on_device
from jax.sharding import PartitionSpec as P

from lorafusion_jax.errors import RunError
from lorafusion_jax.modules import AdapterSpec, apply_lora, use_adapters

SPECS = [AdapterSpec(name="law", rank=2, alpha=4), AdapterSpec(name="med", rank=3, alpha=3, seed=5)]
TABLE = on_device([0, 1, 1, 0], np.int32)
TOLERANCE = 1e-5  # relative to the largest value, float32: sums in another order


@pytest.fixture(scope="module")
def layer():
    layer = apply_lora(draw_module(lambda: nnx.Linear(8, 6, rngs=nnx.Rngs(0))), SPECS, targets=".*")
    for index, spec in enumerate(SPECS):
        layer.lora_b[...] = changed(layer.lora_b[...], np.s_[index, : spec.rank], normal(index, (spec.rank, 6)))
    return layer


@pytest.fixture(scope="module")
def x():
    return normal(3, (4, 5, 8))


@pytest.fixture(scope="module")
def reference(layer, x):
    """Loss sum(y²)/2 and its gradients of A, B and x, in float64."""
    w, bias, a, b, rows = (
        np.asarray(array, np.float64)
        for array in (layer.kernel[...], layer.bias[...], layer.lora_a[...], layer.lora_b[...], x)
    )
    loss, grads = 0.0, {"lora_a": np.zeros_like(a), "lora_b": np.zeros_like(b), "x": np.zeros_like(rows)}
    for example, k in enumerate(np.asarray(TABLE)):
        row, scale = rows[example], SPECS[k].scale
        y = row @ w + bias + scale * row @ a[k] @ b[k]
        loss += (y**2).sum() / 2
        grads["lora_a"][k] += scale * row.T @ (y @ b[k].T)
        grads["lora_b"][k] += scale * (row @ a[k]).T @ y
        grads["x"][example] = y @ (w + scale * a[k] @ b[k]).T
    return loss, grads


def plain(layer, x):
    with use_adapters(SPECS, TABLE):
        return layer(x)


def mapped(layer, x):
    def apply_one(x, adapter):
        with use_adapters(SPECS, adapter):
            return layer(x)

    return jax.vmap(apply_one)(x, TABLE)


def mapped_inside_one_context(layer, x):
    """The mapped axis is not the examples'."""
    with use_adapters(SPECS, TABLE):
        return jax.vmap(layer, in_axes=1, out_axes=1)(x)


def checkpointed(layer, x):
    graph, state = nnx.split(layer)
    return jax.checkpoint(lambda state, x: plain(nnx.merge(graph, state), x))(state, x)


def scanned(layer, x):
    def step(_, batch):
        x, adapter = batch
        with use_adapters(SPECS, adapter):
            return None, layer(x)

    return jax.lax.scan(step, None, (x, TABLE))[1]


def sharded(layer, x):
    graph, state = nnx.split(layer)
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    def shard(state, x, table):
        with use_adapters(SPECS, table):
            return nnx.merge(graph, state)(x)

    specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": P("data")}
    return jax.shard_map(shard, mesh=mesh, **specs)(state, x, TABLE)


FORMS = (plain, mapped, mapped_inside_one_context, checkpointed, scanned, sharded)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_gradients_are_those_of_the_formula(form, layer, x, reference):
    graph, lora, frozen = nnx.split(layer, nnx.LoRAParam, ...)

    def loss(lora, x, frozen):
        return (form(nnx.merge(graph, lora, frozen), x) ** 2).sum() / 2

    value, (grads, dx) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(lora, x, frozen)
    expected, wanted = reference
    np.testing.assert_allclose(value, expected, rtol=TOLERANCE)
    for name, got in (("lora_a", grads["lora_a"][...]), ("lora_b", grads["lora_b"][...]), ("x", dx)):
        np.testing.assert_allclose(got, wanted[name], rtol=0, atol=TOLERANCE * np.abs(wanted[name]).max(), err_msg=name)


def test_dropout_of_mapped_examples_is_that_of_the_batch_and_is_never_shared(x):
    specs = [AdapterSpec(name="law", rank=2, alpha=4, dropout=0.5)]
    layer = apply_lora(draw_module(lambda: nnx.Linear(8, 6, rngs=nnx.Rngs(0))), specs, targets=".*")
    layer.lora_b[...] = filled(1.0, *layer.lora_b.shape)
    same = on_device(np.broadcast_to(np.asarray(x)[:1], x.shape))

    def mask_of(x, number):
        with use_adapters(specs, only="law", step=3, examples=number):
            return layer(x)

    def masks_of(x):
        with use_adapters(specs, on_device(np.zeros(4, np.int32)), step=3):
            return layer(x)

    rows = jax.jit(jax.vmap(mask_of))(same, on_device(np.arange(4, dtype=np.int32)))
    np.testing.assert_allclose(rows, jax.jit(masks_of)(same), rtol=1e-5, atol=1e-6)
    assert len({row.tobytes() for row in np.asarray(rows)}) == 4

    def careless(x):
        with use_adapters(specs, only="law", step=3):
            return layer(x)

    with pytest.raises(RunError, match=r"lora\.vmap-dropout"):
        jax.vmap(careless)(same)


def test_a_table_of_the_whole_batch_inside_vmap_is_refused_by_name(layer, x):
    with use_adapters(SPECS, TABLE), pytest.raises(RunError, match=r"lora\.table-rows"):
        jax.vmap(layer)(x)


def test_forward_mode_is_refused_by_name(layer, x):
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: plain(layer, x), (x,), (x,))
