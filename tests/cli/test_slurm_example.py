"""examples/slurm.sbatch: a run that is interrupted is queued again and resumed; srun and scontrol are stand-ins."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "slurm.sbatch"
PATIENCE_S = 120


@pytest.fixture
def start(tmp_path):
    """start(body of lorafusion) → process of the batch script; commands go to `called`."""
    programs = tmp_path / "bin"
    programs.mkdir()

    def write(name, body):
        (programs / name).write_text(f'#!/bin/bash\necho "{name} $*" >> {tmp_path}/called\n{body}\n')
        (programs / name).chmod(0o755)

    def run(body, *arguments, nodes="1"):
        write("srun", 'exec "$@"')
        write("scontrol", "")
        write("lorafusion", body)
        environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        environment["SLURM_NNODES"] = nodes
        return subprocess.Popen(["bash", SCRIPT, *arguments], cwd=tmp_path, env=environment)

    return run


def called(folder):
    lines = (folder / "called").read_text().splitlines()
    return [line for line in lines if not line.startswith("srun")]


def test_a_new_run_is_trained_and_a_begun_one_resumed(start, tmp_path):
    assert start("exit 0", "jobs.yaml", "runs/a", "train.max_steps=2").wait(PATIENCE_S) == 0
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "plan.json").write_text("{}")
    assert start("exit 0", "jobs.yaml", "runs/a", nodes="2").wait(PATIENCE_S) == 0
    assert called(tmp_path) == [
        "lorafusion train jobs.yaml --out runs/a train.max_steps=2",
        "lorafusion resume runs/a --distributed",
    ]


@pytest.mark.parametrize(("code", "queued"), [(130, True), (2, False), (3, False), (0, False)])
def test_only_an_interrupted_run_is_queued_again(start, tmp_path, code, queued):
    assert start(f"exit {code}", "jobs.yaml", "runs/a").wait(PATIENCE_S) == code
    assert ("scontrol requeue 7" in called(tmp_path)) == queued


def test_the_signal_before_the_time_limit_lets_the_run_save(start, tmp_path):
    saves = (
        f"trap 'sleep 0.3; touch {tmp_path}/saved; exit 130' TERM; touch {tmp_path}/trains; while :; do sleep 0.1; done"
    )
    process = start(saves, "jobs.yaml", "runs/a")
    ends = time.monotonic() + PATIENCE_S
    while not (tmp_path / "trains").exists() and time.monotonic() < ends:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 130
    assert (tmp_path / "saved").exists()
    assert called(tmp_path)[-1] == "scontrol requeue 7"
