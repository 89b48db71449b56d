"""The SQLite file: opened with full synchronisation, checked, written by one transaction at a time."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import URL, Connection, Engine, StaticPool, create_engine, event, func, select
from sqlalchemy.exc import DatabaseError, OperationalError

from lorafusion_jax.errors import LoraFusionError, RunError
from lorafusion_jax.files import PART, sync
from lorafusion_jax.serve.store import tables as t

log = logging.getLogger("lorafusion.control")
DAY_S, LOOK_S = 86_400.0, 600.0  # after which the file is copied, and between two looks at the age of the copy
BUSY_S = 5
GLANCE_S = 0.1  # that the event loop of the server may wait
WAITED = f"others have waited for it for {BUSY_S} s"
DAMAGE = ("malformed", "not a database")
RESTORE = "stop the service, and restore the file from a copy"
WRITABLE = "make the folder of the home and the files in it writable for this user"
NO_DAMAGE = ("store.busy", "store.no-space", "store.not-writable")
CAUSES = (
    ("full", "store.no-space", "free some space"),
    ("disk I/O", "store.no-space", "free some space on the disk of the home; if it has some, the disk itself fails"),
    ("locked", "store.busy", "try again"),
    ("readonly", "store.not-writable", WRITABLE),
    ("unable to open", "store.not-writable", WRITABLE),
    *((word, "store.damaged", RESTORE) for word in DAMAGE),
)


class StoreError(LoraFusionError, RuntimeError):
    """The database cannot be used now."""


type OtherVersion = Literal["migrate", "refuse", "read"]


class Database:
    """The file of a service.

    Args:
        other_version: what is done with a file of another version: bring an earlier one up to date after a copy of it,
            refuse it, or read it. Who migrates has to hold the home, because a server of that version may use it.

    Attributes:
        last_event: number of the newest event; readers of streams look at it.
    """

    def __init__(self, file: Path, *, other_version: OtherVersion = "migrate"):
        """Opens or creates the file.

        Raises:
            RunError: `store.damaged`, `store.version`.
            StoreError: `store.busy`, another process holds the file; `store.no-space`, no room for a copy.
        """
        self.file, self._writing, self._glancing = file, threading.Lock(), threading.Lock()
        self._engine = _engine(file, BUSY_S)
        self._glances = _engine(file, GLANCE_S, poolclass=StaticPool)
        with _naming_damage(file):
            version = self._version()
        self._identity = _identity(file)
        if version is not None and version != t.VERSION and other_version != "read":
            self._check_version(version, other_version)
            self.copy(file.with_name(f"{file.stem}.version-{version}{file.suffix}"))
        with _naming_damage(file):
            self._prepare(other_version)
        with self.read() as connection:
            self.last_event = connection.scalar(select(func.max(t.events.c.seq))) or 0

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A consistent view."""
        self._check_same()
        with _reporting(), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def glance(self) -> Iterator[Connection]:
        """A view for a row or two, on a connection of its own: it waits for no other reader and no writer."""
        self._check_same()
        with self._glancing, _reporting(), self._glances.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """One transaction, on the disk when the block ends; nothing of it if the block raises.

        Raises:
            StoreError: `store.busy`, another process holds the file, or others wait for it to be written;
                `store.replaced`.
        """
        self._check_same()
        until = time.monotonic() + BUSY_S
        if not self._writing.acquire(timeout=BUSY_S):
            raise StoreError("store.busy", "the database cannot be used now.", why=WAITED, fix="try again")
        try:
            with _reporting(), self._engine.connect() as connection:
                _wait_until(connection, until)
                with connection.begin():
                    connection.exec_driver_sql("UPDATE version SET number = number")  # takes the lock before reading
                    _wait_until(connection, time.monotonic() + BUSY_S)
                    yield connection
                    newest = connection.scalar(select(func.max(t.events.c.seq))) or 0
                self.last_event = newest
        finally:
            self._writing.release()

    @property
    def daily_copy(self) -> Path:
        """Where a service keeps a copy of the day, see `control.daily_copy`."""
        return _daily_copy(self.file)

    def add_event(self, connection: Connection, kind: str, owner: str, job: str | None, data: dict[str, Any]) -> None:
        row = {"kind": kind, "owner": owner, "job": job, "at": time.time(), "data": data}
        connection.execute(t.events.insert().values(row))

    def copy(self, file: Path) -> None:
        """Writes a whole and consistent copy, while others read and write.

        Raises:
            StoreError: `store.no-space`, `store.failed`, `store.replaced`; an older copy of this name stays.
        """
        self._check_same()
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f".{file.name}{PART}")
        part.unlink(missing_ok=True)
        try:
            part.touch(mode=0o600)
            with _reporting(), self._engine.connect() as connection:
                raw = connection.connection.driver_connection
                assert raw is not None
                raw.execute("VACUUM INTO ?", (str(part),))  # outside of any transaction
            sync(part)
            part.replace(file)
        except sqlite3.Error as problem:
            fix = "make room on the disk of the copy, and try again"
            raise StoreError("store.failed", f"{file} cannot be written.", why=str(problem), fix=fix) from None
        finally:
            part.unlink(missing_ok=True)
        sync(file.parent)

    def _check_same(self) -> None:
        """Refuses to work once another file is at the path of the open one: connections would mix the two.

        Raises:
            StoreError: `store.replaced`.
        """
        if _identity(self.file) != self._identity:
            raise StoreError(
                "store.replaced",
                f"{self.file} is not the file any more that this process has opened.",
                why="its folder was moved or exchanged, or the file replaced, while the service runs",
                fix="put it back, or stop the service and start it on the home that it shall have",
            )

    def close(self) -> None:
        self._engine.dispose()
        self._glances.dispose()

    def _prepare(self, other_version: OtherVersion) -> None:
        with self._engine.connect() as connection, connection.begin():
            connection.exec_driver_sql("CREATE TABLE IF NOT EXISTS version (number INTEGER NOT NULL)")
            version = connection.exec_driver_sql("SELECT number FROM version").scalar()
            if version is None:
                t.meta.create_all(connection)
                connection.exec_driver_sql(f"INSERT INTO version VALUES ({t.VERSION})")
            elif version != t.VERSION and other_version == "migrate":
                for earlier in range(version, t.VERSION):
                    for statement in t.MIGRATIONS[earlier]:
                        connection.exec_driver_sql(statement)
                connection.exec_driver_sql(f"UPDATE version SET number = {t.VERSION}")

    def _version(self) -> int | None:
        """Returns the version of the file; None if it is new."""
        with self._engine.connect() as connection:
            state = connection.exec_driver_sql("PRAGMA quick_check").scalar()
            if state != "ok":
                raise _damaged(self.file, str(state))
            if connection.exec_driver_sql("SELECT 1 FROM sqlite_master WHERE name = 'version'").first() is None:
                return None
            return connection.exec_driver_sql("SELECT number FROM version").scalar()

    def _check_version(self, version: int, other_version: OtherVersion) -> None:
        """Raises `store.version` for a file that this program does not bring up to date."""
        can_migrate = all(earlier in t.MIGRATIONS for earlier in range(version, t.VERSION)) and version < t.VERSION
        if can_migrate and other_version == "migrate":
            return
        raise RunError(
            "store.version",
            f"{self.file} has version {version}; this program reads version {t.VERSION}.",
            why="nothing was changed",
            fix="stop its server and start `lorafusion serve` of this program, which brings it up to date"
            if can_migrate
            else "start the version of lorafusion-jax that wrote it",
        )


def _identity(file: Path) -> tuple[int, int] | None:
    """Which file is at a path; None: there is none."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _wait_until(connection: Connection, until: float) -> None:
    """Limits how long the next statements wait for another process."""
    raw = connection.connection.driver_connection
    assert raw is not None
    raw.execute(f"PRAGMA busy_timeout={max(0, int(1000 * (until - time.monotonic())))}")


def _engine(file: Path, busy_s: float, **options: Any) -> Engine:
    engine = create_engine(
        URL.create("sqlite", database=str(file)),
        connect_args={"timeout": busy_s, "check_same_thread": False},
        **options,
    )

    def configure(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # transactions begin where `begin` says
        cursor = connection.cursor()
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", f"busy_timeout={busy_s * 1000:g}"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    event.listen(engine, "connect", configure)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    return engine


@contextmanager
def _reporting() -> Iterator[None]:
    try:
        yield
    except DatabaseError as problem:
        text = str(problem.orig)
        if not isinstance(problem, OperationalError) and not any(word in text for word in DAMAGE):
            raise
        code, fix = "store.failed", "try again"
        for word, code_of_word, fix_of_word in CAUSES:
            if word in text:
                code, fix = code_of_word, fix_of_word
        raise StoreError(code, "the database cannot be used now.", why=text, fix=fix) from None


@contextmanager
def _naming_damage(file: Path) -> Iterator[None]:
    """What cannot be read of a file that is opened is damaged."""
    try:
        with _reporting():
            yield
    except StoreError as problem:
        if problem.code in NO_DAMAGE:
            raise StoreError(problem.code, problem.what, where=str(file), why=problem.why, fix=problem.fix) from None
        raise _damaged(file, problem.why) from None
    except DatabaseError as problem:
        raise _damaged(file, str(problem.orig)) from None


def _daily_copy(file: Path) -> Path:
    return file.with_name(f"{file.stem}.copy{file.suffix}")


def _damaged(file: Path, why: str) -> RunError:
    copies = f"{RESTORE}, such as {_daily_copy(file).name} beside it: states and adapters are in jobs/"
    return RunError("store.damaged", f"{file} is damaged.", why=why, fix=copies)


class DailyCopy:
    """Replaces the copy beside the file once it is a day old. A copy that fails leaves the older one.

    Args:
        db: what is copied.
    """

    def __init__(self, db: Database):
        self._db, self._looked = db, time.monotonic()
        self._copying: threading.Thread | None = None

    def look(self) -> None:
        """Begins a copy if there is none of today."""
        if time.monotonic() - self._looked < LOOK_S or (self._copying is not None and self._copying.is_alive()):
            return
        self._looked = time.monotonic()
        file = self._db.daily_copy
        if not file.exists() or abs(time.time() - file.stat().st_mtime) > DAY_S:
            self._copying = threading.Thread(target=self._copy, name="copy", daemon=True)
            self._copying.start()

    def close(self, seconds: float) -> None:
        """Waits for a copy that is under way; one that takes longer is made again another time."""
        if self._copying is not None:
            self._copying.join(seconds)

    def _copy(self) -> None:
        try:
            self._db.copy(self._db.daily_copy)
        except (StoreError, OSError) as problem:
            log.warning("the database was not copied: %s", problem)
