"""Delivers finished adapters: to a URL of fsspec, such as a bucket, and into a server of another program.

What is served is the copy in the home folder.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from sqlalchemy import select

from lorafusion_jax.digests import FILE as DIGESTS
from lorafusion_jax.errors import ConfigError, install_line
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.peft.folder import read_adapter
from lorafusion_jax.report.servers import START as SERVERS
from lorafusion_jax.report.servers import checked_url, folder_loader, type_of
from lorafusion_jax.serve.settings import Settings
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.database import Database, StoreError
from lorafusion_jax.serve.watched import start_watched

AGAIN_S = 60.0  # after a delivery that failed
ANSWER_S = 120.0  # for each answer of a server
log = logging.getLogger("lorafusion.control")


class Delivery:
    """Delivers finished adapters in the background, one after another, and again until it works."""

    kind, name = "", ""  # of its events: KIND and not-KIND; of its thread

    def __init__(self, db: Database, home: Path):
        self._db, self._home = db, home
        self._rows: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._ended, self._thread = threading.Event(), None
        self._lock = threading.Lock()
        self._busy: set[str] = set()
        self._not_before: dict[str, float] = {}

    def look(self) -> None:
        """Begins to deliver what is not delivered yet."""
        for row in self._undelivered():
            with self._lock:
                if row["id"] in self._busy or time.monotonic() < self._not_before.get(row["id"], 0.0):
                    continue
                self._busy.add(row["id"])
            self._rows.put(row)
            if self._thread is None:
                self._thread = start_watched(self.name, self._work, self._ended)

    def close(self) -> None:
        """Ends at once: what is under way is delivered again by the next server."""
        self._ended.set()

    def _work(self) -> None:
        while not self._ended.is_set():
            with suppress(queue.Empty):
                self._try(self._rows.get(timeout=1.0))

    def _try(self, row: dict[str, Any]) -> None:
        url, problem = "", ""
        try:
            url = self._deliver(row)
        except Exception as failure:  # stores and servers have errors of their own kinds
            problem = f"{type(failure).__name__}: {failure}"
            log.warning("%s was not %s: %s", row["id"], self.kind, problem)
        try:
            self._note(row, url, problem)
        except StoreError as busy:
            log.warning("%s", busy)
        with self._lock:
            self._busy.discard(row["id"])
            self._not_before[row["id"]] = time.monotonic() + AGAIN_S

    def _add_event(self, connection: Any, row: dict[str, Any], url: str, problem: str) -> None:
        kind, data = (self.kind, {"url": url}) if url else (f"not-{self.kind}", {"reason": problem})
        self._db.add_event(connection, kind, row["owner"], row["job"], data)

    def _undelivered(self) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _deliver(self, row: dict[str, Any]) -> str:
        """Returns where it is now."""
        raise NotImplementedError

    def _note(self, row: dict[str, Any], url: str, problem: str) -> None:
        raise NotImplementedError


class Publisher(Delivery):
    """Copies adapters to a file system.

    Args:
        url: adapters go to `URL/OWNER/JOB/step-STEP`.
        home: of the service.

    Raises:
        ConfigError: `serve.artifacts`, the URL has no file system.
    """

    kind, name = "published", "publish"

    def __init__(self, url: str, db: Database, home: Path = Path()):
        super().__init__(db, home)
        self._url = url.rstrip("/")
        _file_system(self._url)

    def _undelivered(self) -> list[dict[str, Any]]:
        with self._db.read() as connection:
            rows = connection.execute(select(t.artifacts).where(t.artifacts.c.url == "")).mappings()
            return [dict(row) for row in rows]

    def _deliver(self, row: dict[str, Any]) -> str:
        target = f"{self._url}/{row['owner']}/{row['job']}/step-{row['step']}"
        copy_folder(self._home / row["path"], target)
        return target

    def _note(self, row: dict[str, Any], url: str, problem: str) -> None:
        with self._db.write() as connection:
            same = (t.artifacts.c.id == row["id"], t.artifacts.c.sha256 == row["sha256"])
            connection.execute(t.artifacts.update().where(*same).values(url=url, problem=problem))
            if problem != row["problem"] or url:
                self._add_event(connection, row, url, problem)


class HandOver(Delivery):
    """Loads adapters into a running vLLM or SGLang, under their ids, and asks each one prompt.

    Adapters of before the first start with this server are handed over, too. A server that starts anew has none of
    them: only those that finish later go there.

    Args:
        target: "vllm=URL" or "sglang=URL".
        bases: name → folder of a base model.
        key: of the server.

    Raises:
        ConfigError: `serve.handover`, `handover.options`.
    """

    kind, name = "handed-over", "hand-over"

    def __init__(self, target: str, db: Database, home: Path, bases: Mapping[str, Path], key: str | None = None):
        super().__init__(db, home)
        self._server, _, url = target.partition("=")
        if self._server not in SERVERS or not url:
            message = f"--handover {target} names no server."
            raise ConfigError("serve.handover", message, fix="vllm=http://HOST:8000, or sglang=http://HOST:30000")
        self._url, self._bases, self._key, self._problems = checked_url(url), bases, key, dict[str, str]()
        with db.read() as connection:
            done = connection.execute(select(t.events.c.data).where(t.events.c.kind == self.kind)).scalars()
            self._delivered = {data["url"] for data in done}

    def _undelivered(self) -> list[dict[str, Any]]:
        with self._db.read() as connection:
            query = select(t.artifacts, t.jobs.c.spec["base"].label("base")).join(t.jobs)
            rows = [dict(row) for row in connection.execute(query).mappings()]
        return [row for row in rows if self._target(row) not in self._delivered]

    def _target(self, row: dict[str, Any]) -> str:
        return f"{self._url}#{row['id']}-step-{row['step']}"

    def _deliver(self, row: dict[str, Any]) -> str:
        folder, base = self._home / row["path"], self._bases[row["base"]]
        spec, target = read_adapter(folder)[0], self._target(row)
        model_type = type_of(ModelConfig.from_hf(base))
        server, load = folder_loader(
            self._server, self._url, spec, str(base), model_type, key=self._key, timeout_s=ANSWER_S
        )
        load(server, target.rpartition("#")[2], str(folder))("Hello", 8)
        return target

    def _note(self, row: dict[str, Any], url: str, problem: str) -> None:
        if url:
            self._delivered.add(url)
        if url or problem != self._problems.get(row["id"]):
            self._problems[row["id"]] = problem
            with self._db.write() as connection:
                self._add_event(connection, row, url, problem)


def deliveries(settings: Settings, db: Database) -> list[Delivery]:
    """What a service does with finished adapters."""
    publisher = [Publisher(settings.artifacts, db, settings.home)] if settings.artifacts else []
    key = settings.handover_key
    handover = [HandOver(settings.handover, db, settings.home, settings.bases, key)] if settings.handover else []
    return [*publisher, *handover]


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
