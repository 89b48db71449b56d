"""Checkpoints that reading widens: integers in words, and experts in 8 bits, against loops over bits."""

from __future__ import annotations

import json
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from drawn import golden
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from benchmarks.saved_model import load_frozen, save_decoder
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.checkpoint.base_weights import weight_problems
from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.families.multimodal import WRAPPERS
from lorafusion_jax.models import Decoder, ModelConfig
from lorafusion_jax.peft.folder import export_adapter
from lorafusion_jax.peft.merge import merge_adapter

FILE = "model.safetensors"
WIDTH, INNER = 64, 96
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def words(integers, bits):
    """Integers [..., n] → words of 32 bits, the first in the lowest bits."""
    each = 32 // bits
    packed = np.zeros((*integers.shape[:-1], integers.shape[-1] // each), np.uint32)
    for index in np.ndindex(integers.shape):
        packed[*index[:-1], index[-1] // each] |= np.uint32(integers[index]) << np.uint32(bits * (index[-1] % each))
    return packed.view(np.int32)


def gptq(rng, num_in, num_out, *, bits, group, version, order):
    """The tensors of a kernel, and its values [K, N]."""
    groups = num_in // group if group > 0 else 1
    of_row = np.arange(num_in) // group if group > 0 else np.zeros(num_in, int)
    if order:
        of_row = rng.permutation(of_row)
    codes, zeros = rng.integers(0, 2**bits, (num_in, num_out)), rng.integers(1, 2**bits, (groups, num_out))
    scales = rng.uniform(0.01, 0.1, (groups, num_out)).astype(np.float16)
    tensors = {
        "qweight": words(codes.T, bits).T.copy(),
        "qzeros": words(zeros - (version == 1), bits),
        "scales": scales,
        "g_idx": of_row.astype(np.int32),
    }
    return tensors, (codes - zeros[of_row]) * scales[of_row].astype(np.float32)


def awq(rng, num_in, num_out, *, group):
    groups = num_in // group
    codes, zeros = rng.integers(0, 16, (num_in, num_out)), rng.integers(0, 16, (groups, num_out))
    scales = rng.uniform(0.01, 0.1, (groups, num_out)).astype(np.float16)

    def ordered(integers):
        return words(integers.reshape(len(integers), -1, 8)[..., AWQ_COLUMNS].reshape(integers.shape), 4)

    of_row = np.arange(num_in) // group
    values = (codes - zeros[of_row]) * scales[of_row].astype(np.float32)
    return {"qweight": ordered(codes), "qzeros": ordered(zeros), "scales": scales}, values


def compressed(rng, num_in, num_out, *, bits, group, zeros, order=False):
    """pack-quantized: [N, K], with zeros that are packed along N, or those of the middle."""
    tensors, values = gptq(rng, num_in, num_out, bits=bits, group=group, version=2, order=order)
    codes = (values.T / tensors["scales"].T.astype(np.float32)[:, tensors["g_idx"]]).round().astype(int)
    middle = np.full((num_out, len(tensors["scales"])), 2 ** (bits - 1))
    zero_of = rng.integers(0, 2**bits, middle.shape) if zeros else middle
    codes = np.clip(codes + zero_of[:, tensors["g_idx"]], 0, 2**bits - 1)
    packed = {
        "weight_packed": words(codes, bits),
        "weight_scale": tensors["scales"].T.copy(),
        "weight_shape": np.array([num_out, num_in]),
    }
    if zeros:
        packed["weight_zero_point"] = words(zero_of.T, bits).T.copy()
    if order:
        packed["weight_g_idx"] = tensors["g_idx"]
    values = (codes - zero_of[:, tensors["g_idx"]]) * packed["weight_scale"].astype(np.float32)[:, tensors["g_idx"]]
    return packed, values.T


def of_group(**weights):
    """A quantization_config of compressed-tensors."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "dynamic": False} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


PACKED = {
    "pack-quantized": ({"bits": 4, "group": 32, "zeros": False}, of_group(group_size=32)),
    "pack-quantized with zeros": ({"bits": 4, "group": 16, "zeros": True}, of_group(group_size=16, symmetric=False)),
    "pack-quantized by channel": (
        {"bits": 8, "group": -1, "zeros": False},
        of_group(num_bits=8, strategy="channel", group_size=None),
    ),
    "pack-quantized by activation": (
        {"bits": 4, "group": 16, "zeros": False, "order": True},
        of_group(group_size=16, actorder="group"),
    ),
}
FORMS = {
    "gptq": ({"bits": 4, "group": 32, "version": 1, "order": False}, {"checkpoint_format": "gptq", "desc_act": False}),
    "ordered by activation": ({"bits": 4, "group": 16, "version": 1, "order": True}, {"desc_act": True}),
    "one group of 8 bits": ({"bits": 8, "group": -1, "version": 1, "order": False}, {}),
    "second version": ({"bits": 2, "group": 32, "version": 2, "order": False}, {"format": "gptq_v2"}),
    "awq": ({"group": 16}, {"version": "gemm", "zero_point": True}),
    **PACKED,
}


def config_of(**changed):
    return ModelConfig(
        family="llama", vocab_size=16, hidden_size=WIDTH, intermediate_size=INNER, num_layers=2, num_heads=2,
        num_kv_heads=1, head_dim=32, **changed,
    )  # fmt: skip


def write_settings(folder, settings):
    raw = json.loads((folder / "config.json").read_text()) | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.fixture(params=FORMS)
def packed(request, tmp_path):
    """(folder, values of the packed kernels by leaf name); down_proj of layer 1 stays plain."""
    sizes, settings = FORMS[request.param]
    rng, method = np.random.default_rng(0), "awq" if request.param == "awq" else "gptq"
    pack = compressed if request.param in PACKED else awq if method == "awq" else gptq
    folder = save_decoder(Decoder(config_of(), dtype=jnp.float16), tmp_path / "base")
    tensors, kernels = load_file(folder / FILE), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        if name.startswith("model.layers.1.mlp.down"):
            continue
        stem, (num_out, num_in) = name.removesuffix(".weight"), tensors.pop(name).shape
        parts, values = pack(rng, num_in, num_out, **sizes)
        tensors |= {f"{stem}.{part}": array for part, array in parts.items()}
        kernels[f"{stem.removeprefix('model.')}.kernel"] = values
    save_file(tensors, folder / FILE)
    settings = {"quant_method": method, "bits": sizes.get("bits", 4), "group_size": sizes["group"]} | settings
    write_settings(folder, settings)
    return folder, kernels


def test_packed_kernels_have_the_values_of_their_formula(packed):
    folder, kernels = packed
    assert len(kernels) == 13
    assert weight_problems(folder) == []
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("in", "out"))
    for sharding in (None, lambda name, shape: NamedSharding(mesh, PartitionSpec(*("in", "out")[: len(shape)]))):
        weights: Any = load_frozen(folder, dtype=jnp.float32, sharding=sharding)
        for name, values in kernels.items():
            np.testing.assert_allclose(weights[name], values, rtol=1e-6, err_msg=name)
    stored: Any = load_frozen(folder, dtype=jnp.float32, quantize="int8")
    assert stored["layers.0.mlp.up_proj.kernel"]["values"].dtype == jnp.int8  # it may be stored anew


LAYOUTS = {
    "published": {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    "transformers 5": {"model.": "model.language_model.", "lm_head.": "lm_head."},
}


def as_part_of_a_whole(folder, whole, layout, family):
    """Writes a checkpoint as the text part of a multimodal one, whose tower is packed, too."""
    text = json.loads((folder / "config.json").read_text()) | {"model_type": family}
    settings, _ = text.pop("quantization_config"), text.pop("architectures", None)
    wrapper = "mistral3" if family == "mistral" else family.removesuffix("_text")
    root = {
        "architectures": [WRAPPERS[wrapper][0]], "model_type": wrapper, "text_config": text, "vision_config": {},
        "quantization_config": settings, "tie_word_embeddings": text.get("tie_word_embeddings", False),
    }  # fmt: skip
    whole.mkdir()
    (whole / "config.json").write_text(json.dumps(root))
    content = (folder / FILE).read_bytes()  # safetensors reads no 8-bit floats as numpy's
    begin = 8 + int.from_bytes(content[:8], "little")
    entries = {
        next(
            (new + name.removeprefix(old) for old, new in LAYOUTS[layout].items() if name.startswith(old)), name
        ): entry
        for name, entry in json.loads(content[8:begin]).items()
    }
    tower = "model.vision_tower.patch" if layout == "transformers 5" else "vision_tower.patch"
    end = len(content) - begin
    for number, part in enumerate(("qweight", "scales")):
        places = [end + 4 * number, end + 4 * number + 4]
        entries[f"{tower}.{part}"] = {"dtype": "I32", "shape": [1], "data_offsets": places}
    header = json.dumps(entries).encode()
    (whole / FILE).write_bytes(len(header).to_bytes(8, "little") + header + content[begin:] + bytes(8))
    return whole


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_text_part_of_a_packed_whole_has_them_too(packed, layout, tmp_path):
    folder, kernels = packed
    whole = as_part_of_a_whole(folder, tmp_path / "whole", layout, "mistral")
    assert weight_problems(whole) == []
    with pytest.warns(UserWarning, match="2 tensors of vision_tower are left out"):
        weights: Any = load_frozen(whole, dtype=jnp.float32)
    for name, values in kernels.items():
        np.testing.assert_allclose(weights[name], values, rtol=1e-6, err_msg=name)


def test_what_does_not_fit_is_named_and_nothing_is_merged_into_it(packed, tmp_path):
    folder, _ = packed
    spec = AdapterSpec(name="a", rank=2, alpha=4, targets=("q_proj",))
    shapes = {"lora_a": (1, WIDTH, 2), "lora_b": (1, 2, 64)}
    stems = [f"layers.{layer}.self_attn.q_proj" for layer in range(2)]
    leaves = {f"{stem}.{leaf}": np.ones(shape, np.float32) for stem in stems for leaf, shape in shapes.items()}
    adapter = export_adapter(leaves, spec, 0, str(folder), tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"quantised: model.layers.0.self_attn.q_proj.weight is packed"):
        merge_adapter(folder, adapter, tmp_path / "merged")
    tensors = load_file(folder / FILE)
    stem = "model.layers.0.self_attn.q_proj"
    scales, index = (".weight_scale", ".weight_g_idx") if f"{stem}.weight_scale" in tensors else (".scales", ".g_idx")
    save_file({name: array for name, array in tensors.items() if name != stem + scales}, folder / FILE)
    with pytest.raises(CheckpointError, match=rf"missing: {stem}{scales}"):
        load_frozen(folder)
    if stem + index in tensors:
        save_file(tensors | {stem + index: np.full(WIDTH, 9, np.int32)}, folder / FILE)
        with pytest.raises(CheckpointError, match="g_idx has 9 to 9, and there are"):
            load_frozen(folder)


def scaled(weights=None, **changed):
    """A quantization_config of compressed-tensors for 8-bit floats."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"} | (weights or {})
    config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return config | {"config_groups": {"group_0": {"weights": weights}}} | changed


BLOCKS = {"strategy": "block", "block_structure": [128, 128]}
EXPERTS = {  # (quantization_config, type, shape of the scales, end of their name)
    "blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
        ml_dtypes.float8_e4m3fn,
        lambda n, k: (-(-n // 128), -(-k // 128)),
        "_scale_inv",
    ),
    "compressed blocks": (
        scaled(BLOCKS), ml_dtypes.float8_e4m3fn, lambda n, k: (-(-n // 128), -(-k // 128)), "_scale",
    ),
    "compressed channels": (scaled(), ml_dtypes.float8_e4m3fn, lambda n, k: (n, 1), "_scale"),
    "compressed tensors": (scaled({"strategy": "tensor"}), ml_dtypes.float8_e4m3fn, lambda n, k: (1,), "_scale"),
    "int8 channels": (scaled({"type": "int"}, format="int-quantized"), np.int8, lambda n, k: (n, 1), "_scale"),
}  # fmt: skip


def with_8_bit_projections(case, form, home):
    """(the folder, and one of the same values as plain numbers)"""
    settings, dtype, shape_of, ending = EXPERTS[form]
    folders, rng, tensors = (home / "base", home / "plain"), np.random.default_rng(0), load_file(golden(case) / FILE)
    plain = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = (tensors[name] * (100 if dtype == np.int8 else 1)).astype(dtype)
        scales = rng.uniform(0.5, 2, shape_of(*weight.shape)).astype(np.float32)
        tensors[name], tensors[f"{name}{ending}"] = weight, scales
        each = scales
        if form.endswith("blocks"):
            each = np.kron(scales, np.ones((128, 128), np.float32))[tuple(map(slice, weight.shape))]
        plain[name] = weight.astype(np.float32) * each
    for folder, arrays in zip(folders, (tensors, plain), strict=True):
        folder.mkdir()
        (folder / "config.json").write_bytes((golden(case) / "config.json").read_bytes())
        save_file(arrays, folder / FILE)
    write_settings(folders[0], settings)
    return folders


@pytest.mark.parametrize("form", EXPERTS)
def test_experts_in_8_bits_are_widened(form, tmp_path):
    """Blocks of 128 × 128, the last of a side smaller, channels or tensors; the router stays plain."""
    folders = with_8_bit_projections("qwen3_moe", form, tmp_path)
    weights, expected = (load_frozen(folder, dtype=jnp.float32) for folder in folders)
    chex.assert_trees_all_equal(weights, expected)


@pytest.mark.parametrize(("form", "layout"), [("blocks", "transformers 5"), ("compressed channels", "published")])
def test_experts_in_8_bits_of_a_whole_are_widened(form, layout, tmp_path):
    folder, plain = with_8_bit_projections("qwen3_5_moe", form, tmp_path)
    whole = as_part_of_a_whole(folder, tmp_path / "whole", layout, "qwen3_5_moe_text")
    assert weight_problems(whole) == []
    with pytest.warns(UserWarning, match="left out"):
        weights = load_frozen(whole, dtype=jnp.float32)
    chex.assert_trees_all_equal(weights, load_frozen(plain, dtype=jnp.float32))


def test_experts_of_a_whole_that_lie_in_one_tensor_are_refused_by_name(tmp_path):
    text = {"model_type": "qwen3_vl_moe_text", "num_experts": 4}
    whole = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "text_config": text}
    with pytest.raises(CheckpointError, match=r"fp8 of experts that lie in one tensor.* base\.quantize: fp8"):
        ModelConfig.from_hf(whole | {"quantization_config": EXPERTS["blocks"][0]})
    text = json.loads((golden("gemma4") / "config.json").read_text())  # of a family that may have experts; it has none
    whole = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": text}
    awq = {"quant_method": "awq", "bits": 4, "group_size": 64}
    assert ModelConfig.from_hf(whole | {"quantization_config": awq}).packed.method == "awq"


@pytest.mark.parametrize(("settings", "shown"), [
    ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "gptq with bits=3"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"}, "checkpoint_format="),
    ({"quant_method": "gptq", "bits": 4, "group_size": 8, "format": "gptq", "checkpoint_format": "gptq_v2"}, "gptq_v2"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 8, "dynamic": {"+:.*": {"bits": 8}}}, "dynamic"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size=0"),
    ({"quant_method": "awq", "bits": 4}, "group_size=None"),
    ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}, "version='gemv'"),
    ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": False}, "zero_point=False"),
    (of_group(group_size=32, num_bits=3), "num_bits=3"),
    (of_group(strategy="tensor"), "strategy='tensor'"),
    (of_group(group_size=None), "group_size=None"),
    (of_group(group_size=32) | {"format": "nvfp4-pack-quantized"}, "format='nvfp4-pack-quantized'"),
    (of_group(group_size=32) | {"format": "marlin-24"}, "format='marlin-24'"),
    (scaled(BLOCKS | {"block_structure": [64, 64]}), "block_structure="),
])  # fmt: skip
def test_other_forms_are_refused_by_name(settings, shown, tmp_path):
    folder = save_decoder(Decoder(config_of(), dtype=jnp.float16), tmp_path / "base")
    write_settings(folder, settings)
    with pytest.raises(CheckpointError, match=shown):
        ModelConfig.from_hf(folder)
