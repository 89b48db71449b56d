"""The folder of a run from its first second: the process that starts it, and in which phase it is.

`start.json` exists while a run starts or resumes: {"phase": text, "phase_began": s, "began": s}, in seconds since the
epoch. A start that fails leaves nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lorafusion_jax.checkpoint.run_lock import FILE as LOCK
from lorafusion_jax.checkpoint.run_lock import run_lock
from lorafusion_jax.files import PART, make_folders
from lorafusion_jax.readable import SETTINGS, read_text

START, PLAN = "start.json", "plan.json"  # a folder with a plan is a run that was created


class StartFile:
    """Keeps the phase of a start in a run folder."""

    def __init__(self, folder: Path):
        self._file, self._began, self._ended = folder / START, round(time.time(), 3), False
        self.record("getting ready")

    def record(self, phase: str) -> None:
        """Replaces the phase; does nothing after `remove`."""
        if self._ended:
            return
        part = self._file.with_name(f".{START}{PART}")
        content = {"phase": phase, "phase_began": round(time.time(), 3), "began": self._began}
        with suppress(OSError):  # a full disk is reported where it matters
            part.write_text(json.dumps(content), encoding="utf-8")
            part.replace(self._file)

    def remove(self) -> None:
        self._ended = True
        with suppress(OSError):
            self._file.unlink(missing_ok=True)


@contextmanager
def start_file(folder: Path) -> Iterator[StartFile]:
    """Yields the file of a start, and removes it at the end."""
    file = StartFile(folder)
    try:
        yield file
    finally:
        file.remove()


@contextmanager
def begun_folder(path: Path) -> Iterator[StartFile]:
    """Creates the folder of a new run and locks it. Removes it again if no run was created in it.

    Raises:
        CheckpointError: `run.in-use`.
    """
    missing = make_folders(path)
    try:
        with run_lock(path):
            try:
                with start_file(path) as file:
                    yield file
            finally:
                if not (path / PLAN).exists():
                    with suppress(OSError):
                        (path / LOCK).unlink(missing_ok=True)
    finally:
        if not (path / PLAN).exists():
            for folder in missing:
                with suppress(OSError):  # someone else uses it
                    folder.rmdir()


def read_start(path: Path) -> dict | None:
    """Reads the phase of a start; None if none is under way, or if its file is damaged."""
    try:
        start = json.loads(read_text(path / START, SETTINGS))
        return {"phase": str(start["phase"])} | {key: float(start[key]) for key in ("phase_began", "began")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
