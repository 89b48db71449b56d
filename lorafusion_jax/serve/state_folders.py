"""Folders of the states and adapters of jobs: `state/eEPOCH-sSTEP` and `adapter/step-STEP-eEPOCH` in that of a job."""

from __future__ import annotations

import re
from pathlib import Path

from lorafusion_jax.errors import RunError

JOB = re.compile(r"job-[0-9a-f]{12}")
NAME, ADAPTER = re.compile(r"e(\d+)-s(\d+)"), re.compile(r"step-(\d+)-e(\d+)")


def adapter_number(name: str) -> tuple[int, int] | None:
    """Epoch and step of an adapter, from the name of its folder; None if it is no such name.

    >>> adapter_number("step-40-e2")
    (2, 40)
    """
    match = ADAPTER.fullmatch(name)
    return None if match is None else (int(match[2]), int(match[1]))


def state_folder(job: Path, epoch: int, step: int) -> Path:
    """The state that a placement writes after a step; no other placement writes there.

    >>> state_folder(Path("jobs/job-1"), 2, 40).as_posix()
    'jobs/job-1/state/e2-s40'
    """
    return job / "state" / f"e{epoch}-s{step}"


def check_home(job: Path) -> None:
    """Checks that the home of a job's folder is there: who writes there would make one at a path that it has left.

    What is written so is lost, and the home cannot be put back to where a folder is.

    Raises:
        RunError: `save.failed`, as on a disk that takes nothing: what was to be written waits.
    """
    home = job.parent.parent
    if not home.is_dir():
        why = "the home of the service is not there: it was moved, or its disk is not mounted"
        raise RunError("save.failed", f"{job} could not be written.", where=str(home), why=why, fix="put it back")


def states_replaced_by(state: Path) -> list[Path]:
    """Older states that a state makes superfluous, and that stand in for it if it is damaged; newest first.

    One of a later step is none, whatever its epoch: it holds work that this state does not, and of whose steps the
    database has no rows. Nor is one of a later epoch, whose event has not come yet.
    """
    step = _number(state)[1]
    return [
        folder for folder in states_in(state.parent) if _number(folder) < _number(state) and _number(folder)[1] <= step
    ]


def states_beyond(folder: Path, step: int) -> list[Path]:
    """States of later steps, newest first: a database that is older than they are does not know them."""
    return [state for state in states_in(folder) if _number(state)[1] > step]


def states_in(folder: Path) -> list[Path]:
    """All states of a folder, newest first."""
    return sorted((path for path in folder.glob("e*-s*") if NAME.fullmatch(path.name)), key=_number, reverse=True)


def _number(state: Path) -> tuple[int, ...]:
    """Epoch and step of a state, from its name."""
    match = NAME.fullmatch(state.name)
    return () if match is None else tuple(map(int, match.groups()))
