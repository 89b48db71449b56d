"""Puts files aside that nobody needs any more: of deleted jobs and adapters, and what killed processes have left.

Only what a row of the database names as deleted or replaced is touched, and names of files that are half written. What
has no explanation stays: the database may be an older copy, or new. A file is renamed first and removed a day later. A
server that starts looks at every folder once, so what an earlier one did not finish is done then.
"""

from __future__ import annotations

import logging
import re
import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from sqlalchemy import func, select

from lorafusion_jax.digests import has_digests
from lorafusion_jax.files import GONE, PART
from lorafusion_jax.new_folder import NEW, OLD
from lorafusion_jax.serve.settings import Settings
from lorafusion_jax.serve.state_folders import JOB, adapter_number, states_in, states_replaced_by
from lorafusion_jax.serve.states import ENDED
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.database import Database
from lorafusion_jax.serve.store.jobs import Job

AT_ONCE = 4  # jobs of one round
DAY_S, LOOK_S = 86_400, 600.0
STEPS_S, DECISIONS_S = 7 * DAY_S, 30 * DAY_S  # that events of steps, which are in the metrics, and decisions stay
MOST_ROWS = 10_000  # of a table that are removed at once
REMOVED = ".removed"  # folder of what is put aside, below its first folder: on the same disk
UPLOAD, ASIDE = re.compile(r"\.upload-[0-9a-f]{16}"), re.compile(r"(\d+)-[0-9a-f]{8}")
LEFT = re.compile(rf"\.(.+)({'|'.join(map(re.escape, (NEW, OLD, GONE, PART)))})")
REFERENCES = ("references", "references.json")
log = logging.getLogger("lorafusion.control")


class Sweeper:
    """Sweeps the folders of jobs, some in each round of the controller."""

    def __init__(self, settings: Settings, db: Database):
        self._settings, self._db = settings, db
        self._todo: deque[str] = deque()
        self._lock = threading.Lock()
        self._emptied = 0.0

    def begin(self) -> None:
        """Before requests are served: removes uploads that were broken off, and lists the folders of all jobs."""
        for folder in _folders(self._settings.datasets):
            if UPLOAD.fullmatch(folder.name):
                _remove(folder)
        with self._db.read() as connection:
            removals = connection.execute(select(t.removals.c.path)).scalars().all()
            datasets = set(connection.execute(select(t.datasets.c.id)).scalars())
        for path in removals:
            if path.startswith("datasets/") and Path(path).name not in datasets:
                self.remove(path)
        for folder in sorted(_folders(self._settings.home / "jobs")):
            if JOB.fullmatch(folder.name):
                self.add(folder.name)

    def add(self, job: str) -> None:
        """Looks at a job's folder in one of the next rounds."""
        with self._lock:
            if job not in self._todo:
                self._todo.append(job)

    def work(self, most: int = AT_ONCE) -> None:
        """Looks at the folders of some jobs, and removes what was put aside a day ago, and old rows."""
        if not self._emptied or time.monotonic() - self._emptied > LOOK_S:
            self._empty()
            self._forget()
        for _ in range(most):
            with self._lock:
                if not self._todo:
                    return
                job = self._todo.popleft()
            self._sweep(job)

    def remove(self, path: str) -> None:
        """Puts aside what `removals` names, and forgets it."""
        if self.put_aside(self._settings.path(path)):
            with self._db.write() as connection:
                connection.execute(t.removals.delete().where(t.removals.c.path == path))

    def put_aside(self, path: Path) -> bool:
        """Renames a file or folder of the home: it is removed in a day. Returns whether it is gone from its place."""
        first, *subfolders = path.relative_to(self._settings.home).parts
        aside = Path(self._settings.home, first, REMOVED, f"{int(time.time())}-{secrets.token_hex(4)}", *subfolders)
        within = [path, *path.parents][: len(subfolders)]
        try:
            if any(part.is_symlink() for part in within):  # it leads elsewhere
                return False
            if path.exists():
                aside.parent.mkdir(parents=True)
                path.rename(aside)
        except OSError as problem:  # the next server tries again
            log.warning("%s cannot be put aside: %s", path, problem)
            return False
        return True

    def _sweep(self, job: str) -> None:
        with self._db.read() as connection:
            row = t.find_row(connection, t.jobs, job)
            adapters = connection.execute(select(t.artifacts.c.path).where(t.artifacts.c.job == job)).scalars().all()
            is_finish = (t.transitions.c.job == job, t.transitions.c.event == "finished")
            had_adapter = connection.execute(select(t.transitions.c.number).where(*is_finish)).first() is not None
            below = t.removals.c.path.startswith(f"jobs/{job}/", autoescape=True)
            removals = connection.execute(select(t.removals.c.path).where(below)).scalars().all()
        if row is None:
            return  # of a job that the database does not know: it may be an older copy
        for path in removals:
            if path not in adapters:
                self.remove(path)
        folder, current = self._settings.job(job), [self._settings.path(path) for path in adapters]
        state = None if row["state_path"] is None else self._settings.path(row["state_path"])
        for path in _unneeded(dict(row), folder, state, current, had_adapter=had_adapter):
            self.put_aside(path)
        if row["state"] == "deleted":
            for path in (folder / "state", folder / "adapter", folder):
                _remove_empty(path)
            with self._db.write() as connection:
                connection.execute(t.metrics.delete().where(t.metrics.c.job == job))

    def _forget(self) -> None:
        """Removes old events of steps, and old decisions; never the newest row, because numbers are not used again."""
        of_steps = t.events.c.kind.in_(("step", "eval"))
        with self._db.write() as connection:
            for table, seconds, where in ((t.events, STEPS_S, [of_steps]), (t.decisions, DECISIONS_S, [])):
                newest = connection.scalar(select(func.max(table.c.seq))) or 0
                is_past = [table.c.at < time.time() - seconds, table.c.seq < newest, *where]
                numbers = select(table.c.seq).where(*is_past).order_by(table.c.seq).limit(MOST_ROWS)
                connection.execute(table.delete().where(table.c.seq.in_(numbers.scalar_subquery())))

    def _empty(self) -> None:
        """Removes what was put aside a day ago."""
        self._emptied = time.monotonic()
        for parent in (self._settings.datasets, self._settings.home / "jobs"):
            for folder in _folders(parent / REMOVED):
                match = ASIDE.fullmatch(folder.name)
                if match is not None and time.time() - int(match[1]) > DAY_S:
                    _remove(folder)


def _unneeded(
    job: Job, folder: Path, state: Path | None, adapters: Sequence[Path], *, had_adapter: bool
) -> Iterator[Path]:
    """Yields what the rows of a job name as replaced, and what is half written.

    Args:
        state: the present state of the job.
        adapters: folders of the job's adapters.
        had_adapter: whether the job has ever had an adapter.
    """
    if job["state"] not in ENDED | {"deleted"}:  # a worker may be writing
        if state is not None and state.is_dir():
            yield from (path for path in states_replaced_by(state)[1:] if not path.is_symlink())
        return
    for parent in (folder, folder / "state", folder / "adapter"):
        yield from (path for path in _entries(parent) if _is_half_written(path))
    numbers = {path: adapter_number(path.name) for path in _folders(folder / "adapter")}
    complete = [adapter_number(path.name) or (0, 0) for path in adapters if has_digests(path)]
    if job["state"] == "deleted" or (job["state"] == "done" and complete):
        yield from (path for path in states_in(folder / "state") if not path.is_symlink())
        yield from (path for path in _entries(folder) if path.name in REFERENCES)
        newest = max(complete, default=(0, 0))
        for path, number in numbers.items():
            is_orphan = job["state"] == "deleted" and not had_adapter
            if path not in adapters and number is not None and (number < newest or is_orphan):
                yield path


def _is_half_written(path: Path) -> bool:
    match = LEFT.fullmatch(path.name)
    return match is not None and (match[2] != OLD or path.with_name(match[1]).exists())


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
