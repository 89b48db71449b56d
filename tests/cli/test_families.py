"""A base with fused projections and windows through the command line: its own targets, in PEFT's names."""

from __future__ import annotations

import json

import numpy as np
import pytest
import small_jobs
from safetensors.numpy import load_file

from lorafusion_jax.cli.main import run


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
