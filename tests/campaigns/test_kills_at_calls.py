"""A run is killed at any call by which it changes its folder while adapters join, are extended or move: all or nothing.

Every file operation of Python code is one case, on runs without devices. Then the run is resumed to its end, and every
adapter is where it would be undisturbed. Write errors are injected at the same calls.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import small_jobs
from campaigns.disk import Disk, Killed
from campaigns.quick_runs import command, damage, listening, losses, quick_runs, resume_to_the_end
from more_cases import mostly_nightly, nightly

from lorafusion_jax.api.status import run_numbers
from lorafusion_jax.checkpoint.requests import request_files

ROWS = {"ask": 5, "law": 4, "tax": 5}
SHARED = {"optim": {"lr": 1e-3, "schedule": "cosine", "warmup": 0.0}, "data": {"max_length": 32}}
FEW, MORE = 40, 9  # strides of calls that are tried
ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT, errno.EACCES)

# What is asked of a run that stands still, and with what it is resumed.
EXTEND_ASK = ("extend", "ask", "--steps", "2")
ADD_TAX = ("add", "more.yaml")
CHANGES = {
    "add": (False, [ADD_TAX], []),
    "extend": (False, [EXTEND_ASK], []),
    "extend what is done": (True, [EXTEND_ASK], []),
    "extend what is done, elsewhere": (True, [EXTEND_ASK], ["mesh.stages=2"]),
    "add, elsewhere": (False, [ADD_TAX], ["mesh.data=2"]),
    "move": (False, [], ["mesh.stages=2", "mesh.data=2"]),
    "all": (False, [ADD_TAX, EXTEND_ASK, ("pause", "law"), ("weight", "ask", "3")], ["mesh.data=2"]),
    "drop": (False, [ADD_TAX], ["--drop", "law"]),
}


@pytest.fixture(scope="module")
def disk():
    return Disk()


@pytest.fixture(scope="module")
def home(tmp_path_factory, tiny_base):
    home = tmp_path_factory.mktemp("kills")
    for name, count in ROWS.items():
        small_jobs.write_rows(home, name, count, longest=6)
    small_jobs.write_rows(home, "held", 2, longest=4)
    entries = [_entry("ask"), _entry("law")]
    batch = {"capacity_tokens": 48, "tile_tokens": 16, "global_samples": 2}
    train = {"plan_seconds": 0.01, "log_every_s": 0}
    small_jobs.write_job(home, tiny_base, entries, batch=batch, save={"every_steps": 2}, train=train, **SHARED)
    (home / "more.yaml").write_text(json.dumps({"adapters": [_entry("tax")], **SHARED}))
    with quick_runs():
        yield home


@pytest.fixture(scope="module")
def stopped(home):
    """stopped(done) → a run that stands still after its first step, or that is done."""
    folders: dict[bool, Path] = {}

    def run(done: bool) -> Path:
        if done not in folders:
            folders[done] = home / f"stopped-{done}"

            def stop(event: Any) -> None:
                if event.kind == "step" and not done:
                    signal.raise_signal(signal.SIGTERM)

            with listening(stop):
                assert command("train", home / "jobs.yaml", "--out", folders[done]).code == (0 if done else 130)
        return folders[done]

    return run


def _entry(name: str) -> dict[str, Any]:
    data = {"train": f"{name}.jsonl", "eval": "held.jsonl"}
    return {"name": name, "data": data, "seed": list(ROWS).index(name) + 1, "batch": {"global_samples": 2}}


@pytest.fixture
def asked(home, stopped, tmp_path):
    """asked(change) → a new copy of the run, and the arguments of its resume."""

    def copy(change: str) -> tuple[Path, list[str]]:
        done, requests, how = CHANGES[change]
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(stopped(done), run, symlinks=True)
        for action, *more in requests:
            rest = [home / argument if argument.endswith(".yaml") else argument for argument in more]
            assert command(action, run, *rest).code == 0
        return run, how

    return copy


def assert_nothing_lost(run: Path, change: str) -> None:
    resume_to_the_end(run)
    assert losses(run) + damage(run) == []
    names = {"ask", "law"} | ({"tax"} if any(action == "add" for action, *_ in CHANGES[change][1]) else set())
    assert set(run_numbers(run)["adapters"]) == names
    assert request_files(run) == []


@pytest.mark.parametrize("stride", [FEW, nightly(1)], ids=["some calls", "every call"])
@pytest.mark.parametrize("change", mostly_nightly(CHANGES, ["all", "extend what is done, elsewhere"]))
def test_a_kill_at_any_call(change, stride, asked, disk):
    run, how = asked(change)
    with disk.watch(run):
        assert command("resume", run, *how).code in (0, 3)
    assert_nothing_lost(run, change)
    calls = disk.calls
    for call in range(1 + list(CHANGES).index(change) % stride, calls + 1, stride):
        run, how = asked(change)
        with pytest.raises(Killed), disk.watch(run, kill_at=call):
            command("resume", run, *how)
        try:
            assert_nothing_lost(run, change)
        except Exception as problem:
            problem.add_note(f"killed at call {call} of {calls}")
            raise


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize("stride", [nightly(MORE), nightly(1)], ids=["some calls", "every call"])
@pytest.mark.parametrize("change", ["add", "extend what is done, elsewhere"])
def test_an_error_at_any_call(change, stride, lasting, asked, disk):
    run, how = asked(change)
    with disk.watch(run):
        command("resume", run, *how)
    calls = disk.calls
    for call in range(1, calls + 1, stride):
        run, how = asked(change)
        error = ERRORS[call % len(ERRORS)]
        try:
            with disk.watch(run, fail_at=call, error=error, lasting=lasting):
                outcome = command("resume", run, *how)
            assert outcome.code in (0, 1, 2, 3), outcome.text
            assert outcome.code in (0, 3) or outcome.error, outcome.text  # it says what is wrong
            assert_nothing_lost(run, change)
        except Exception as problem:
            problem.add_note(f"{os.strerror(error)} at call {call} of {calls}")
            raise
