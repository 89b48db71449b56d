"""quantize_base: the frozen weights of one's own NNX model in fewer bytes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_models import draw_module
from flax import nnx
from host_arrays import normal, on_device

from lorafusion_jax.errors import ConfigError
from lorafusion_jax.modules import (
    AdapterSpec,
    apply_lora,
    load_adapter,
    lora_report,
    merge_adapter,
    quantize_base,
    register_linear,
    save_adapter,
    use_adapters,
)
from lorafusion_jax.weights.table import KINDS

LAW = AdapterSpec(name="law", rank=2, alpha=4)
MED = AdapterSpec(name="med", rank=3, alpha=3, seed=5)
SPECS = [LAW, MED]
TABLE = on_device([0, 1, 1, 0], np.int32)


class Tied(nnx.Module):
    """Holds its weight [out, in], as torch does."""

    def __init__(self, in_features, out_features, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (out_features, in_features)) / 8)

    def __call__(self, x):
        return x @ self.w[...].T.astype(x.dtype)


register_linear(Tied, weight="w", equation="...i,oi->...o")


class Net(nnx.Module):
    """A projection of several axes, layers in a scan, a class of one's own, and a layer without adapters."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.query = nnx.LinearGeneral(64, (2, 32), rngs=rngs)
        self.layers = nnx.vmap(lambda rngs: nnx.Linear(64, 64, use_bias=False, rngs=rngs))(rngs.split(3))
        self.tied = Tied(64, 64, rngs)
        self.down = nnx.Linear(64, 96, rngs=rngs)
        self.head = nnx.Linear(96, 4, rngs=rngs)

    def __call__(self, x):
        x = self.query(x).reshape(*x.shape[:-1], 64)
        x = nnx.scan(lambda x, layer: (x + layer(x), None))(x, self.layers)[0]
        return self.head(nnx.relu(self.down(self.tied(x))))


def adapted():
    model = apply_lora(draw_module(Net), SPECS, targets=("query", "layers", "tied"))
    for number, layer in enumerate((model.query, model.layers, model.tied)):  # B is zero at first
        layer.lora_b[...] = normal(number, layer.lora_b.shape, 1 / 8)
    return model


def rounded(model, kind):
    """The same model with arrays that have the values of the stored weights."""

    @jax.jit
    def stored(kernel):
        return KINDS[kind].dequantise(KINDS[kind].quantise(kernel), jnp.float32)

    def values(kernel):
        return np.asarray(stored(kernel))

    query, layers, tied, down = (
        np.asarray(leaf[...], np.float32)
        for leaf in (model.query.kernel, model.layers.kernel, model.tied.w, model.down.kernel)
    )
    model.query.kernel[...] = on_device(values(query.reshape(64, 64)).reshape(64, 2, 32))
    model.layers.kernel[...] = on_device(np.stack([values(kernel) for kernel in layers]))
    model.tied.w[...] = on_device(values(tied.T).T)
    model.down.kernel[...] = on_device(values(down))
    return model


@nnx.jit
def outputs_and_gradients(model, x):
    def loss(model):
        y = model(x)
        return (y**2).mean(), y

    with use_adapters(SPECS, TABLE, train=False):
        (_, y), grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam), has_aux=True)(model)
    return y, grads


@pytest.fixture(scope="module")
def x():
    return normal(0, (4, 3, 64))


@pytest.mark.parametrize("kind", [pytest.param("int8", marks=pytest.mark.nightly), "nf4"])
def test_a_stored_base_computes_with_the_stored_values(kind, x):
    want_y, want = outputs_and_gradients(rounded(adapted(), kind), x)
    y, grads = outputs_and_gradients(quantize_base(adapted(), kind), x)
    np.testing.assert_allclose(y, want_y, rtol=1e-5, atol=1e-6)
    for actual, other in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(actual, other, rtol=1e-5, atol=1e-6)
    assert any(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(grads))


def test_fp8_rounds_rows_as_well(x):
    """A row's rounding to e4m3 errs by 2.6 % of its norm on average, in each of six layers."""
    want_y, _ = outputs_and_gradients(rounded(adapted(), "fp8"), x)
    y, grads = outputs_and_gradients(quantize_base(adapted(), "fp8"), x)
    error = np.linalg.norm(y - want_y) / np.linalg.norm(want_y)
    assert 1e-4 < error < 6 * 0.04
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def saved_for_backward(model, x):
    """Shapes of floating arrays between forward and backward."""
    graph, lora, rest = nnx.split(model, nnx.LoRAParam, ...)

    def saved(lora, rest):
        def run(lora):
            with use_adapters(SPECS, TABLE, train=False):
                return nnx.merge(graph, lora, rest, copy=True)(x)

        return jax.vjp(run, lora)[1]

    leaves = jax.tree.leaves(jax.eval_shape(saved, lora, rest))
    return {leaf.shape for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)}


def test_backward_holds_the_stored_arrays_and_not_the_weights(x):
    weights = {(3, 64, 64), (64, 96)}
    assert weights <= saved_for_backward(adapted(), x)
    assert not weights & saved_for_backward(quantize_base(adapted(), "nf4"), x)


def bytes_of_a_step(kind, layers, width):
    """What a compiled step needs beside its arguments."""
    model = nnx.List([nnx.Linear(width, width, use_bias=False, rngs=nnx.Rngs(layer)) for layer in range(layers)])
    model = quantize_base(apply_lora(model, SPECS, targets="all-linear"), kind)
    graph, lora, rest = nnx.split(model, nnx.LoRAParam, ...)

    def loss(lora, rest, x):
        with use_adapters(SPECS, TABLE, train=False):
            for layer in nnx.merge(graph, lora, rest):
                x = jnp.tanh(layer(x))
        return x.sum()

    x = jax.ShapeDtypeStruct((4, 8, width), jnp.float32)
    return jax.jit(jax.grad(loss)).lower(lora, rest, x).compile().memory_analysis().temp_size_in_bytes


def test_a_compiled_step_turns_back_one_weight_at_a_time():
    layers, width = 6, 256
    most = bytes_of_a_step("none", layers, width) + 2 * 4 * width**2  # two weights in float32
    assert {
        kind: size for kind in ("fp8", "int8", "nf4") if (size := bytes_of_a_step(kind, layers, width)) > most
    } == {}


def test_the_report_says_how_weights_are_stored():
    model = adapted()
    before = lora_report(model)
    report = lora_report(quantize_base(model, "int8"))
    assert {row.path: row.stored for row in report.adapted} == dict.fromkeys(("query", "layers", "tied"), "int8")
    assert {row.path: (row.kind, row.why) for row in report.skipped}["down"] == (
        "Linear",
        "no adapter targets it, int8",
    )
    assert "output head" in {row.path: row.why for row in report.skipped}["head"]
    assert (report.frozen, report.parameters) == (before.frozen, before.parameters)
    assert "3 layers, stacked, int8" in str(report)


def test_adapters_of_a_stored_base_are_saved_and_merged_into_the_original(tmp_path):
    model = quantize_base(adapted(), "nf4")
    file = save_adapter(model, "law", tmp_path)
    with pytest.raises(ConfigError, match="cannot be merged into it without rounding") as caught:
        merge_adapter(model, "law")
    assert caught.value.code == "lora.merge-quantized"
    original = adapted()
    load_adapter(original, "law", file.parent)
    assert isinstance(merge_adapter(original, "law").query, nnx.LinearGeneral)


def test_a_stack_without_adapters_is_stored_too(x):
    def outputs(model):
        with use_adapters([LAW], only="law", train=False):
            return model(x)

    def only_query():
        return apply_lora(draw_module(Net), [LAW], targets=("query",))

    want = nnx.jit(outputs)(rounded(only_query(), "nf4"))
    np.testing.assert_allclose(nnx.jit(outputs)(quantize_base(only_query(), "nf4")), want, rtol=1e-5, atol=1e-6)


def test_layers_of_one_shape_are_converted_by_one_program():
    """A model of 18 layers compiled 126 programs, 40 s."""

    class Twins(nnx.Module):
        def __init__(self):
            self.blocks = nnx.List([nnx.Linear(40, 24, use_bias=False, rngs=nnx.Rngs(i)) for i in range(5)])

    traced = []
    kind = dataclasses.replace(KINDS["nf4"], quantise=lambda kernel: traced.append(1) or KINDS["nf4"].quantise(kernel))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lorafusion_jax.modules.storing.form_of", lambda name, on_mesh: kind)
        quantize_base(apply_lora(draw_module(Twins), SPECS, targets="all-linear"), "nf4")
    assert len(traced) == 1


def test_none_changes_nothing():
    model = adapted()
    assert quantize_base(model, "none") is model
    assert isinstance(model.query.kernel, nnx.Param)


def test_misuse_is_refused_by_name():
    def code(model, kind):
        with pytest.raises(ConfigError) as caught:
            quantize_base(model, kind)
        return caught.value.code

    assert code(draw_module(Net), "nf4") == "lora.quantize-first"
    assert code(quantize_base(adapted(), "nf4"), "nf4") == "lora.quantized"
    assert code(adapted(), "nf5") == "plugin.unknown"
    odd = draw_module(lambda: nnx.Dict(up=nnx.Linear(63, 8, rngs=nnx.Rngs(0))))
    assert code(apply_lora(odd, [LAW], targets="up"), "nf4") == "base.quantize-shape"
