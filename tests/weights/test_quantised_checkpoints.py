"""Checkpoints that come quantised, next to what their own libraries read; `make_checkpoints_golden.py` wrote them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from benchmarks.saved_model import load_decoder, load_frozen
from lorafusion_jax.checkpoint.base_weights import weight_problems
from lorafusion_jax.errors import CheckpointError, ConfigError
from lorafusion_jax.models.checkpoint import list_tensors
from lorafusion_jax.weights.table import stored_kind

GOLDEN = Path(__file__).parent / "golden" / "checkpoints"
KINDS = {
    "nf4": "nf4", "nf4_single": "nf4_single", "int8": "int8", "fp8_channels": "fp8", "fp8_tensors": "fp8",
    "fp8_blocks": "fp8_blocks",
}  # fmt: skip
DOWN = "layers.0.mlp.down_proj.kernel"


def kernel(frozen, name, kind, dtype=jnp.float32):
    return stored_kind(kind).dequantise(frozen[name], dtype)


@pytest.fixture
def copy(tmp_path):
    def of(name: str, change):
        folder = tmp_path / name
        shutil.copytree(GOLDEN / name, folder)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return of


@pytest.mark.parametrize("name", KINDS)
def test_the_values_are_those_of_the_library_that_wrote_them(name):
    """Bitwise; bitsandbytes multiplies int8 by its scale first and divides then, which is one more rounding."""
    frozen = load_frozen(GOLDEN / name, dtype=jnp.float32, quantize=KINDS[name])
    wanted = np.load(GOLDEN / name / "values.npz")["mlp.down_proj"]
    weights = np.asarray(kernel(frozen, DOWN, KINDS[name])).T
    if name == "int8":
        np.testing.assert_allclose(weights, wanted, rtol=2**-23, atol=0)
    else:
        np.testing.assert_array_equal(weights, wanted)


@pytest.mark.parametrize("name", KINDS)
def test_each_device_gets_its_part(name):
    """Of three or two axes that divide, as `mesh.fsdp` splits them."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("fsdp",))

    def sharding_of(leaf, shape):
        split = next((axis for axis, size in enumerate(shape) if size % 2 == 0), None) if len(shape) > 1 else None
        return NamedSharding(mesh, PartitionSpec(*("fsdp" if axis == split else None for axis in range(len(shape)))))

    whole = load_frozen(GOLDEN / name, quantize=KINDS[name])
    split = load_frozen(GOLDEN / name, quantize=KINDS[name], sharding=sharding_of)
    assert split[DOWN].keys() == whole[DOWN].keys()
    for key, array in split[DOWN].items():
        np.testing.assert_array_equal(array, whole[DOWN][key])
        assert array.sharding.is_equivalent_to(sharding_of(DOWN, array.shape), array.ndim)


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_another_kind_than_the_checkpoints_is_refused(quantize):
    with pytest.raises(ConfigError, match="comes quantised as nf4") as caught:
        load_frozen(GOLDEN / "nf4", quantize=quantize)
    assert "base.quantize: nf4" in caught.value.fix
    with pytest.raises(ConfigError):
        load_decoder(GOLDEN / "nf4")


def test_8_bit_floats_with_the_names_of_mistral_are_the_same(tmp_path):
    """transformers writes them so, with `weight_block_size: null`."""
    folder = tmp_path / "renamed"
    shutil.copytree(GOLDEN / "fp8_tensors", folder)
    content = (folder / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    renamed = {}
    for name, entry in json.loads(content[8:begin]).items():
        is_scale = name.endswith(".weight_scale")
        renamed[f"{name}_inv" if is_scale else name] = entry | ({"shape": []} if is_scale else {})
    size = len(content) - begin
    of_rows = {"dtype": "F32", "shape": [], "data_offsets": [size, size + 4]}
    header = json.dumps(renamed | {"model.layers.0.mlp.up_proj.activation_scale": of_rows}).encode()
    length = len(header).to_bytes(8, "little")
    (folder / "model.safetensors").write_bytes(length + header + content[begin:] + bytes(4))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    (folder / "config.json").write_text(json.dumps(config))
    chex.assert_trees_all_equal(
        load_frozen(folder, quantize="fp8"), load_frozen(GOLDEN / "fp8_tensors", quantize="fp8")
    )


def test_kernels_that_were_left_out_are_named(copy):
    def widen(tensors):
        for name in [name for name in tensors if "up_proj" in name]:
            del tensors[name]
        tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((320, 64), ml_dtypes.bfloat16)

    with pytest.raises(CheckpointError) as caught:
        load_frozen(copy("int8", widen), quantize="int8")
    assert "not quantised: model.layers.0.mlp.up_proj.weight is BF16" in str(caught.value)
    assert "missing: model.layers.0.mlp.up_proj.SCB [320]" in str(caught.value)
    assert caught.value.fix == "base.model: the model that it was made of, with base.quantize"


def test_blocks_of_another_size_are_refused(copy):
    state = "model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4"

    def change(tensors):
        fields = json.loads(tensors[state].tobytes()) | {"blocksize": 128}
        tensors[state] = np.frombuffer(json.dumps(fields).encode(), np.uint8)

    with pytest.raises(CheckpointError, match="its blocksize is 128, not 64") as caught:
        load_frozen(copy("nf4", change), quantize="nf4")
    assert caught.value.code == "model.quantised-otherwise"


@pytest.mark.parametrize("state", [b"{", b"[]", b"\xff", b'{"quant_type": "nf4"}'])
def test_a_broken_state_is_an_error(copy, state):
    name = "model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4"

    def change(tensors):
        tensors[name] = np.frombuffer(state, np.uint8)

    with pytest.raises(CheckpointError, match=r"model\.quantised-otherwise"):
        load_frozen(copy("nf4", change), quantize="nf4")


def test_a_nan_among_8_bit_floats_is_found(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / "fp8_blocks", folder)
    assert weight_problems(folder) == []
    entry = list_tensors(folder)["model.layers.0.mlp.up_proj.weight"]
    with entry.file.open("r+b") as file:
        file.seek(entry.start + 5)
        file.write(b"\xff")
    (problem,) = weight_problems(folder)
    assert problem.code == "model.not-finite"
