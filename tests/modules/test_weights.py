"""Adapters of a caller's own model, to files and back and into the frozen weights."""

import dataclasses

import jax
import numpy as np
import pytest
from drawn_models import draw_module
from flax import nnx
from host_arrays import normal
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lorafusion_jax import load_checkpoint, save_checkpoint
from lorafusion_jax.errors import CheckpointError, ConfigError
from lorafusion_jax.modules import (
    AdapterSpec,
    adapter_arrays,
    apply_lora,
    load_adapter,
    lora_report,
    merge_adapter,
    only_adapter,
    put_adapter_arrays,
    save_adapter,
    unmerge_adapter,
    use_adapters,
)

SPECS = [AdapterSpec(name="law", rank=2, alpha=4), AdapterSpec(name="med", rank=3, alpha=3, seed=5)]


class Net(nnx.Module):
    def __init__(self):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def make(rngs):
            return nnx.Linear(8, 8, rngs=rngs)

        self.layers = make(nnx.Rngs(0))
        self.attn = nnx.MultiHeadAttention(num_heads=2, in_features=8, decode=False, rngs=nnx.Rngs(1))
        self.head = nnx.Linear(8, 3, rngs=nnx.Rngs(2))

    def __call__(self, x):
        @nnx.scan
        def run(x, layer):
            return x + layer(x), None

        return self.head(self.attn(run(x, self.layers)[0]))


@pytest.fixture
def model():
    model = apply_lora(draw_module(Net), SPECS, targets="all-linear")
    for number, name in enumerate(("law", "med")):
        arrays = adapter_arrays(model, name)
        rng = np.random.default_rng(number)
        put_adapter_arrays(model, name, {key: rng.normal(size=value.shape) for key, value in arrays.items()})
    return model


@pytest.fixture(scope="module")
def x():
    return normal(0, (4, 5, 8))


def outputs(model, x, name):
    @nnx.jit
    def forward(model, x):
        with use_adapters(SPECS, only=name):
            return model(x)

    return np.asarray(forward(model, x))


@pytest.mark.parametrize("name", ["law", "med"])
def test_merged_computes_what_the_adapter_did(model, x, name):
    expected = outputs(model, x, name)
    merged = merge_adapter(model, name)
    assert not jax.tree.leaves(nnx.state(merged, nnx.LoRAParam))
    assert type(merged.attn.out) is nnx.LinearGeneral
    assert not lora_report(merged).adapted
    got = nnx.jit(lambda model, x: model(x))(merged, x)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)  # sums in another order in five layers


def test_merging_a_copy_keeps_the_adapters(model, x):
    before = outputs(model, x, "law")
    merge_adapter(nnx.clone(model), "law")
    np.testing.assert_array_equal(outputs(model, x, "law"), before)


def test_saved_and_loaded_is_the_same_and_touches_no_other_adapter(model, x, tmp_path):
    law, med = (outputs(model, x, name) for name in ("law", "med"))
    save_adapter(model, "law", tmp_path / "law")
    fresh = apply_lora(draw_module(Net), SPECS, targets="all-linear")
    untouched = adapter_arrays(fresh, "med")
    load_adapter(fresh, "law", tmp_path / "law")
    np.testing.assert_array_equal(outputs(fresh, x, "law"), law)
    for key, value in adapter_arrays(fresh, "med").items():
        np.testing.assert_array_equal(value, untouched[key])
    assert (outputs(fresh, x, "med") != med).any()


def test_tensors_have_the_adapters_own_rank(model):
    arrays = adapter_arrays(model, "law")
    assert arrays["layers.lora_a"].shape == (3, 8, 2)
    assert arrays["attn.out.lora_b"].shape == (2, 8)
    assert sum(value.size for value in arrays.values()) == lora_report(model).parameters["law"]


def test_what_does_not_fit_changes_nothing(model, x, tmp_path):
    before = outputs(model, x, "med")
    save_adapter(model, "law", tmp_path / "law")
    with pytest.raises(CheckpointError, match="has shape"):
        load_adapter(model, "med", tmp_path / "law")
    np.testing.assert_array_equal(outputs(model, x, "med"), before)
    with pytest.raises(CheckpointError, match="no saved adapter"):
        load_adapter(model, "med", tmp_path)
    with pytest.raises(ConfigError, match=r"one of \[law, med\]"):
        merge_adapter(model, "lay")
    assert np.isfinite(model.layers.kernel[...]).all()


def test_a_merge_that_keeps_is_taken_back_bit_for_bit(model, x):
    before = {name: outputs(model, x, name) for name in ("law", "med")}
    weights = nnx.to_pure_dict(nnx.state(model))
    merged = nnx.jit(lambda model, x: model(x))(merge_adapter(model, "law", keep=True), x)
    np.testing.assert_allclose(merged, before["law"], rtol=1e-4, atol=1e-4)
    assert {row.kind for row in lora_report(model).adapted} == {"Linear", "LinearGeneral"}
    assert adapter_arrays(model, "med")  # the adapters are still there to be saved
    with pytest.raises(ConfigError, match=r"lora\.merged"):
        merge_adapter(model, "med")
    again = nnx.to_pure_dict(nnx.state(unmerge_adapter(model)))
    assert jax.tree.structure(again) == jax.tree.structure(weights)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(weights), strict=True))
    np.testing.assert_array_equal(outputs(model, x, "med"), before["med"])
    with pytest.raises(ConfigError, match=r"lora\.not-merged"):
        unmerge_adapter(model)


@pytest.mark.parametrize("change", [{"alpha": 8}, {"rslora": True}])
@pytest.mark.parametrize("form", ["safetensors", "orbax"])
def test_a_file_of_another_scale_is_refused_as_it_is_another_function(model, tmp_path, form, change):
    law = dataclasses.replace(SPECS[0], **change)
    other = apply_lora(draw_module(Net), [law, SPECS[1]], targets="all-linear")
    before = {name: adapter_arrays(other, name) for name in ("law", "med")}
    save, load = (save_adapter, load_adapter) if form == "safetensors" else (save_checkpoint, load_checkpoint)
    save(model, "law", tmp_path / "law") if form == "safetensors" else save(model, tmp_path / "law", ["med", "law"])
    with pytest.raises(CheckpointError, match=f"scale is 2, not {law.scale:g}"):
        load(other, "law", tmp_path / "law") if form == "safetensors" else load(other, tmp_path / "law", ["med", "law"])
    for name, arrays in before.items():
        for key, value in adapter_arrays(other, name).items():
            np.testing.assert_array_equal(value, arrays[key])


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_what_is_loaded_merged_or_left_stays_where_the_model_lies_without_a_mesh_set(tmp_path, axis_type):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type,) * 2, devices=jax.devices()[:4])

    def split(array):
        axes = [None] * (array.ndim - 1) + ["model"] if array.ndim and array.shape[-1] % 2 == 0 else []
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))

    model = apply_lora(nnx.Dict(up=nnx.Linear(8, 6, rngs=nnx.Rngs(0))), SPECS, targets="up")
    save_adapter(model, "law", tmp_path / "law")
    save_checkpoint(model, tmp_path / "all")
    nnx.update(model, jax.tree.map(split, nnx.state(model)))
    places = lambda model: [array.sharding for array in jax.tree.leaves(nnx.state(model))]  # noqa: E731
    before, up = places(model), model["up"]
    kernel, lora_b = up.kernel[...].sharding, up.lora_b[...].sharding
    load_adapter(model, "law", tmp_path / "law")
    load_checkpoint(model, tmp_path / "all")
    assert places(model) == before
    merged = merge_adapter(nnx.clone(model), "med")
    assert merged["up"].kernel[...].sharding == kernel
    left = only_adapter(model, "med")["up"]
    assert left.lora_b[...].sharding == lora_b
    assert left.lora_a[...].sharding.mesh == mesh
