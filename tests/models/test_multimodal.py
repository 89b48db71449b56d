"""Text parts of multimodal checkpoints: loaded as the text model, and adapters under the names of the whole model."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
from drawn import GOLDEN, golden
from flax import nnx
from safetensors.numpy import load_file, save_file
from test_drawn_families import FORWARD, ROWS

from benchmarks.saved_model import load_decoder
from lorafusion_jax.adapters.patterns import Patterns
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.tokens import TokenRows
from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.families.multimodal import WRAPPERS, root_in_peft
from lorafusion_jax.families.table import FAMILIES
from lorafusion_jax.layout.layer import saved_path
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.peft.combine import combine_adapters
from lorafusion_jax.peft.folder import read_adapter, read_described, write_adapter
from lorafusion_jax.peft.merge import merge_arrays
from lorafusion_jax.peft.settings import lora_settings
from lorafusion_jax.report.servers import WITHOUT_CLASS, commands, type_of

SOURCE = golden("gemma3_untied")
LAYOUTS = {
    "published": {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    "transformers 5": {"model.": "model.language_model.", "lm_head.": "lm_head."},
}


def write(folder, layout, **changes):
    """The golden Gemma 3 as the text part of a model with a vision tower."""
    text = json.loads((SOURCE / "config.json").read_text())
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "mm_tokens_per_image": 4,
        "tie_word_embeddings": text.pop("tie_word_embeddings"), "vision_config": {"hidden_size": 8},
        "text_config": text | changes,
    }  # fmt: skip
    del text["architectures"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(whole))
    names = LAYOUTS[layout]
    tensors = {
        next(new + name.removeprefix(old) for old, new in names.items() if name.startswith(old)): tensor
        for name, tensor in load_file(SOURCE / "model.safetensors").items()
    }
    tower = "vision_tower.patch.weight" if layout == "published" else "model.vision_tower.patch.weight"
    save_file(tensors | {tower: np.ones((2, 3), np.float32)}, folder / "model.safetensors")
    return folder


def leaves(model):
    return {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(model))}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_text_part_is_loaded_and_the_towers_are_said(layout, tmp_path):
    folder = write(tmp_path / "whole", layout)
    with pytest.warns(UserWarning, match="1 tensors of vision_tower are left out"):
        model = load_decoder(folder, dtype=jnp.float32)
    wanted = leaves(load_decoder(SOURCE, dtype=jnp.float32))
    assert all(np.array_equal(leaf, wanted[path]) for path, leaf in leaves(model).items())


def test_keys_of_the_text_part_are_read_or_refused(tmp_path):
    whole = json.loads((write(tmp_path / "whole", "published") / "config.json").read_text())
    plain, config = ModelConfig.from_hf(SOURCE), ModelConfig.from_hf(whole)
    assert config.wrapper == "gemma3"
    assert config.layers == plain.layers
    for changes, words in (({"twist": 2}, "twist=2"), ({"model_type": "llama"}, "unknown architecture llama")):
        with pytest.raises(CheckpointError, match=words):
            ModelConfig.from_hf(whole | {"text_config": whole["text_config"] | changes})


def test_missing_text_tensors_are_named(tmp_path):
    folder = write(tmp_path / "whole", "published")
    tensors = load_file(folder / "model.safetensors")
    del tensors["language_model.model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with (
        pytest.warns(UserWarning, match="left out"),
        pytest.raises(CheckpointError, match=r"missing: language_model\.model\.layers\.1"),
    ):
        load_decoder(folder, dtype=jnp.float32)


# What PEFT calls the projections of a Gemma 3 with a tower, and vLLM's names of those of its text part.
TOWER = [f"model.vision_tower.vision_model.encoder.layers.{layer}.self_attn.q_proj" for layer in range(2)]
TEXT = "model.language_model.layers.{}.{}"
# `hf_to_vllm_mapper` of the multimodal models of vLLM 0.33: prefixes that are replaced one after the other.
TEXT_PART = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
PROJECTED = {"model.vision_tower.": "vision_tower.", "model.multi_modal_projector.": "multi_modal_projector."}
EMBEDDED = {"model.embed_vision": "embed_vision", "model.embed_audio.": "embed_audio."}
QWEN = {"model.visual.": "visual."} | TEXT_PART
VLLM = {
    "gemma3": TEXT_PART | PROJECTED,
    "mistral3": TEXT_PART | PROJECTED | {"model.": "language_model.model."},
    "gemma4": EMBEDDED | {"model.audio_tower.": "audio_tower."} | TEXT_PART | {"model": "language_model.model"},
    "gemma4_unified": EMBEDDED | TEXT_PART | {"model": "language_model.model"},
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), QWEN),
}
SPEC = AdapterSpec(name="law", rank=3, alpha=4, targets=("q_proj", "up_proj"))


def drawn(spec=SPEC, layers=(0, 1)):
    config, draw = ModelConfig.from_hf(SOURCE), np.random.default_rng(0)
    arrays = {}
    for layer in layers:
        for linear in (linear for linear in config.layer(layer).linears if linear.name in spec.targets):
            if spec.has(path := f"layers.{layer}.{linear.path}"):
                shapes = (linear.in_features, spec.rank_at(path)), (spec.rank_at(path), linear.out_features)
                arrays[path] = tuple(draw.standard_normal(shape).astype(np.float32) for shape in shapes)
    return arrays


def same(ours, others):
    assert ours.keys() == others.keys()
    for path, tensors in ours.items():
        for tensor, other in zip(tensors, others[path], strict=True):
            np.testing.assert_array_equal(tensor, other)


def renamed(folder, to, old, new):
    """A copy of an adapter's folder whose tensors have other names."""
    to.mkdir()
    (to / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
    tensors = load_file(folder / "adapter_model.safetensors")
    assert all(old in key for key in tensors)
    save_file({key.replace(old, new): array for key, array in tensors.items()}, to / "adapter_model.safetensors")
    return to


def test_a_folder_for_the_whole_model_reaches_its_text_part_only(tmp_path):
    arrays = drawn()
    folder = write_adapter(arrays, SPEC, "base", tmp_path / "law", multimodal=True)
    keys = load_file(folder / "adapter_model.safetensors")
    assert {key.split(".layers.")[0] for key in keys} == {"base_model.model.model.language_model"}
    targets = json.loads((folder / "adapter_config.json").read_text())["target_modules"]
    modules = {TEXT.format(layer, path) for layer in (0, 1) for path in ("self_attn.q_proj", "mlp.up_proj")}
    others = [*TOWER, TEXT.format(0, "self_attn.k_proj")]
    matched = {name for name in (*modules, *others) if any(f".{name}".endswith(f".{target}") for target in targets)}
    assert matched == modules
    described, copy = read_described(folder)
    assert described.same_settings(SPEC)
    same(copy, arrays)


@pytest.mark.parametrize("wrapper", [name for name in WRAPPERS if name not in WITHOUT_CLASS])
def test_vllm_finds_every_tensor(wrapper, tmp_path):
    root = root_in_peft(wrapper)
    folder = write_adapter(drawn(), SPEC, "base", tmp_path / "law", multimodal=True, root=root)
    described, _ = read_described(folder)
    assert (described.root, described.same_settings(SPEC)) == (root, True)
    for key in load_file(folder / "adapter_model.safetensors"):
        name = key.removeprefix("base_model.model.")
        for old, new in VLLM.get(wrapper, {}).items():  # Llama 4's are as they are there
            name = name.replace(old, new, 1) if name.startswith(old) else name
        module, matrix, leaf = name.rsplit(".", 2)
        assert (matrix in ("lora_A", "lora_B"), leaf) == (True, "weight")
        assert module in {
            f"language_model.model.layers.{layer}.{path}"
            for layer in (0, 1)
            for path in ("self_attn.q_proj", "mlp.up_proj")
        }


def test_patterns_and_tokens_have_the_names_of_the_whole_model(tmp_path):
    patterns = Patterns(
        rank=2, alpha=4, ranks=(("0.self_attn.q_proj", 5),), alphas=(("up_proj", 7), ("q_proj", 3)), exclude=".*1.mlp.*"
    )
    rows = TokenRows(embed=(1, 3))
    spec = AdapterSpec(name="law", rank=5, alpha=4, targets=SPEC.targets, patterns=patterns, tokens=rows)
    arrays = drawn(spec) | {"tokens": (np.ones((16, 2), np.float32),)}
    folder = write_adapter(arrays, spec, "base", tmp_path / "law", multimodal=True)
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["rank_pattern"] == {TEXT.format(0, "self_attn.q_proj"): 5}
    assert settings["alpha_pattern"] == {
        TEXT.format(0, "self_attn.q_proj"): 3, TEXT.format(0, "mlp.up_proj"): 7, TEXT.format(1, "self_attn.q_proj"): 3,
    }  # fmt: skip
    table = "base_model.model.model.language_model.embed_tokens.token_adapter.trainable_tokens_delta"
    assert table in load_file(folder / "adapter_model.safetensors")
    described, copy = read_described(folder)
    assert described.same_settings(spec)
    same(copy, arrays)
    lora = lora_settings(folder, model=ModelConfig.from_hf(SOURCE))
    assert (lora["rank"], lora["layers_to_transform"], lora["exclude"]) == (2, [0, 1], ["layers.1.mlp.up_proj"])


@pytest.mark.parametrize("root", ["model.model", "model.language_model.model", "model.model.language_model.model"])
def test_folders_of_others_and_older_ones_are_read(root, tmp_path):
    arrays = drawn()
    folder = write_adapter(arrays, SPEC, "base", tmp_path / "law", multimodal=True)
    other = renamed(folder, tmp_path / "other", "model.model.language_model", root)
    settings = json.loads((other / "adapter_config.json").read_text())
    settings |= {"target_modules": ".*language_model.*(q_proj|up_proj)", "exclude_modules": ["vision_tower.x"]}
    (other / "adapter_config.json").write_text(json.dumps(settings))
    same(read_adapter(other)[1], arrays)
    lora = lora_settings(other, model=ModelConfig.from_hf(SOURCE))
    assert (set(lora["targets"]), lora["exclude"]) == ({"q_proj", "up_proj"}, [])


def test_tensors_of_a_tower_and_of_two_names_are_refused(tmp_path):
    folder = write_adapter(drawn(), SPEC, "base", tmp_path / "law", multimodal=True)
    file = folder / "adapter_model.safetensors"
    tensors, key = load_file(file), "base_model.model.{}layers.0.self_attn.q_proj.lora_A.weight"
    (folder / "SHA256SUMS").unlink(missing_ok=True)
    save_file(tensors | {key.format("model.vision_tower."): np.zeros((3, 8), np.float32)}, file)
    with pytest.raises(CheckpointError, match=r"(?s)extra: .*vision_tower.*on vision_tower, too"):
        read_adapter(folder)
    save_file(tensors | {key.format("language_model.model."): np.zeros((3, 32), np.float32)}, file)
    with pytest.raises(CheckpointError, match="two names"):
        read_adapter(folder)


def test_combined_folders_keep_the_names_of_the_whole_model(tmp_path):
    folders = [
        write_adapter(drawn(), SPEC, "base", tmp_path / name, multimodal=name == "new") for name in ("old", "new")
    ]
    both = combine_adapters(dict.fromkeys(folders, 0.5), tmp_path / "both")
    assert all(".model.language_model." in key for key in load_file(both / "adapter_model.safetensors"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_merging_into_the_whole_model_is_merging_into_its_text_part(layout, tmp_path):
    spec = AdapterSpec(name="law", rank=3, alpha=4, targets=SPEC.targets, tokens=TokenRows(embed=(1,), head=(2,)))
    row = np.full((16, 1), 0.5, np.float32)
    arrays = drawn() | {"tokens": (row, row)}
    merge_arrays(SOURCE, spec, arrays, tmp_path / "text")
    report = merge_arrays(write(tmp_path / "whole", layout), spec, arrays, tmp_path / "merged")
    text, whole = (load_file(tmp_path / name / "model.safetensors") for name in ("text", "merged"))
    before, names = load_file(SOURCE / "model.safetensors"), LAYOUTS[layout]
    assert report.num_changed == 6
    for name, tensor in text.items():
        new = next((new + name.removeprefix(old) for old, new in names.items() if name.startswith(old)), name)
        np.testing.assert_array_equal(whole[new], tensor)
        assert np.array_equal(tensor, before[name]) == (new not in report.deltas)
    assert (tmp_path / "merged" / "config.json").read_bytes() == (tmp_path / "whole" / "config.json").read_bytes()


# Linear layers that vLLM's classes have, those of packed ones by their parts (`packed_modules_mapping`).
VLLM_LINEARS = {
    "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "out_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj",
    "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "in_proj", "input_linear", "output_linear", "w1", "w2",
    "w3", "c_fc", "c_proj", "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "in_proj_qkvz", "in_proj_ba",
    "a_proj", "b_proj", "g_proj", "per_layer_input_gate", "per_layer_projection", "query_key_value", "dense",
    "dense_h_to_4h", "dense_4h_to_h",
}  # fmt: skip


def published(family: str) -> tuple[ModelConfig, set[str]]:
    """A model of a family, and the tensors of its checkpoint as of a model of text."""
    if family in FORWARD:
        row = ROWS[FORWARD[family]]
        return ModelConfig.from_hf(row["config"]), {name.replace(".language_model", "") for name in row["tensors"]}
    case = next(case for case, row in GOLDEN.items() if ModelConfig.from_hf(row["config"]).family == family)
    return ModelConfig.from_hf(GOLDEN[case]["config"]), {*GOLDEN[case]["tensors"]}


@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_reads_a_folder_of_every_family(family, tmp_path):
    """Its rules: "base_model.model.", a module, lora_A or lora_B and weight; the last name of the module is a linear
    layer; with experts, the adapter on gate and up is that of `experts.base_layer`, that on down of `experts`."""
    config, names = published(family)
    spec = AdapterSpec(name="law", rank=2, alpha=4, targets=config.targets)
    arrays, modules = {}, {}
    for layer in range(config.num_layers):
        for linear in config.layer(layer).linears:
            if linear.name not in config.targets:  # PEFT refuses it
                continue
            experts = (linear.experts,) if linear.experts else ()
            shapes = (*experts, linear.in_features, 2), (*experts, 2, linear.out_features)
            arrays[saved_path(f"layers.{layer}.{linear.path}")] = tuple(np.ones(shape, np.float32) for shape in shapes)
    whole = bool(config.wrapper)
    folder = write_adapter(arrays, spec, "base", tmp_path / "law", multimodal=whole)
    for key in load_file(folder / "adapter_model.safetensors"):
        root, _, name = key.partition("base_model.model.")
        module, matrix, leaf = name.rsplit(".", 2)
        assert (root, matrix in ("lora_A", "lora_B"), leaf) == ("", True, "weight")
        modules.setdefault(module, set()).add(matrix)
    served = [line for line in commands("base", {"law": (spec, folder)}, type_of(config)) if line.startswith("vllm")]
    assert all(matrices == {"lora_A", "lora_B"} for matrices in modules.values())
    for module in modules:
        module = module.replace(".language_model", "")
        parent, _, last = module.removesuffix(".base_layer").rpartition(".")
        if last == "experts":  # beside the router, in the module where the checkpoint has it; others are refused
            assert any(name.startswith(f"{parent}.") for name in names) or not served, module
        else:
            assert last in VLLM_LINEARS or not served, module
            # As the base is published; transformers and vLLM call the backbone of Nemotron model.
            both = {f"{module}.weight", f"{module}.weight".replace("model.", "backbone.")}
            assert both & names or not served, module
    assert len(modules) == len(arrays)
