"""Recipes of the unmodified Tinker cookbook against a real service on this machine.

`make test-peers` makes its environment and names its Python in LORAFUSION_COOKBOOK. Versions: cookbook.txt.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from campaigns.service_process import Server

HERE = Path(__file__).parent
COOKBOOK = os.environ.get("LORAFUSION_COOKBOOK", "")
RECIPES = ("sft", "arithmetic", "preferences", "on_policy", "self_distillation")


@pytest.mark.nightly
@pytest.mark.skipif(not COOKBOOK, reason="LORAFUSION_COOKBOOK names no Python with tinker_cookbook; make test-peers")
def test_recipes_run_unmodified(tiny_base, tmp_path):
    more = ("--training-api", "--places", "4:6", "batch.capacity_tokens=256")  # its clients keep their places
    server = Server(tmp_path / "home", tiny_base, more=more)
    server.start()
    try:
        arguments = [server.url, server.keys["ana"], str(tiny_base), str(tmp_path)]
        command = [COOKBOOK, str(HERE / "cookbook_recipes.py"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    finally:
        server.end(signal.SIGTERM)
    assert [name for name in RECIPES if f"{name}: passed" not in done.stdout] == [], done.stdout[-6000:]
