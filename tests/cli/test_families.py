"""Other bases through the command line: fused projections and windows; the text part of a multimodal model."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import small_jobs
from safetensors.numpy import load_file, save_file

from lorafusion_jax.cli.main import run
from lorafusion_jax.peft.folder import read_adapter


@pytest.fixture
def base(make_base, tmp_path):
    return make_base(
        tmp_path / "phi", family="phi3", fused=True, rope_channels=4, sliding_window=6, tie_embeddings=False
    )


def write_job(folder, base, name, targets, **lora):
    rows = small_jobs.write_rows(folder, name, 4, longest=20)
    adapter = {"name": name, "data": {"train": rows}, "batch": {"global_samples": 2}, "lora": lora}
    return str(small_jobs.write_job(folder, base, [adapter], lora={"targets": targets} if targets else {}))


def test_fused_projections_are_targets_with_one_a_each(base, tmp_path, capsys):
    job = write_job(tmp_path, base, "law", "all-linear", rank=2)
    assert run(["train", job, "train.max_steps=1", "--out", str(tmp_path / "run")]) == 0, capsys.readouterr().err
    folder = tmp_path / "run" / "adapters" / "law" / "latest"
    targets = json.loads((folder / "adapter_config.json").read_text())["target_modules"]
    assert sorted(targets) == ["down_proj", "gate_up_proj", "o_proj", "qkv_proj"]
    tensors = load_file(folder / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.qkv_proj.lora_{}.weight"
    assert (tensors[name.format("A")].shape, tensors[name.format("B")].shape) == ((2, 32), (64, 2))
    assert np.any(tensors[name.format("B")])


def test_projections_of_other_families_are_refused(base, tmp_path, capsys):
    job = write_job(tmp_path, base, "law", ["q_proj"], rank=2)
    assert run(["check", job]) == 2
    output = " ".join(capsys.readouterr().err.split())
    assert "there is no projection 'q_proj'" in output
    assert "qkv_proj, o_proj, gate_up_proj, down_proj" in output


@pytest.fixture
def multimodal(tiny_base, tmp_path):
    """The tiny base as the text part of a published Mistral Small 3.1, with a tower that has a q_proj, too."""
    folder = tmp_path / "small"
    folder.mkdir()
    for file in tiny_base.iterdir():
        if file.suffix in (".json", ".jinja") and file.name != "config.json":
            shutil.copyfile(file, folder / file.name)
    text = json.loads((tiny_base / "config.json").read_text()) | {"model_type": "mistral"}
    del text["architectures"]
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text}
    (folder / "config.json").write_text(json.dumps(whole))
    tensors = {f"language_model.{name}": array for name, array in load_file(tiny_base / "model.safetensors").items()}
    tower = {"vision_tower.transformer.layers.0.attention.q_proj.weight": np.ones((4, 4), np.float32)}
    save_file(tensors | tower, folder / "model.safetensors")
    return folder


@pytest.mark.filterwarnings("ignore:only the text part is loaded")
def test_an_adapter_of_a_multimodal_base_leaves_and_enters_under_the_names_of_the_whole(multimodal, tmp_path, capsys):
    job = write_job(tmp_path, multimodal, "law", ["q_proj", "down_proj"], rank=2)
    assert run(["train", job, "train.max_steps=1", "--out", str(tmp_path / "run")]) == 0, capsys.readouterr().err
    out = tmp_path / "law"
    assert run(["export", str(tmp_path / "run"), "law", "--to", str(out)]) == 0, capsys.readouterr().err
    assert f"vllm serve {multimodal} --enable-lora" in capsys.readouterr().out
    tensors = load_file(out / "adapter_model.safetensors")
    assert all(key.startswith("base_model.model.model.language_model.layers.") for key in tensors)
    assert np.any(tensors["base_model.model.model.language_model.layers.1.self_attn.q_proj.lora_B.weight"])
    targets = json.loads((out / "adapter_config.json").read_text())["target_modules"]
    assert "model.language_model.layers.0.self_attn.q_proj" in targets
    assert "AutoModelForImageTextToText.from_pretrained(" in (out / "README.md").read_text()
    assert run(["verify", str(tmp_path / "run"), "law"]) == 0, capsys.readouterr().err
    assert run(["export", str(tmp_path / "run"), "law", "--merge", "--to", str(tmp_path / "merged")]) == 0
    assert "from transformers import AutoModelForImageTextToText" in capsys.readouterr().out
    merged, before = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", multimodal))
    changed = {name for name in before if not np.array_equal(merged[name], before[name])}
    paths = ("self_attn.q_proj", "mlp.down_proj")
    assert changed == {f"language_model.model.layers.{layer}.{path}.weight" for layer in range(2) for path in paths}

    # A folder of an earlier version, under the names of the text part, leaves as one for the whole model.
    latest = (tmp_path / "run/adapters/law/latest").resolve()
    (latest / "SHA256SUMS").unlink()
    older = {key.replace(".language_model.", "."): array for key, array in tensors.items()}
    save_file(older, latest / "adapter_model.safetensors")
    settings = json.loads((latest / "adapter_config.json").read_text()) | {"target_modules": ["q_proj", "down_proj"]}
    (latest / "adapter_config.json").write_text(json.dumps(settings))
    assert run(["export", str(tmp_path / "run"), "law", "--to", str(tmp_path / "again")]) == 0, capsys.readouterr().err
    again = load_file(tmp_path / "again" / "adapter_model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(np.array_equal(again[key], tensors[key]) for key in tensors)
    assert json.loads((tmp_path / "again" / "adapter_config.json").read_text())["target_modules"] == targets

    started = [f"adapters.law.lora.init_from={out}", "adapters.law.optim.lr=1e-9", "train.max_steps=1"]
    assert run(["train", job, "--out", str(tmp_path / "next"), *started]) == 0, capsys.readouterr().err
    ours, theirs = (read_adapter(folder)[1] for folder in (tmp_path / "next/adapters/law/latest", out))
    for path, pair in ours.items():
        for tensor, wanted in zip(pair, theirs[path], strict=True):
            np.testing.assert_allclose(tensor, wanted, rtol=1e-5, atol=1e-7)
