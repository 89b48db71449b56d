"""Folders of the states of jobs: `state/eEPOCH-sSTEP` in the folder of a job."""

from __future__ import annotations

import re
from pathlib import Path

NAME = re.compile(r"e(\d+)-s(\d+)")


def state_folder(job: Path, epoch: int, step: int) -> Path:
    """The state that a placement writes after a step; no other placement writes there.

    >>> state_folder(Path("jobs/job-1"), 2, 40).as_posix()
    'jobs/job-1/state/e2-s40'
    """
    return job / "state" / f"e{epoch}-s{step}"


def states_before(state: Path) -> list[Path]:
    """The older states beside a state, newest first. A newer one may be there whose event has not come yet."""
    return [folder for folder in states_in(state.parent) if _number(folder) < _number(state)]


def states_in(folder: Path) -> list[Path]:
    """All states of a folder, newest first."""
    return sorted((path for path in folder.glob("e*-s*") if NAME.fullmatch(path.name)), key=_number, reverse=True)


def _number(state: Path) -> tuple[int, ...]:
    """Epoch and step of a state, from its name."""
    match = NAME.fullmatch(state.name)
    return () if match is None else tuple(map(int, match.groups()))
