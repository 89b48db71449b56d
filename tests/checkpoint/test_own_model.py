"""Adapters of a model that is not ours, as PEFT folders and orbax checkpoints."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import lorafusion_jax as lf
from lorafusion_jax.errors import CheckpointError, ConfigError
from lorafusion_jax.modules import AdapterSpec, adapter_arrays, apply_lora, only_adapter, put_adapter_arrays

SPECS = [AdapterSpec(name="law", rank=2, alpha=4), AdapterSpec(name="med", rank=3, alpha=3, seed=5)]


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.q_proj = nnx.LinearGeneral(8, (2, 4), rngs=rngs)
        self.o_proj = nnx.LinearGeneral((2, 4), 8, axis=(-2, -1), rngs=rngs)

    def __call__(self, x):
        return x + self.o_proj(self.q_proj(x))


class Net(nnx.Module):
    """Layers in a list with Hugging Face's names, and a stack of layers with names of its own."""

    def __init__(self):
        self.layers = nnx.List([nnx.Dict(attn=Attention(nnx.Rngs(number))) for number in range(2)])

        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def make(rngs):
            return nnx.Linear(8, 8, rngs=rngs)

        self.mix = make(nnx.Rngs(7))

    def __call__(self, x):
        for layer in self.layers:
            x = layer["attn"](x)
        return nnx.scan(lambda x, layer: (x + layer(x), None))(x, self.mix)[0]


@pytest.fixture
def model():
    model = apply_lora(Net(), SPECS, targets="all-linear")
    for number, spec in enumerate(SPECS):
        rng = np.random.default_rng(number)
        arrays = adapter_arrays(model, spec.name)
        put_adapter_arrays(model, spec.name, {key: rng.normal(size=value.shape) for key, value in arrays.items()})
    return model


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        np.testing.assert_array_equal(value, theirs[key], err_msg=key)


def test_a_peft_folder_has_the_names_and_shapes_that_peft_reads(model, tmp_path):
    lf.save_peft(model, "med", tmp_path / "med", base_name="org/base")
    tensors = load_file(tmp_path / "med" / "adapter_model.safetensors")
    key = "base_model.model.model.layers.1.self_attn.o_proj.lora_{}.weight"
    arrays = adapter_arrays(model, "med")
    np.testing.assert_array_equal(tensors[key.format("A")], arrays["layers.1.attn.o_proj.lora_a"].T)
    np.testing.assert_array_equal(tensors[key.format("B")], arrays["layers.1.attn.o_proj.lora_b"].T)
    np.testing.assert_array_equal(tensors["base_model.model.mix.2.lora_A.weight"], arrays["mix.lora_a"][2].T)
    config = json.loads((tmp_path / "med" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (3, 3, "org/base")
    assert config["task_type"] is None  # PEFT asks a model of any named task for more than a user's own has


@pytest.mark.parametrize("keys", [None, lambda path: f"net.{path.replace('.attn.', '.a.')}"])
def test_what_is_saved_as_peft_comes_back(model, tmp_path, keys):
    before, other = adapter_arrays(model, "law"), adapter_arrays(model, "med")
    lf.save_peft(model, "law", tmp_path / "law", keys=keys)
    put_adapter_arrays(model, "law", {key: 0 * value for key, value in before.items()})
    lf.load_peft(model, "law", tmp_path / "law", keys=keys)
    same(adapter_arrays(model, "law"), before)
    same(adapter_arrays(model, "med"), other)


def test_a_folder_that_does_not_fit_changes_nothing(model, tmp_path):
    before = adapter_arrays(model, "med")
    lf.save_peft(model, "law", tmp_path / "law")
    with pytest.raises(CheckpointError, match="rank is 2 there and 3 here"):
        lf.load_peft(model, "med", tmp_path / "law")
    with pytest.raises(CheckpointError, match=r"missing: .*net\.layers"):
        lf.load_peft(model, "law", tmp_path / "law", keys=lambda path: f"net.{path}")
    with pytest.raises(ConfigError, match="one name to several layers"):
        lf.save_peft(model, "law", tmp_path / "other", keys=lambda path: "same")
    with pytest.raises(ConfigError, match=r"no name for layers\.0"):
        lf.save_peft(model, "law", tmp_path / "other", keys={"mix.0": "mix.0"})
    same(adapter_arrays(model, "med"), before)


def test_orbax_keeps_one_adapter_or_all(model, tmp_path):
    before = {spec.name: adapter_arrays(model, spec.name) for spec in SPECS}
    lf.save_checkpoint(model, tmp_path / "all")
    lf.save_checkpoint(model, tmp_path / "law", "law")
    with pytest.raises(ConfigError, match=r"lora\.unknown-adapter"):
        lf.save_checkpoint(model, tmp_path / "nobody", [])
    for name, arrays in before.items():
        put_adapter_arrays(model, name, {key: 0 * value for key, value in arrays.items()})
    lf.load_checkpoint(model, tmp_path / "law", ["law"])
    same(adapter_arrays(model, "law"), before["law"])
    assert not adapter_arrays(model, "med")["mix.lora_a"].any()
    lf.load_checkpoint(model, tmp_path / "all")
    same(adapter_arrays(model, "med"), before["med"])
    with pytest.raises(CheckpointError, match="has no adapter med"):
        lf.load_checkpoint(model, tmp_path / "law")
    with pytest.raises(CheckpointError, match=r"export\.exists"):
        lf.save_checkpoint(model, tmp_path / "all")
    lf.save_peft(model, "law", tmp_path / "peft")
    with pytest.raises(CheckpointError, match=r"lora\.no-file.*(?s:.)*lf\.load_peft"):
        lf.load_checkpoint(model, tmp_path / "peft")
    shutil.rmtree(tmp_path / "law" / "d")
    with pytest.raises(CheckpointError, match=r"lora\.no-file.*or a part of one(?s:.)*its folder d"):
        lf.load_checkpoint(model, tmp_path / "law", ["law"])


def test_one_adapter_is_left_and_computes_what_it_did(model):
    x = jax.random.normal(jax.random.key(0), (4, 5, 8))

    @nnx.jit
    def outputs(model, x):
        with lf.use_adapters(SPECS, only="med"):
            return model(x)

    before = outputs(model, x)
    arrays = adapter_arrays(model, "med")
    only_adapter(model, "med")
    same(adapter_arrays(model, "med"), arrays)
    np.testing.assert_allclose(model(x), before, rtol=1e-5, atol=1e-5)
    assert lf.lora_report(model).parameters.keys() == {"med"}
    assert jnp.shape(model.mix.lora_a[...]) == (3, 1, 8, 3)


def test_a_folder_for_a_multimodal_model_is_loaded_into_its_text_part(model, tmp_path):
    lf.save_peft(model, "law", tmp_path / "law")
    file = tmp_path / "law" / "adapter_model.safetensors"
    tensors = {key.replace(".model.model.layers", ".model.model.language_model.layers"): array
               for key, array in load_file(file).items()}  # fmt: skip
    assert any("language_model" in key for key in tensors)
    save_file(tensors, file)
    (tmp_path / "law" / "SHA256SUMS").unlink(missing_ok=True)
    other = apply_lora(Net(), SPECS, targets="all-linear")
    lf.load_peft(other, "law", tmp_path / "law")
    same(adapter_arrays(other, "law"), adapter_arrays(model, "law"))


@pytest.mark.parametrize("kind", ["lora", "vera"])
def test_layers_may_be_called_as_parts_of_other_adapters_are(kind, tmp_path):
    """A shared matrix, a head and rows of tokens are beside the layers; a layer of such a name is one of them."""
    spec = AdapterSpec(name="law", rank=2, alpha=2 if kind == "vera" else 4, kind=kind)
    layers = {name: nnx.Linear(8, 8, rngs=nnx.Rngs(0)) for name in ("shared", "head", "tokens", "up")}
    model = apply_lora(nnx.Dict(layers), [spec], targets=tuple(layers))
    before = {key: value + 1 for key, value in adapter_arrays(model, "law").items()}
    put_adapter_arrays(model, "law", before)
    lf.save_peft(model, "law", tmp_path / "law")
    keys = load_file(tmp_path / "law" / "adapter_model.safetensors").keys()
    assert set(layers) <= {key.removeprefix("base_model.model.").partition(".")[0] for key in keys}
    put_adapter_arrays(model, "law", {key: 0 * value for key, value in before.items()})
    lf.load_peft(model, "law", tmp_path / "law")
    same(adapter_arrays(model, "law"), before)


def test_a_layer_called_head_is_folded_as_the_others_are(tmp_path):
    """PiSSA is written as LoRA of twice its rank."""
    spec = AdapterSpec(name="law", rank=2, alpha=4, kind="pissa")
    layers = {name: nnx.Linear(8, 8, rngs=nnx.Rngs(0)) for name in ("head", "up")}
    lf.save_peft(apply_lora(nnx.Dict(layers), [spec], targets=tuple(layers)), "law", tmp_path / "law")
    tensors = load_file(tmp_path / "law" / "adapter_model.safetensors")
    assert {tensor.shape for tensor in tensors.values()} == {(4, 8), (8, 4)}
