"""Publishes finished adapters to a URL of fsspec, such as a bucket. What is served is the copy in the home folder."""

from __future__ import annotations

import logging
import queue
import threading
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from sqlalchemy import select

from lorafusion_jax.digests import FILE as DIGESTS
from lorafusion_jax.errors import ConfigError, install_line
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.database import Database, StoreError
from lorafusion_jax.serve.watched import start_watched

AGAIN_S = 60.0  # after a store that failed
log = logging.getLogger("lorafusion.control")


class Publisher:
    """Copies adapters in the background, one after another, and again until it works.

    Args:
        url: adapters go to `URL/OWNER/JOB/step-STEP`.
        home: of the service.

    Raises:
        ConfigError: `serve.artifacts`, the URL has no file system.
    """

    def __init__(self, url: str, db: Database, home: Path = Path()):
        self._url, self._db, self._home = url.rstrip("/"), db, home
        self._rows: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._ended, self._thread = threading.Event(), None
        self._lock = threading.Lock()
        self._busy: set[str] = set()
        self._not_before: dict[str, float] = {}
        _file_system(self._url)

    def look(self) -> None:
        """Begins to publish what is not published yet."""
        with self._db.read() as connection:
            rows = [
                dict(row) for row in connection.execute(select(t.artifacts).where(t.artifacts.c.url == "")).mappings()
            ]
        for row in rows:
            with self._lock:
                if row["id"] in self._busy or time.monotonic() < self._not_before.get(row["id"], 0.0):
                    continue
                self._busy.add(row["id"])
            self._rows.put(row)
            if self._thread is None:
                self._thread = start_watched("publish", self._work, self._ended)

    def close(self) -> None:
        """Ends at once: what is under way is published again by the next server."""
        self._ended.set()

    def _work(self) -> None:
        while not self._ended.is_set():
            with suppress(queue.Empty):
                self._publish(self._rows.get(timeout=1.0))

    def _publish(self, row: dict[str, Any]) -> None:
        target, problem = f"{self._url}/{row['owner']}/{row['job']}/step-{row['step']}", ""
        try:
            copy_folder(self._home / row["path"], target)
        except Exception as failure:  # stores have errors of their own kinds
            problem = f"{type(failure).__name__}: {failure}"
            log.warning("%s was not published to %s: %s", row["id"], target, problem)
        try:
            self._note(row, "" if problem else target, problem)
        except StoreError as busy:
            log.warning("%s", busy)
        with self._lock:
            self._busy.discard(row["id"])
            self._not_before[row["id"]] = time.monotonic() + AGAIN_S

    def _note(self, row: dict[str, Any], url: str, problem: str) -> None:
        with self._db.write() as connection:
            same = (t.artifacts.c.id == row["id"], t.artifacts.c.sha256 == row["sha256"])
            connection.execute(t.artifacts.update().where(*same).values(url=url, problem=problem))
            if problem != row["problem"] or url:
                kind, data = ("published", {"url": url}) if url else ("not-published", {"reason": problem})
                self._db.add_event(connection, kind, row["owner"], row["job"], data)


def copy_folder(folder: Path, url: str) -> None:
    """Copies a folder with digests to a URL. Its digests come last, so who finds them finds the folder whole.

    Raises:
        OSError: a file has another size there.
    """
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != DIGESTS]
    system, root = _file_system(url)
    for file in [*files, folder / DIGESTS]:
        remote = f"{root}/{file.relative_to(folder).as_posix()}"
        system.makedirs(remote.rpartition("/")[0], exist_ok=True)
        system.put_file(str(file), remote)
        if system.info(remote)["size"] != file.stat().st_size:
            raise OSError(f"{remote} has another size than {file.name}")


def _file_system(url: str) -> tuple[Any, str]:
    try:
        return import_module("fsspec.core").url_to_fs(url)
    except (ImportError, ValueError) as problem:
        fix = f"{install_line('artifacts')} and the package of the store, such as s3fs or gcsfs"
        message = f"--artifacts {url} is no place of a known kind."
        raise ConfigError("serve.artifacts", message, why=str(problem).splitlines()[0], fix=fix) from None
