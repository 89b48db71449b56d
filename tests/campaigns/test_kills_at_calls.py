"""A run is killed at any call by which it changes its folder while adapters join, are extended or move: all or nothing.

Every file operation of Python code is one case, on runs without devices. Then the run is resumed to its end, and every
adapter is where it would be undisturbed. Write errors are injected at the same calls.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from campaigns.changing_runs import CHANGES, ask, assert_nothing_lost, stop_after_a_step, write_jobs
from campaigns.disk import Disk, Killed
from campaigns.quick_runs import command, quick_runs
from more_cases import mostly_nightly, nightly

FEW, MORE = 40, 9  # strides of calls that are tried
ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT, errno.EACCES)


@pytest.fixture(scope="module")
def disk():
    return Disk()


@pytest.fixture(scope="module")
def home(tmp_path_factory, tiny_base):
    home = tmp_path_factory.mktemp("kills")
    write_jobs(home, tiny_base)
    with quick_runs():
        for done in (False, True):
            stop_after_a_step(home, done=done)
        yield home


@pytest.fixture
def asked(home, tmp_path):
    """asked(change) → a new copy of the run, and the arguments of its resume."""

    def copy(change: str) -> tuple[Path, list[str]]:
        return ask(home, change, tmp_path / "run"), CHANGES[change][2]

    return copy


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
@pytest.mark.parametrize("stride", [MORE * 5, nightly(1)], ids=["some calls", "every call"])
def test_an_error_at_any_call_of_a_new_run(stride, lasting, home, disk, tmp_path):
    """It says so; what is there can be resumed, or a run can begin there."""
    run, train = tmp_path / "run", ["train", home / "jobs.yaml", "--out"]
    with disk.watch(run):
        command(*train, run)
    calls = disk.calls
    for call in range(1, calls + 1, stride):
        run = tmp_path / f"run-{call}"
        error = ERRORS[call % len(ERRORS)]
        try:
            with disk.watch(run, fail_at=call, error=error, lasting=lasting):
                outcome = command(*train, run)
            assert outcome.code in (0, 1, 2, 3), outcome.text
            assert outcome.code in (0, 3) or outcome.error, outcome.text
            if not (run / "plan.json").exists():
                shutil.rmtree(run, ignore_errors=True)
                assert command(*train, run).code == 0
            assert_nothing_lost(run, "move")
        except Exception as problem:
            problem.add_note(f"{os.strerror(error)} at call {call} of {calls}")
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
