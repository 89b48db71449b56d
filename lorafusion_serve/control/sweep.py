"""Removes files that nobody needs any more: of deleted jobs and adapters, and what killed processes have left.

Only names that the service gives are touched, in folders of jobs that the database knows. A server that starts looks at
every folder once, so what an earlier one did not finish is done then.
"""

from __future__ import annotations

import logging
import re
import shutil
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import select

from lorafusion_jax.checkpoint.new_folder import NEW, OLD
from lorafusion_jax.files import GONE, PART
from lorafusion_serve.settings import Settings
from lorafusion_serve.state_folders import NAME as STATE
from lorafusion_serve.state_folders import states_before
from lorafusion_serve.states import ENDED
from lorafusion_serve.store import tables as t
from lorafusion_serve.store.database import Database
from lorafusion_serve.store.jobs import Job

AT_ONCE = 4  # jobs of one round
JOB, ADAPTER = re.compile(r"job-[0-9a-f]{12}"), re.compile(r"step-\d+-e\d+")
DATASET, UPLOAD = re.compile(r"sha256-[0-9a-f]{64}"), re.compile(r"\.upload-[0-9a-f]{16}")
LEFT = re.compile(rf"\..+({'|'.join(map(re.escape, (NEW, OLD, GONE, PART)))})")
REFERENCES = ("references", "references.json")
log = logging.getLogger("lorafusion.control")


class Sweeper:
    """Sweeps the folders of jobs, some in each round of the controller."""

    def __init__(self, settings: Settings, db: Database):
        self._settings, self._db = settings, db
        self._todo: deque[str] = deque()
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Before requests are served: removes uploads that were broken off, and lists the folders of all jobs."""
        with self._db.read() as connection:
            known = set(connection.execute(select(t.datasets.c.id)).scalars())
        for folder in _folders(self._settings.datasets):
            if UPLOAD.fullmatch(folder.name) or (DATASET.fullmatch(folder.name) and folder.name not in known):
                _remove(folder)
        for folder in sorted(_folders(self._settings.home / "jobs")):
            if JOB.fullmatch(folder.name):
                self.add(folder.name)

    def add(self, job: str) -> None:
        """Looks at a job's folder in one of the next rounds."""
        with self._lock:
            if job not in self._todo:
                self._todo.append(job)

    def work(self, most: int = AT_ONCE) -> None:
        """Looks at the folders of some jobs."""
        for _ in range(most):
            with self._lock:
                if not self._todo:
                    return
                job = self._todo.popleft()
            self._sweep(job)

    def _sweep(self, job: str) -> None:
        with self._db.read() as connection:
            row = connection.execute(select(t.jobs).where(t.jobs.c.id == job)).mappings().one_or_none()
            kept = set(connection.execute(select(t.artifacts.c.path).where(t.artifacts.c.job == job)).scalars())
        if row is None:
            return  # of a job that the database does not know: it may be an older copy
        folder = self._settings.job(job)
        for path in _unneeded(dict(row), folder, kept):
            _remove(path)
        if row["state"] == "deleted":
            for path in (folder / "state", folder / "adapter", folder):
                _remove_empty(path)
            with self._db.write() as connection:
                connection.execute(t.metrics.delete().where(t.metrics.c.job == job))


def _unneeded(job: Job, folder: Path, kept: set[str]) -> Iterator[Path]:
    """Yields what is there and nobody needs.

    Args:
        kept: folders of the job's adapters.
    """
    if job["state"] not in ENDED | {"deleted"}:  # a worker may be writing
        older = states_before(Path(job["state_path"])) if job["state_path"] else []
        yield from (path for path in older[1:] if not path.is_symlink())
        return
    for parent in (folder, folder / "state", folder / "adapter"):
        yield from (path for path in _entries(parent) if LEFT.fullmatch(path.name))
    if job["state"] in ("done", "deleted"):
        yield from (path for path in _folders(folder / "state") if STATE.fullmatch(path.name))
        adapters = (path for path in _folders(folder / "adapter") if ADAPTER.fullmatch(path.name))
        yield from (path for path in adapters if str(path) not in kept)
        yield from (path for path in _entries(folder) if path.name in REFERENCES)


def _entries(folder: Path) -> list[Path]:
    """What is in a folder of the service; nothing is followed that leads elsewhere."""
    if folder.is_symlink() or not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if not path.is_symlink()]


def _folders(folder: Path) -> list[Path]:
    return [path for path in _entries(folder) if path.is_dir()]


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    except OSError as problem:  # the next server tries again
        log.warning("%s cannot be removed: %s", path, problem)


def _remove_empty(folder: Path) -> None:
    if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
        folder.rmdir()
