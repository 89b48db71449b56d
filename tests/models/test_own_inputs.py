"""Files and settings of models whose layers have inputs of their own and read keys of earlier layers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from drawn import golden
from safetensors.numpy import load_file, save_file

from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.errors import CheckpointError, ConfigError, ErrorList
from lorafusion_jax.generation import packing
from lorafusion_jax.generation.generator import Conversation, Generator, Request
from lorafusion_jax.generation.load import load_stage
from lorafusion_jax.generation.sampling import Sampling
from lorafusion_jax.generation.sources import AdapterSource, Source
from lorafusion_jax.models import ModelConfig, open_frozen
from lorafusion_jax.peft.folder import read_adapter
from lorafusion_jax.planning.choices import _meshes
from lorafusion_jax.planning.stages import stage_layers

SOURCE = golden("gemma4_shared")
KEY = "model.layers.3.self_attn.k_proj.weight"  # of a layer that reads those of another


def changed(folder, change, wrapper=False):
    """The golden model with other tensors, also as the text part of a whole model."""
    folder.mkdir()
    tensors, config = load_file(SOURCE / "model.safetensors"), json.loads((SOURCE / "config.json").read_text())
    change(tensors)
    if wrapper:
        tensors = {name.replace("model.", "model.language_model.", 1): leaf for name, leaf in tensors.items()}
        whole = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": config}
        config = whole | {"tie_word_embeddings": config.pop("tie_word_embeddings")}
        del config["text_config"]["architectures"]
        tensors["model.audio_tower.conv.weight"] = np.ones((2, 3), np.float32)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("wrapper", [False, True])
def test_unused_keys_of_published_files_are_left_out(tmp_path, wrapper):
    def add(tensors):
        tensors[KEY] = np.ones((20, 16), np.float32)
        tensors[KEY.replace("k_proj", "v_norm")] = np.ones(3, np.float32)

    folder = changed(tmp_path / "base", add, wrapper)
    if not wrapper:
        assert open_frozen(folder).num_bytes == open_frozen(SOURCE).num_bytes
        return
    with pytest.warns(UserWarning, match="1 tensors of audio_tower are left out"):
        assert open_frozen(folder).num_bytes == open_frozen(SOURCE).num_bytes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda its: its.pop("model.embed_tokens_per_layer.weight"), "missing: model.embed_tokens_per_layer.weight"),
        (lambda its: its.pop("model.layers.0.self_attn.k_proj.weight"), "missing: model.layers.0.self_attn.k_proj"),
        (lambda its: its.pop("model.layers.4.per_layer_projection.weight"), "missing: model.layers.4.per_layer_proj"),
        (
            lambda its: its.update({"model.per_layer_model_projection.weight": np.ones((59, 16), np.float32)}),
            r"wrong shape: model.per_layer_model_projection.weight is \[59, 16\], config.json says \[60, 16\]",
        ),
        (
            lambda its: its.update({"model.layers.3.mlp.up_proj.weight": np.ones((24, 16), np.float32)}),
            r"wrong shape: model.layers.3.mlp.up_proj.weight is \[24, 16\], config.json says \[48, 16\]",
        ),
        (
            lambda its: its.update({"model.layers.3.self_attn.k_scale": np.ones(1, np.float32)}),
            "not of this model: model.layers.3.self_attn.k_scale",
        ),
    ],
    ids=["table", "keys", "projection", "shape", "wide", "unknown"],
)
def test_other_tensors_are_named(tmp_path, change, words):
    with pytest.raises(CheckpointError, match=words):
        open_frozen(changed(tmp_path / "base", change))


def test_an_adapter_of_what_makes_the_inputs_is_refused(tmp_path):
    folder = shutil.copytree(SOURCE / "adapter", tmp_path / "adapter")
    tensors = load_file(folder / "adapter_model.safetensors")
    name = "base_model.model.model.per_layer_model_projection"
    pair = {f"{name}.lora_A.weight": np.ones((2, 16)), f"{name}.lora_B.weight": np.ones((60, 2))}
    save_file(
        tensors | {key: leaf.astype(np.float32) for key, leaf in pair.items()}, folder / "adapter_model.safetensors"
    )
    config = json.loads((folder / "adapter_config.json").read_text())
    config["target_modules"].append("per_layer_model_projection")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises((CheckpointError, ErrorList), match="per_layer_model_projection"):
        read_adapter(folder)


def test_such_a_model_has_one_stage():
    model = ModelConfig.from_hf(SOURCE)
    assert len(stage_layers(model, 1)) == 1
    job = JobConfig.model_validate({"base": {"model": "-"}, "adapters": [{"name": "a", "data": {"train": "-"}}]})
    assert {mesh.stages for mesh in _meshes(8, model, job, 1)} == {1}
    with pytest.raises(ConfigError, match=r"mesh\.stages=2.*keys of earlier layers and inputs of their own"):
        stage_layers(model, 2)


@pytest.mark.nightly
def test_a_second_turn_is_as_a_whole_prompt(monkeypatch):
    """Layers that read keys attend to the cache of the layer that has them, and to the rows of the part."""
    monkeypatch.setattr(packing, "MOST_CONTINUED", 16)
    adapter = AdapterSource(name="a", folder=SOURCE / "adapter")
    model = Generator([load_stage(Source(base=SOURCE, adapters=(adapter,), asked=(), dtype="float32"))])
    conversation, first = Conversation(), Request(tokens=[5, 17, 2, 40, 8, 8, 31], sampling=Sampling(max_tokens=9))
    (answer,) = model([first], conversation=conversation)
    second = replace(first, tokens=[*first.tokens, *answer.tokens, *((7 * n) % 48 for n in range(1, 40))])
    (kept,) = model([second], conversation=conversation)
    assert kept.tokens == model([second])[0].tokens
