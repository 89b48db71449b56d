"""One process trains a run; the others can tell whether it still does."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys

import pytest

from lorafusion_jax.checkpoint import run_lock as module
from lorafusion_jax.checkpoint.run_lock import held_by, run_lock
from lorafusion_jax.errors import CheckpointError

HOLD = """
import sys, time
from pathlib import Path
from lorafusion_jax.checkpoint.run_lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_killed_process_lets_go(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match=r"run\.in-use") as caught, run_lock(tmp_path):
            pass
        assert f"being trained by process {holder.pid} on {os.uname().nodename}" in caught.value.what
        assert held_by(tmp_path) == {"process": holder.pid, "host": os.uname().nodename, "alive": True}
        holder.kill()
    assert held_by(tmp_path) == {"process": holder.pid, "host": os.uname().nodename, "alive": False}
    with run_lock(tmp_path):
        assert held_by(tmp_path)["process"] == os.getpid()


def test_of_another_host_one_cannot_tell(tmp_path):
    (tmp_path / module.FILE).write_text(json.dumps({"process": 7, "host": "elsewhere"}))
    assert held_by(tmp_path) == {"process": 7, "host": "elsewhere", "alive": None}


def test_a_look_at_the_lock_keeps_nobody_out(tmp_path, monkeypatch):
    (tmp_path / module.FILE).touch()
    with (tmp_path / module.FILE).open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        monkeypatch.setattr(module.time, "sleep", lambda seconds: fcntl.flock(file, fcntl.LOCK_UN))
        with run_lock(tmp_path):
            pass


def test_a_file_system_without_locks_keeps_nobody_out(tmp_path, monkeypatch):
    def unsupported(file, kind):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(module.fcntl, "flock", unsupported)
    with run_lock(tmp_path), run_lock(tmp_path):
        assert held_by(tmp_path) == {"alive": None}
    with run_lock(tmp_path / "a folder that is not there"):
        assert held_by(tmp_path / "a folder that is not there") == {"alive": None}
