"""Merging: W + scale · A B in the checkpoint's own dtype, everything else byte for byte."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.errors import CheckpointError, RunError
from lorafusion_jax.peft.merge import merge_arrays

SPEC = AdapterSpec(name="law", rank=2, alpha=3, rslora=True, targets=("q_proj",))
NAME = "model.layers.{}.self_attn.q_proj.weight"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 5, "hidden_size": 8, "intermediate_size": 8,
    "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 4,
}  # fmt: skip


def weights(dtype, num_layers=2):
    draw = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (5, 8), "model.norm.weight": (8,)}
    shapes |= {NAME.format(layer): (4, 8) for layer in range(num_layers)}
    return {name: draw.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


@pytest.fixture
def arrays():
    draw = np.random.default_rng(1)
    return {
        f"layers.{layer}.self_attn.q_proj": (
            draw.standard_normal((8, 2)).astype(np.float32),
            draw.standard_normal((2, 4)).astype(np.float32),
        )
        for layer in (0, 1)
    }


def write_base(folder, tensors, *, shards=1):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "training_args.bin").write_bytes(b"not copied")
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    files = [f"model-{shard + 1:05d}-of-{shards:05d}.safetensors" for shard in range(shards)]
    for shard, file in enumerate(files):
        save_file({name: tensors[name] for name in names[shard::shards]}, folder / file)
    index = {"metadata": {}, "weight_map": {name: files[index % shards] for index, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def read_all(folder):
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_targets_change_by_the_product_and_nothing_else_changes(dtype, shards, arrays, tmp_path):
    before = weights(dtype)
    base = write_base(tmp_path / "base", before, shards=shards)
    report = merge_arrays(base, SPEC, arrays, tmp_path / "out")
    after = read_all(tmp_path / "out")
    assert after.keys() == before.keys()
    # one rounding of the dtype, relative 2^-8 and 2^-11 at most; float32 also sums two products of size up to 8
    unit = {2: 2.0**-8 if dtype == ml_dtypes.bfloat16 else 2.0**-11, 4: 2.0**-21}[np.dtype(dtype).itemsize]
    for name, tensor in after.items():
        assert tensor.dtype == dtype
        if name not in [NAME.format(0), NAME.format(1)]:
            assert tensor.tobytes() == before[name].tobytes()
            continue
        a, b = arrays[name.removeprefix("model.").removesuffix(".weight")]
        delta = SPEC.scale * (a.astype(np.float64) @ b).T
        exact = before[name].astype(np.float64) + delta
        np.testing.assert_allclose(tensor.astype(np.float64), exact, rtol=unit, atol=8 * unit * (dtype == np.float32))
        assert report.deltas[name] == pytest.approx(np.abs(delta).max(), rel=1e-6)
    assert (report.max_delta, report.num_changed) == (max(report.deltas.values()), 2)


def test_configuration_and_tokenizer_come_along_and_pickles_do_not(arrays, tmp_path):
    base = write_base(tmp_path / "base", weights(np.float32), shards=2)
    merge_arrays(base, SPEC, arrays, tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "SHA256SUMS",
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]


def test_a_base_that_does_not_fit_is_told_at_once_and_leaves_nothing(arrays, tmp_path):
    tensors = weights(np.float32)
    tensors |= {NAME.format(0): np.zeros((4, 9), np.float32), NAME.format(1): np.zeros((4, 8), np.int8)}
    arrays["layers.2.self_attn.q_proj"] = arrays["layers.0.self_attn.q_proj"]
    base = write_base(tmp_path / "base", tensors)
    with pytest.raises(CheckpointError) as caught:
        merge_arrays(base, SPEC, arrays, tmp_path / "out")
    assert caught.value.code == "merge.base"
    for told in (
        f"misshapen: {NAME.format(0)} is [4, 9]",
        f"quantised: {NAME.format(1)} is I8",
        f"missing: {NAME.format(2)}",
    ):
        assert told in caught.value.where
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_an_overflow_of_the_dtype_is_an_error(arrays, tmp_path):
    tensors = weights(np.float16) | {NAME.format(1): np.full((4, 8), 65504, np.float16)}
    arrays["layers.1.self_attn.q_proj"] = (np.full((8, 2), 8, np.float32), np.full((2, 4), 8, np.float32))
    with pytest.raises(CheckpointError, match=r"merge\.not-finite"):
        merge_arrays(write_base(tmp_path / "base", tensors), SPEC, arrays, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_taken_folder_is_refused_before_any_work(arrays, tmp_path):
    base = write_base(tmp_path / "base", weights(np.float32))
    with pytest.raises(CheckpointError, match=r"export\.exists"):
        merge_arrays(base, SPEC, arrays, base)
    (tmp_path / "out").mkdir()
    merge_arrays(base, SPEC, arrays, tmp_path / "out")


@pytest.mark.parametrize("damage", ["no weights", "cut file", "missing shard", "leaves the folder"])
def test_damaged_bases_are_told(damage, arrays, tmp_path):
    base = write_base(tmp_path / "base", weights(np.float32), shards=1 if damage in ("no weights", "cut file") else 2)
    if damage == "no weights":
        (base / "model.safetensors").unlink()
    elif damage == "cut file":
        (base / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes()[:-4])
    elif damage == "missing shard":
        (base / "model-00002-of-00002.safetensors").unlink()
    else:
        index = base / "model.safetensors.index.json"
        index.write_text(index.read_text().replace("model-00002", "../model-00002"))
    with pytest.raises(CheckpointError) as caught:
        merge_arrays(base, SPEC, arrays, tmp_path / "out")
    assert caught.value.code == "merge.base"


def test_a_full_disk_is_told_and_leaves_nothing(arrays, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    base = write_base(tmp_path / "base", weights(np.float32))
    monkeypatch.setattr("lorafusion_jax.peft.merge.shutil.copyfile", full)
    with pytest.raises(RunError, match=r"save\.no-space"):
        merge_arrays(base, SPEC, arrays, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_biases_of_an_adapter_go_into_those_of_the_base(arrays, tmp_path):
    """Of the second layer only where the base has both: an adapter that loses one is refused."""
    spec = AdapterSpec(name="law", rank=2, alpha=3, rslora=True, targets=("q_proj",), kind="lora-bias")
    shift = {path: np.arange(4, dtype=np.float32) - layer for layer, path in enumerate(arrays)}
    biased = {path: (*pair, shift[path]) for path, pair in arrays.items()}
    biases = {NAME.format(layer).replace("weight", "bias"): np.full(4, 0.5, np.float32) for layer in (0, 1)}
    report = merge_arrays(
        write_base(tmp_path / "base", weights(np.float32) | biases), spec, biased, tmp_path / "merged"
    )
    merged, scale = read_all(tmp_path / "merged"), 3 / 2**0.5
    for layer, path in enumerate(arrays):
        bias = merged[NAME.format(layer).replace("weight", "bias")]
        np.testing.assert_allclose(bias, 0.5 + scale * shift[path], rtol=1e-6)
        product = weights(np.float32)[NAME.format(layer)] + scale * (arrays[path][0] @ arrays[path][1]).T
        np.testing.assert_allclose(merged[NAME.format(layer)], product, rtol=1e-5, atol=1e-6)
    assert report.num_changed == 4
    del biases[NAME.format(1).replace("weight", "bias")]
    base = write_base(tmp_path / "half", weights(np.float32) | biases)
    with pytest.raises(CheckpointError, match=r"merge\.kind.*no place for[\s\S]*layers\.1\.self_attn\.q_proj\.bias"):
        merge_arrays(base, spec, biased, tmp_path / "refused")
