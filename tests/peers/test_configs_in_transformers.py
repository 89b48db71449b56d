"""The stored config.json of every family are what transformers writes today, and no type of it is read as another."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.families.multimodal import WRAPPERS
from lorafusion_jax.families.table import FAMILIES
from lorafusion_jax.models import ModelConfig

PEERS = os.environ.get("LORAFUSION_PEERS", "")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PEERS, reason="LORAFUSION_PEERS names no Python with torch and peft; make test-peers"),
]
STORED = Path(__file__).parents[1] / "models" / "saved_configs.jsonl"


def test_transformers_saves_the_configurations_that_are_stored():
    script = Path(__file__).with_name("saved_configs.py")
    saved = subprocess.run([PEERS, str(script)], capture_output=True, text=True, check=True)
    assert saved.stdout.splitlines() == STORED.read_text().splitlines()


def test_every_model_type_is_served_or_refused_by_name():
    script = Path(__file__).with_name("model_types.py")
    lines = subprocess.run([PEERS, str(script)], capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) > 700
    others = {name: family for family, row in FAMILIES.items() for name in row.model_types}
    served = {*FAMILIES, *WRAPPERS, *others}
    models, refused = {}, {}
    for raw in map(json.loads, lines):
        try:
            models[raw["model_type"]] = ModelConfig.from_hf(raw)
        except CheckpointError as problem:
            refused[raw["model_type"]] = raw.get("architectures", []), problem
    for name, model in models.items():
        assert name in (model.family, model.wrapper) or others[name] == model.family
    for name in refused.keys() - served:  # defaults of some that are served lack a size
        architectures, problem = refused[name]
        assert problem.code in ("model.unsupported", "model.bad-config"), name
        assert name in problem.what or any(str(one) in problem.what for one in architectures), problem.what
    assert len(models) > 60
    assert models.keys() <= served
