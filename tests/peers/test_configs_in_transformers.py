"""The stored config.json of every family are what transformers writes today."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

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
