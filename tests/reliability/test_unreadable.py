"""Files and folders of another user: one error that names what cannot be read, and never a traceback."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import small_jobs

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.cli.main import run
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.peft.folder import export_adapter

NOBODY = 65534
FILES = (
    "jobs.yaml",
    "law.jsonl",
    "base/config.json",
    "base/model.safetensors",
    "base/tokenizer.json",
    "base/tokenizer_config.json",
    "base",
    "start/adapter_config.json",
    "start/adapter_model.safetensors",
    "start",
)


@contextmanager
def as_another_user():
    """Permissions hold for everybody but root, as which tests may run."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.fixture(scope="module")
def home(tiny_base):
    """A job that starts from a PEFT folder, where another user may read; pytest's own folders are of one user only."""
    home = Path(tempfile.mkdtemp())
    home.chmod(0o755)
    shutil.copytree(tiny_base, home / "base")
    small_jobs.write_rows(home, "law", 4)
    _write_adapter(home / "start", ModelConfig.from_hf(home / "base"))
    entry = {"name": "law", "data": {"train": "law.jsonl"}, "lora": {"init_from": "start", "same_base": True}}
    small_jobs.write_job(home, home / "base", [entry], lora={"rank": 2, "alpha": 4, "targets": ["q_proj"]})
    assert run(["check", str(home / "jobs.yaml")]) == 0  # Python's own modules may not be readable for others
    yield home
    shutil.rmtree(home)


def _write_adapter(folder: Path, model: ModelConfig) -> None:
    shapes = {"lora_a": (1, model.hidden_size, 2), "lora_b": (1, 2, model.num_heads * model.head_dim)}
    leaves = {
        f"layers.{layer}.self_attn.q_proj.{leaf}": np.ones(shape, np.float32)
        for layer in range(model.num_layers)
        for leaf, shape in shapes.items()
    }
    export_adapter(leaves, AdapterSpec(name="law", rank=2, alpha=4, targets=("q_proj",)), 0, "org/tiny", folder)
    (folder / "SHA256SUMS").unlink()


@pytest.mark.parametrize("name", FILES)
def test_what_cannot_be_read_is_named(name, home, capfd, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))  # which this user cannot make either
    mode = (home / name).stat().st_mode
    (home / name).chmod(0)
    try:
        with as_another_user():
            code = run(["check", str(home / "jobs.yaml")])
    finally:
        (home / name).chmod(mode)
    shown = capfd.readouterr()
    text = shown.out + shown.err
    assert code in (1, 2), text
    assert "error[" in text
    assert "Traceback" not in text
    assert name in text
    assert "ermission denied" in text


def test_what_can_be_read_is(home, capfd, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    with as_another_user():
        assert run(["check", str(home / "jobs.yaml")]) == 0, capfd.readouterr()
