"""Checkpoints of experts: MXFP4 becomes plain numbers, and each fault has its own error."""

from __future__ import annotations

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from drawn import GOLDEN, distances, golden, golden_tokens
from more_cases import nightly
from safetensors.numpy import load_file, save_file

from benchmarks.saved_model import load_decoder, load_frozen, save_decoder
from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.families.experts import Experts, Router
from lorafusion_jax.models import Decoder, ModelConfig, Segments
from lorafusion_jax.models.forward import logits
from lorafusion_jax.peft.folder import export_adapter, read_adapter
from lorafusion_jax.peft.merge import merge_adapter, merge_arrays

FILE = "model.safetensors"
VALUES = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)  # of E2M1


@pytest.fixture
def copy(tmp_path):
    """copy(case, **changed tensors) → a folder of a golden model with tensors replaced, or left out if None."""

    def copied(case, **tensors):
        folder = tmp_path / case
        folder.mkdir()
        shutil.copyfile(golden(case) / "config.json", folder / "config.json")
        arrays = load_file(golden(case) / FILE) | {name.replace("/", "."): array for name, array in tensors.items()}
        save_file({name: array for name, array in arrays.items() if array is not None}, folder / FILE)
        return folder

    return copied


def test_mxfp4_is_dequantised(tmp_path):
    experts = Experts(
        width=64, inner=32, count=3, active=2, router=Router(score="softmax_of_chosen", bias=True), bias=True,
        interleaved=True, limit=7.0,
    )  # fmt: skip
    config = ModelConfig(
        family="gpt_oss", vocab_size=16, hidden_size=64, intermediate_size=32, num_layers=1, num_heads=2,
        num_kv_heads=1, head_dim=16, attention_sinks=True, experts=experts, qkv_bias=True, o_bias=True,
    )  # fmt: skip
    folder = save_decoder(Decoder(config, dtype=jnp.float32), tmp_path / "base")
    tensors, rng = load_file(folder / FILE), np.random.default_rng(0)
    wanted = {}
    for name, (num_in, num_out) in {"gate_up_proj": (64, 64), "down_proj": (32, 64)}.items():
        stem = f"model.layers.0.mlp.experts.{name}"
        del tensors[stem]
        codes = rng.integers(0, 16, (3, num_out, num_in), dtype=np.uint8)
        scales = rng.integers(120, 130, (3, num_out, num_in // 32), dtype=np.uint8)
        packed = codes[..., ::2] | codes[..., 1::2] << 4
        tensors[f"{stem}_blocks"] = packed.reshape(3, num_out, num_in // 32, 16)
        tensors[f"{stem}_scales"] = scales
        values = np.array(VALUES, np.float32)[codes] * np.repeat(2.0 ** (scales.astype(np.float32) - 127), 32, -1)
        wanted[f"layers.0.mlp.experts_{name}.kernel"] = values.transpose(0, 2, 1).reshape(3 * num_in, num_out)
    save_file(tensors, folder / FILE)
    raw = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(raw))
    weights = load_frozen(folder, dtype=jnp.float32)
    for name, kernel in wanted.items():
        np.testing.assert_array_equal(weights[name], kernel)


@pytest.mark.parametrize(
    "case", ["qwen3_moe", "mixtral_window", "gpt_oss", "glm4_moe", "qwen2_moe_sparse", "gemma4_experts"]
)
def test_an_adapter_that_peft_wrote_is_written_again_bit_for_bit(case, tmp_path):
    spec, arrays = read_adapter(golden(case) / "adapter")
    assert spec.on_experts
    leaves = {
        f"{path}.{leaf}": array[None]
        for path, pair in arrays.items()
        for leaf, array in zip(("lora_a", "lora_b"), pair, strict=True)
    }
    folder = export_adapter(leaves, spec, 0, "base", tmp_path / "out")
    written, wanted = (load_file(where / "adapter_model.safetensors") for where in (folder, golden(case) / "adapter"))
    assert written.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_array_equal(written[name], wanted[name], err_msg=name)
    settings = json.loads((folder / "adapter_config.json").read_text())
    peft = json.loads((golden(case) / "adapter" / "adapter_config.json").read_text())
    for key in ("target_modules", "target_parameters"):
        assert sorted(settings[key]) == sorted(peft[key])


EXPERTS_OF = {  # in PEFT's names: the module, and which wrapper has which projection
    "gate_up": ("base_layer.lora_{}", "experts_gate_up_proj"),
    "down": ("lora_{}", "experts_down_proj"),
}
MERGED = (  # one of each layout of files: of every expert, of all, with and without others beside, interleaved, packed
    "qwen3_moe", "mixtral_window", "gpt_oss", "glm4_moe", "qwen2_moe_sparse", "gemma4_experts", "deepseek_v3_experts",
    "qwen3_5_moe", "qwen3_next", "glm4_moe_lite_groups",
)  # fmt: skip


@pytest.mark.parametrize("case", MERGED)
def test_merged_experts_change_by_what_peft_adds(case, tmp_path):
    """PEFT's `ParamWrapper.get_delta_weight`: [N, r, E] × [E, r, K], times alpha / r."""
    report = merge_adapter(golden(case), golden(case) / "adapter", tmp_path / "out")
    settings = json.loads((golden(case) / "adapter" / "adapter_config.json").read_text())
    tensors, rank = load_file(golden(case) / "adapter" / "adapter_model.safetensors"), settings["r"]
    before, after = (load_frozen(folder, dtype=jnp.float32) for folder in (golden(case), tmp_path / "out"))
    stems = {key.rpartition("experts.")[0] + "experts." for key in tensors if "experts." in key and "shared" not in key}
    stems = {stem for stem in stems if f"{stem}lora_A.weight" in tensors}
    assert stems
    changed = {}
    for stem in stems:
        module = stem.removeprefix("base_model.model.model.").removesuffix("experts.")
        module = module if module.endswith("mlp.") else f"{module}parallel."
        for form, target in EXPERTS_OF.values():
            a, b = (np.float64(tensors[f"{stem}{form.format(matrix)}.weight"]) for matrix in "AB")
            b_NrE = b.reshape(len(b), rank, -1)
            a_ErK = a.reshape(b_NrE.shape[2], rank, -1)
            delta_EKN = settings["lora_alpha"] / rank * np.einsum("nre,erk->ekn", b_NrE, a_ErK)
            changed[f"{module}{target}.kernel"] = delta_EKN.reshape(-1, len(b))
    for name, delta in changed.items():
        moved = np.float64(after[name]) - np.float64(before[name])
        np.testing.assert_allclose(moved, delta, rtol=1e-3, atol=1e-6)  # one rounding of the sum
        assert np.abs(delta).max() > 1e-3
    kernels = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed.keys() <= kernels
    assert report.max_delta > 1e-3


@pytest.mark.parametrize(
    "case", [case if case == "gpt_oss" else nightly(case) for case in MERGED]
)  # the others differ by their layout of files, which is read as it is written
def test_a_merged_model_has_the_logits_that_peft_has(case, tmp_path):
    merge_adapter(golden(case), golden(case) / "adapter", tmp_path / "out")
    probes = GOLDEN[case]["probes"]
    assert np.abs(np.subtract(probes["adapted"], probes["logits"])).max() > 0.01 * probes["logits"][0]
    model, tokens = load_decoder(tmp_path / "out", dtype=jnp.float32), jnp.asarray(golden_tokens(case))
    segments = Segments.from_lengths([len(tokens)], len(tokens))
    hidden = model.hidden(tokens, jnp.arange(len(tokens)), segments)
    assert distances(GOLDEN[case], {"adapted": logits(hidden, model.head(), model.config)})["adapted"] < 2e-5


def test_experts_that_cannot_be_merged_are_named(copy, tmp_path):
    spec, arrays = read_adapter(golden("gpt_oss") / "adapter")
    fewer = {path: tuple(array[:2] for array in pair) if "experts" in path else pair for path, pair in arrays.items()}
    with pytest.raises(CheckpointError, match=r"2 experts of \d+ → \d+, which the base's tensors do not fit"):
        merge_arrays(golden("gpt_oss"), spec, fewer, tmp_path / "out")
    beyond = {path.replace("layers.1.", "layers.9."): pair for path, pair in arrays.items()}
    with pytest.raises(CheckpointError, match=r"missing: model.layers.9.mlp.experts_down_proj.weight"):
        merge_arrays(golden("gpt_oss"), spec, beyond, tmp_path / "out")
    stem = "model.layers.0.mlp.experts.down_proj"
    shape = load_file(golden("gpt_oss") / FILE)[stem].shape
    blocks = np.zeros((shape[0], shape[2], max(1, shape[1] // 32), 16), np.uint8)
    packed = copy("gpt_oss", **{stem: None, f"{stem}_blocks": blocks, f"{stem}_scales": blocks[..., 0]})
    with pytest.raises(CheckpointError, match=rf"quantised: {stem} is MXFP4") as caught:
        merge_arrays(packed, spec, arrays, tmp_path / "out")
    assert "export without --merge" in str(caught.value.fix)


def test_layers_that_predict_further_tokens_are_left_out(copy):
    """GLM's files have one after the last layer."""
    folder = copy("glm4_moe", **{"model/layers/3/eh_proj/weight": np.zeros((16, 32), np.float32)})
    assert not [name for name in load_frozen(folder) if name.startswith("layers.3")]
    other = copy("qwen2_moe", **{"model/layers/3/eh_proj/weight": np.zeros((16, 32), np.float32)})
    expect(other, "model.tensors-differ", "not of this model: model.layers.3.eh_proj.weight")


def test_the_correction_of_a_router_is_float32_in_every_model(tmp_path):
    """Its differences are smaller than bfloat16's, and they choose."""
    weights = load_frozen(golden("glm4_moe"), dtype=jnp.bfloat16)
    correction = weights["layers.1.mlp.router.e_score_correction_bias"]
    stored = load_file(golden("glm4_moe") / FILE)["model.layers.1.mlp.gate.e_score_correction_bias"]
    np.testing.assert_array_equal(correction, stored)
    assert weights["layers.1.mlp.router.weight"].dtype == jnp.bfloat16


def expect(folder, code, *texts):
    with pytest.raises(CheckpointError) as caught:
        load_frozen(folder)
    assert caught.value.code == code
    for text in texts:
        assert text in str(caught.value)


def test_experts_in_one_tensor_of_a_multimodal_checkpoint_are_those_of_many(tmp_path):
    """Qwen3.5 is published so."""
    of_text = load_file(golden("qwen3_5_moe") / FILE)
    tensors = {name.replace("model.", "model.language_model.", 1): array for name, array in of_text.items()}
    for layer in range(3):
        stem = f"model.language_model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([tensors.pop(f"{stem}.{expert}.{name}_proj.weight") for expert in range(5)])
            for name in ("gate", "up", "down")
        )
        tensors |= {f"{stem}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{stem}.down_proj": down}
    text = json.loads((golden("qwen3_5_moe") / "config.json").read_text())
    raw = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file(tensors | {"model.visual.merger.weight": np.zeros(3, np.float32)}, tmp_path / FILE)
    with pytest.warns(UserWarning, match="only the text part is loaded: 1 tensors of visual"):
        weights = load_frozen(tmp_path, dtype=jnp.float32)
    wanted = load_frozen(golden("qwen3_5_moe"), dtype=jnp.float32)
    assert weights.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(weights[name], array, err_msg=name)


def test_a_missing_expert_is_named(copy):
    gone = "model/layers/1/mlp/experts/4/up_proj/weight"
    expect(copy("qwen3_moe", **{gone: None}), "model.tensors-differ", f"missing: {gone.replace('/', '.')} [10, 16]")


def test_an_expert_of_another_shape_is_named(copy):
    name = "model/layers/0/block_sparse_moe/experts/2/w2/weight"
    folder = copy("mixtral", **{name: np.zeros((16, 8), np.float32)})
    expect(folder, "model.tensors-differ", "wrong shape", "is [16, 8], config.json says [16, 24]")


def test_experts_beyond_those_of_the_config_are_named(copy):
    name = "model/layers/0/mlp/experts/6/down_proj/weight"
    folder = copy("qwen3_moe", **{name: np.zeros((16, 10), np.float32)})
    expect(folder, "model.tensors-differ", "not of this model: model.layers.0.mlp.experts.6.down_proj.weight")


def test_an_index_that_points_nowhere_is_an_error(copy):
    folder = copy("gpt_oss")
    names = list(load_file(folder / FILE))
    (folder / FILE).rename(folder / "first.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "first.safetensors") | {names[0]: "second"}}))
    expect(folder, "model.missing-file", "second")
    index.write_text(json.dumps({"weight_map": dict.fromkeys([*names, "lost.weight"], "first.safetensors")}))
    expect(folder, "model.missing-tensor", "lost.weight")


def test_an_unknown_key_that_may_change_the_arithmetic_is_refused(copy):
    folder = copy("qwen3_moe")
    raw = json.loads((folder / "config.json").read_text()) | {"router_temperature": 2.0}
    (folder / "config.json").write_text(json.dumps(raw))
    expect(folder, "model.unsupported", "router_temperature=2.0: this key is not read")
