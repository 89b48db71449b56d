"""A base whose file has another output head than its embedding, although config.json says that they are one."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lorafusion_jax.checkpoint.base_weights import INDEX, weight_problems

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


def test_a_head_of_another_type_is_refused(write_head):
    assert len(weight_problems(write_head(lambda table: table.astype(np.float16)))) == 1


def test_an_equal_copy_is_the_embedding(write_head):
    assert weight_problems(write_head(np.copy)) == []
