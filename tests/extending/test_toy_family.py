"""A model family from another package: Llama's layer with another model_type, other keys and tensor names."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lorafusion_jax.cli.main import run
from lorafusion_jax.models import Decoder, ModelConfig, load_decoder, save_decoder

SOURCE = """
from lorafusion_jax.config.families import Family

TOY = Family(
    architectures=("ToyForCausalLM",),
    keys={"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "rms_norm_eps": "norm_epsilon"},
    modules={
        "model.embed_tokens": "tokens",
        "model.layers": "blocks",
        "model.norm": "last_norm",
        "self_attn.q_proj": "attention.query",
        "mlp.down_proj": "feed.down",
        "lm_head": "words",
    },
)
NOTHING = 5
"""
THEIRS = {
    "model.embed_tokens.": "tokens.",
    "model.layers.": "blocks.",
    "model.norm.": "last_norm.",
    "self_attn.q_proj.": "attention.query.",
    "mlp.down_proj.": "feed.down.",
    "lm_head.": "words.",
}


def disguise(directory):
    """Renames everything that a Llama folder says, by hand."""
    config = json.loads((directory / "config.json").read_text())
    config |= {"architectures": ["ToyForCausalLM"], "model_type": "toy"}
    for ours, theirs in (("hidden_size", "n_embd"), ("num_hidden_layers", "n_layer"), ("rms_norm_eps", "norm_epsilon")):
        config[theirs] = config.pop(ours)
    (directory / "config.json").write_text(json.dumps(config))
    tensors = load_file(directory / "model.safetensors")
    for ours, theirs in THEIRS.items():
        tensors = {name.replace(ours, theirs): tensor for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture
def toy(install):
    return install("toy_family", SOURCE, {"lorafusion_jax.families": {"toy": "TOY", "nothing": "NOTHING"}})


@pytest.fixture
def bases(make_base, tmp_path):
    """The same random weights as a Llama and as a toy."""
    shape = {"tie_embeddings": False, "norm_eps": 1e-3}
    return make_base(tmp_path / "llama", **shape), disguise(make_base(tmp_path / "toy", **shape))


@pytest.fixture
def job(write_job, write_rows):
    adapter = {
        "name": "law", "data": {"train": write_rows("law.jsonl", 8, 0, 20)}, "batch": {"global_samples": 4},
        "lora": {"dropout": 0.1},
    }  # fmt: skip
    return str(write_job([adapter]))


def test_trains_to_the_peft_folder_that_the_same_llama_gives(toy, bases, job, tmp_path, capsys):
    found = []
    for base in bases:
        out = tmp_path / f"run-{base.name}"
        assert run(["train", job, f"base.model={base}", "--out", str(out)]) == 0, capsys.readouterr().err
        found.append(load_file(out / "adapters" / "law" / "latest" / "adapter_model.safetensors"))
    llama, toys = found
    assert any(np.any(tensor) for name, tensor in toys.items() if "lora_B" in name)
    assert llama.keys() == toys.keys()
    for name, tensor in llama.items():
        np.testing.assert_array_equal(toys[name], tensor, err_msg=name)


def test_a_model_is_written_as_its_family_names_it(toy, bases, tmp_path):
    model = load_decoder(bases[1], dtype=jnp.float32)
    out = save_decoder(model, tmp_path / "again")
    written, given = load_file(out / "model.safetensors"), load_file(bases[1] / "model.safetensors")
    assert written.keys() == given.keys()
    assert all(np.array_equal(written[name], given[name]) for name in given)
    config = json.loads((out / "config.json").read_text())
    assert (config["architectures"], config["model_type"], config["n_embd"]) == (["ToyForCausalLM"], "toy", 32)
    assert ModelConfig.from_hf(out) == model.config
    assert isinstance(model, Decoder)


def test_a_family_that_is_not_installed_is_refused(bases, job, capsys):
    assert run(["train", job, f"base.model={bases[1]}", "--out", "unused"]) == 2
    shown = capsys.readouterr().err
    assert "error[model.unsupported]" in shown
    assert "ToyForCausalLM" in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"model_type": "nothing", "architectures": None}, "plugin.broken", "toy_family"),
        ({"architectures": ["ToyForTokenClassification"]}, "model.unsupported", "ToyForTokenClassification"),
        ({"n_embd": -1}, "model.bad-config", "hidden_size=-1"),
        ({"n_layer": None}, "model.bad-config", "n_layer is missing"),
    ],
)
def test_files_that_do_not_fit_are_refused(toy, bases, job, capsys, changes, code, says):
    file = bases[1] / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    assert run(["train", job, f"base.model={bases[1]}", "--out", "unused"]) == 2
    shown = capsys.readouterr().err
    assert f"error[{code}]" in shown
    assert says in " ".join(shown.split())
    assert "Traceback" not in shown
