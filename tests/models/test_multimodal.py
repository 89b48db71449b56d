"""Text parts of multimodal checkpoints: loaded as the text model, the towers left out and said."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from make_golden import GOLDEN
from safetensors.numpy import load_file, save_file

from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.models import ModelConfig, load_decoder, save_decoder

SOURCE = GOLDEN / "gemma3_untied"
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
    out = save_decoder(model, tmp_path / "text", source_dir=folder)
    assert json.loads((out / "config.json").read_text())["architectures"] == ["Gemma3ForCausalLM"]
    assert load_file(out / "model.safetensors").keys() == load_file(SOURCE / "model.safetensors").keys()


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
