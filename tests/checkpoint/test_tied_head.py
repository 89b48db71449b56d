"""A base whose file has another output head than its embedding, although config.json says that they are one."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lorafusion_jax.api.training import training_client
from lorafusion_jax.checkpoint.base_weights import INDEX, weight_problems
from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.generation.load import load_stage
from lorafusion_jax.generation.sources import Source

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def write_head(tiny_base, tmp_path):
    """write_head(array or None, sharded) → a base of tied embeddings with this head in its file."""

    def write(change, sharded=False):
        base = shutil.copytree(tiny_base, tmp_path / "base")
        assert json.loads((base / "config.json").read_text())["tie_word_embeddings"]
        tensors = load_file(base / "model.safetensors")
        head = {HEAD: np.ascontiguousarray(change(tensors[TABLE]))}
        if sharded:
            save_file(head, base / "model-2.safetensors", {"format": "pt"})
            files = dict.fromkeys(tensors, "model.safetensors") | {HEAD: "model-2.safetensors"}
            (base / INDEX).write_text(json.dumps({"weight_map": files}))
        else:
            save_file(tensors | head, base / "model.safetensors", {"format": "pt"})
        return base

    return write


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "two files"])
def test_another_head_is_refused(sharded, write_head):
    (problem,) = weight_problems(write_head(lambda table: table[::-1], sharded))
    assert problem.code == "model.tensors-differ"
    assert problem.what.startswith(f"{HEAD} differs from {TABLE}")
    assert "tie_word_embeddings to false" in problem.fix


def test_text_is_not_made_with_another_head(write_head):
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        load_stage(Source(base=write_head(lambda table: table[::-1]), adapters=(), asked=(), dtype="float32"))


def test_no_client_trains_with_another_head(write_head):
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        training_client(write_head(lambda table: table[::-1]), rank=2, targets=["q_proj"])


@pytest.mark.parametrize(
    ("table", "head"), [("model.language_model.", ""), ("language_model.model.", "language_model.")]
)
def test_another_head_of_a_multimodal_model_is_refused(write_head, table, head):
    base = write_head(lambda rows: rows[::-1])
    tensors = load_file(base / "model.safetensors")
    renamed = {f"{head}{name}" if name == HEAD else name.replace("model.", table, 1): a for name, a in tensors.items()}
    save_file(renamed, base / "model.safetensors")
    text = json.loads((base / "config.json").read_text()) | {"model_type": "mistral"}
    del text["architectures"]
    names = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    (base / "config.json").write_text(json.dumps(names | {"text_config": text}))
    (problem,) = weight_problems(base)
    assert problem.what.startswith(f"{head}{HEAD} differs from {table}embed_tokens.weight")


def test_a_head_of_another_type_is_refused(write_head):
    assert len(weight_problems(write_head(lambda table: table.astype(np.float16)))) == 1


def test_an_equal_copy_is_the_embedding(write_head):
    assert weight_problems(write_head(np.copy)) == []
