"""The unmodified `openai` client against a service. `make test-peers` makes its environment."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lorafusion_jax.serve.store import tables as t

HERE = Path(__file__).parent
PEERS = os.environ.get("LORAFUSION_PEERS", "")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PEERS, reason="LORAFUSION_PEERS names no Python with openai; make test-peers"),
]


def test_all_calls_of_the_client(tmp_path, tiny_base):
    sys.path.insert(0, str(HERE.parent / "serve"))
    from training_service import TrainingService

    service = TrainingService(tmp_path / "home", tiny_base)
    try:
        now = time.time()
        with service.db.write() as connection:
            job = {"id": "job-1", "owner": "ana", "name": "law", "base": "tiny", "spec": {}, "state": "done"}
            connection.execute(t.jobs.insert().values(job | {"created": now}))
            row = {"id": "ad-1", "job": "job-1", "owner": "ana", "step": 3, "sha256": "", "path": "jobs/1"}
            connection.execute(t.artifacts.insert().values(row | {"created": now}))
        while not service.controller.connected:
            time.sleep(0.01)
        arguments = [PEERS, str(HERE / "openai_calls.py"), service.url, service.keys["ana"], "tiny", "law"]
        done = subprocess.run(arguments, capture_output=True, timeout=300)
    finally:
        service.close()
    shown = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, shown[-4000:]
    assert "checks passed" in shown
