"""A file that leaves a key out is converted as if it said TRL's own default, or the difference is named."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from lorafusion_jax.config.convert import convert
from lorafusion_jax.config.load import load_config
from lorafusion_jax.config.other_defaults import target_of

PEERS = os.environ.get("LORAFUSION_PEERS", "")
pytestmark = pytest.mark.skipif(not PEERS, reason="LORAFUSION_PEERS names no Python with trl; make test-peers")
SHORT = {"model_name_or_path": "m", "dataset_name": "rows.jsonl", "use_peft": True}


@pytest.fixture(scope="module")
def defaults():
    script = Path(__file__).parent / "trl_defaults.py"
    done = subprocess.run([PEERS, script], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "objective"),
    [("SFTConfig", {}), ("DPOConfig", {"loss_type": ["sigmoid"]}), ("KTOConfig", {"rlhf": "kto"})],
)
def test_left_out_is_as_said(tmp_path, defaults, name, objective):
    said = {key: value for key, value in (defaults["ModelConfig"] | defaults[name]).items() if target_of(key)}
    assert {"learning_rate", "lr_scheduler_type", "max_length", "lora_dropout", "num_train_epochs"} < said.keys()
    del said["model_revision"]  # "main" is what no revision means
    if objective:
        said["lora_dropout"] = 0.0  # `disable_dropout`
    named = {target_of(key) for key, _ in convert(SHORT | objective, "x").notes}
    short, whole = (settings(tmp_path, values | objective) for values in (SHORT, SHORT | said))
    assert not {key for key in whole if whole[key] != short[key]} - named


def settings(folder, values):
    """Every setting of the converted file as it is loaded, by its dotted key."""
    path = folder / "jobs.yaml"
    path.write_text(convert(values, "x").text("Converted."))
    config = load_config(path)
    (adapter,) = config.adapters
    sections = config.model_dump(exclude={"adapters", "directory"}) | adapter.model_dump(exclude={"name"})
    return {
        f"{section}.{key}": value
        for section, values in sections.items()
        for key, value in (values.items() if isinstance(values, dict) else [("", values)])
    }
