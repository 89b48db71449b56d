"""Loading Hugging Face directories: sharding, and invalid directories."""

import dataclasses
import json
import shutil
import tracemalloc

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import GOLDEN, golden
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from benchmarks.saved_model import load_decoder, load_frozen, save_decoder
from lorafusion_jax.checkpoint.base_weights import header_problems
from lorafusion_jax.errors import CheckpointError, ErrorList
from lorafusion_jax.models import Decoder, ModelConfig, Segments, loading

TIED, PLAIN = golden("qwen2_tied"), golden("llama2")


def leaves(model) -> dict[str, np.ndarray]:
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(model))}


@pytest.fixture
def model_dir(tmp_path):
    shutil.copytree(PLAIN, tmp_path / "model", ignore=shutil.ignore_patterns("expected*"))
    return tmp_path / "model"


def change_tensors(model_dir, change) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    change(tensors)
    save_file(tensors, model_dir / "model.safetensors")


def test_kernels_are_transposed_and_tables_are_not():
    stored = load_file(PLAIN / "model.safetensors")
    loaded = leaves(load_decoder(PLAIN, dtype=jnp.float32))
    np.testing.assert_array_equal(loaded["layers.1.mlp.up_proj.kernel"], stored["model.layers.1.mlp.up_proj.weight"].T)
    np.testing.assert_array_equal(loaded["lm_head.weight"], stored["lm_head.weight"])
    assert len(loaded) == len(stored)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_weights_of_accelerators_are_those_of_the_host(dtype, monkeypatch):
    """An accelerator turns and rounds matrices by compiled programs, the host by numpy."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("rows",))

    def rule(name, shape):
        return NamedSharding(mesh, PartitionSpec("rows") if len(shape) == 2 else PartitionSpec())

    on_host = load_frozen(PLAIN, dtype=dtype, sharding=rule)
    monkeypatch.setattr(loading, "on_host", lambda sharding: False)
    chex.assert_trees_all_equal(load_frozen(PLAIN, dtype=dtype, sharding=rule), on_host)


def test_tied_head_is_the_embedding():
    model = load_decoder(TIED, dtype=jnp.float32)
    np.testing.assert_array_equal(model.head(), model.embed_tokens.weight[...].T)


def test_each_device_reads_and_holds_its_part(monkeypatch):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("rows", "columns"))
    read_slice, most = loading.read_slice, {}

    def watched(stored, name, index):
        part = read_slice(stored, name, index)
        most[name] = max(most.get(name, 0), part.size)
        return part

    def rule(name, shape):
        split = ("rows", "columns") if name.endswith("kernel") else ("rows", None) if name.startswith("embed") else ()
        return NamedSharding(mesh, PartitionSpec(*[None] * (len(shape) - 2), *split))

    alone = load_frozen(PLAIN, dtype=jnp.float32)
    monkeypatch.setattr(loading, "read_slice", watched)
    spread = load_frozen(PLAIN, dtype=jnp.float32, sharding=rule)
    for name, wanted in alone.items():
        assert spread[name].sharding.is_equivalent_to(rule(name, wanted.shape), wanted.ndim), name
        np.testing.assert_array_equal(spread[name], wanted, err_msg=name)
    assert most["model.layers.1.mlp.up_proj.weight"] == 16 * 24 // 4, "a device read more than its part"
    assert most["model.embed_tokens.weight"] == 48 * 16 // 2, "a device read more than its part"


def test_shards_are_read_as_one_file_is(tmp_path):
    chex.assert_trees_all_equal(
        leaves(load_decoder(sharded(tmp_path), dtype=jnp.bfloat16)), leaves(load_decoder(PLAIN, dtype=jnp.bfloat16))
    )


def test_host_holds_about_one_tensor(tmp_path):
    wide = {"hidden_size": 256, "head_dim": 64, "num_layers": 8, "intermediate_size": 1024}
    big = Decoder(dataclasses.replace(ModelConfig.from_hf(PLAIN), **wide), dtype=jnp.float32)
    save_decoder(big, tmp_path / "big")
    tracemalloc.start()
    try:
        load_frozen(tmp_path / "big", dtype=jnp.bfloat16)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    largest, whole = 256 * 1024 * 4, big.config.num_parameters * 4
    # Each reader holds a tensor as it is in the file, transposed, and in bfloat16; and Python's own objects.
    assert peak < loading.READERS * 2.5 * largest + 6 * 2**20 < whole


def test_all_wrong_tensors_are_listed(model_dir):
    def change(tensors):
        del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
        tensors["model.embed_tokens.weight"] = np.zeros((3, 16), np.float32)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int32)

    change_tensors(model_dir, change)
    with pytest.raises(CheckpointError) as caught:
        load_decoder(model_dir)
    assert caught.value.code == "model.tensors-differ"
    for message in (
        "5 tensors",
        "missing: model.norm.weight [16]",
        "missing: model.layers.1.mlp.up_proj.weight [24, 16]",
        "not of this model: model.layers.2.mlp.up_proj.weight [2, 2]",
        "wrong shape: model.embed_tokens.weight is [3, 16], config.json says [48, 16]",
        "unreadable type: lm_head.weight is I32",
    ):
        assert message in str(caught.value)


def test_tables_that_can_be_computed_are_ignored(model_dir):
    def change(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(2, np.float32)

    change_tensors(model_dir, change)
    load_decoder(model_dir)


def test_head_that_a_tied_model_stores_is_ignored(tmp_path):
    shutil.copytree(TIED, tmp_path / "model")
    change_tensors(
        tmp_path / "model", lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]})
    )
    load_decoder(tmp_path / "model")


def test_missing_head_points_at_the_config(model_dir):
    change_tensors(model_dir, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        load_decoder(model_dir)


@pytest.mark.parametrize("keep", [0, 5, 200, 5000])
def test_truncated_file_is_named(model_dir, keep):
    file = model_dir / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="truncated or corrupt") as caught:
        load_decoder(model_dir)
    assert caught.value.where == str(file)


def test_a_tensor_that_is_named_twice_is_refused(model_dir):
    """Programs differ in which of the two they take."""
    file = model_dir / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name = next(key for key, value in header.items() if key.endswith("norm.weight"))
    twice = (
        json.dumps(header)[:-1]
        + f', "{name}": '
        + json.dumps(header[name] | {"shape": [1, *header[name]["shape"]]})
        + "}"
    )
    file.write_bytes(len(twice).to_bytes(8, "little") + twice.encode() + content[8 + length :])
    with pytest.raises(CheckpointError, match="twice, with different values"):
        load_decoder(model_dir)


def sharded(tmp_path):
    """The model in a file for each of its tensors."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    shutil.copyfile(PLAIN / "config.json", folder / "config.json")
    tensors = load_file(PLAIN / "model.safetensors")
    files = {name: f"model-{number:05}.safetensors" for number, name in enumerate(tensors, 1)}
    for name, file in files.items():
        save_file({name: tensors[name]}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def test_all_broken_shards_are_named(tmp_path):
    model_dir = sharded(tmp_path)
    first, second, *_ = sorted(model_dir.glob("*.safetensors"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:100])
    with pytest.raises(ErrorList) as caught:
        load_decoder(model_dir)
    assert [(error.code, error.where) for error in caught.value.errors] == [
        ("model.missing-file", str(first)),
        ("model.broken-file", str(second)),
    ]


def test_a_folder_with_two_sets_of_weights_is_an_error(tmp_path):
    """transformers reads model.safetensors, vLLM what the index names."""
    model_dir = sharded(tmp_path)
    (model_dir / "model.safetensors").write_bytes((PLAIN / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="two sets of weights"):
        load_decoder(model_dir)
    index = model_dir / "model.safetensors.index.json"
    one_file = dict.fromkeys(json.loads(index.read_text())["weight_map"], "model.safetensors")
    index.write_text(json.dumps({"weight_map": one_file}))
    load_decoder(model_dir)


@pytest.mark.parametrize(
    ("old", "new"),
    [("", "_orig_mod."), ("", "base_model.model."), ("model.", "model.language_model."), ("model.", "")],
)
def test_names_that_begin_otherwise_are_told(model_dir, old, new):
    tensors = load_file(model_dir / "model.safetensors")
    renamed = {name.replace(old, new, 1) if name.startswith(old) else name: array for name, array in tensors.items()}
    save_file(renamed, model_dir / "model.safetensors")
    here = "model.".replace(old, new, 1)
    config = ModelConfig.from_hf(model_dir)
    with pytest.raises(CheckpointError) as caught:
        load_decoder(model_dir)
    for problem in (caught.value, *header_problems(model_dir, config)):
        assert problem.why == f"its names begin with {here!r}, and those of this model with 'model.'"
        assert problem.fix.startswith("save the model itself")


def test_index_with_missing_tensors_is_an_error(tmp_path):
    model_dir = sharded(tmp_path)
    index = model_dir / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.9.mlp.up_proj.weight"] = next(iter(content["weight_map"].values()))
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"missing from its files: model\.layers\.9\.mlp"):
        load_decoder(model_dir)


@pytest.mark.parametrize("text", ["", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'])
def test_broken_index_is_refused(tmp_path, text):
    model_dir = sharded(tmp_path)
    (model_dir / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="index of the weights cannot be read"):
        load_decoder(model_dir)


def test_pickled_weights_are_refused(model_dir):
    (model_dir / "model.safetensors").rename(model_dir / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle"):
        load_decoder(model_dir)
    (model_dir / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load_decoder(model_dir)


@pytest.mark.parametrize("case", ["llama3", "gemma3"])
def test_a_model_takes_one_text_without_positions_and_segments(case):
    model, tokens = load_decoder(golden(case), dtype=jnp.float32), jnp.asarray([3, 1, 4, 1, 5], jnp.int32)
    packed = model(tokens, jnp.arange(5), Segments.from_lengths([5], 5))
    np.testing.assert_array_equal(model(tokens), packed)
    with pytest.raises(ValueError, match="belong together"):
        model(tokens, jnp.arange(5))


def test_the_headers_of_every_kind_of_model_pass_before_they_are_loaded():
    problems = {case: header_problems(golden(case), ModelConfig.from_hf(golden(case))) for case in GOLDEN}
    assert {case: [str(problem) for problem in listed] for case, listed in problems.items() if listed} == {}
