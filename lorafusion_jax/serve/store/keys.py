"""Keys: `tml-lf_`, 8 characters that name the key, `_`, 43 characters of 256 random bits. Only a digest is stored.

Beside the database, `keys.log` has a line for each key that was added or revoked. It is only appended to. A home whose
database is replaced by an older copy therefore still knows that it had keys, and which of them were revoked.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import hmac
import json
import os
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import Connection, delete, or_, select

from lorafusion_jax.errors import ConfigError
from lorafusion_jax.files import sync
from lorafusion_jax.serve.states import LIVE
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.database import StoreError

SCOPES = (
    "jobs:read",
    "jobs:write",
    "data:read",
    "data:write",
    "adapters:read",
    "adapters:write",
    "cluster:read",
    "admin",
)
USER = tuple(scope for scope in SCOPES if scope != "admin")
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
NAMED = re.compile(r"tml-lf_([a-z2-7]{8})")  # how a key begins
KEY = re.compile(NAMED.pattern + "_([A-Za-z0-9_-]{43})")


LOG = "keys.log"
SESSION_S = 12 * 3600
MOST_SESSIONS = 20  # of a key: a further login ends the oldest


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who asks, and what he may do.

    Attributes:
        key: name of his key; empty: the service has no keys.
        session: digest of the session of the page that asks for him; empty: he sent the key itself.
    """

    name: str
    scopes: tuple[str, ...]
    key: str = ""
    session: str = ""

    @property
    def sees(self) -> str | None:
        """The owner whose things he sees; None: everything."""
        return None if "admin" in self.scopes else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a user has a right to, as an administrator has set it for a key.

    Attributes:
        share: weight of the user among the users who have work.
        jobs, places, bytes: most live jobs, places of sessions (with a policy: GPUs) at once, and bytes of data sets.
        priority, weight: largest that the user may give a job.
    """

    share: float = 1.0
    jobs: int | None = None
    places: int | None = None
    bytes: int | None = None
    priority: int = 100
    weight: float = 1000.0

    def check(self) -> None:
        """Checks values from outside.

        Raises:
            ConfigError: `keys.limit`.
        """
        least = {"share": 0.001, "jobs": 0, "places": 1, "bytes": 0, "priority": -100, "weight": 0.001}
        most = {"share": 1000.0, "priority": 100, "weight": 1000.0}
        for name, value in asdict(self).items():
            if value is not None and not least[name] <= value <= most.get(name, 2**62):
                top = f" and at most {most[name]:g}" if name in most else ""
                raise ConfigError("keys.limit", f"{name} must be at least {least[name]:g}{top}, not {value}.")

    @property
    def set_ones(self) -> dict[str, Any]:
        """Those that differ from the default."""
        return {name: value for name, value in asdict(self).items() if value != getattr(Limits(), name)}


LOCAL = Owner(name="local", scopes=SCOPES)  # without any key, everybody on this machine


def add_key(
    connection: Connection,
    owner: str,
    scopes: Sequence[str] = USER,
    *,
    days: float | None = None,
    limits: Limits | None = None,
) -> tuple[str, str]:
    """Adds a key. Returns its name and the key, which is not stored.

    Raises:
        ConfigError: `keys.owner`, `keys.scope`, `keys.limit`.
    """
    if not NAME.fullmatch(owner):
        raise ConfigError("keys.owner", f"{owner!r} is not a name.", fix="lower-case letters, digits, . _ - (up to 63)")
    if wrong := [scope for scope in scopes if scope not in SCOPES]:
        raise ConfigError("keys.scope", f"there is no scope {wrong[0]!r}.", fix=f"some of {', '.join(SCOPES)}")
    limits = limits or Limits()
    limits.check()
    name = base64.b32encode(secrets.token_bytes(5)).decode().lower()
    key = f"tml-lf_{name}_{secrets.token_urlsafe(32)}"
    now = time.time()
    row = {"id": name, "sha256": _digest(key), "owner": owner, "scopes": list(scopes), "created": now}
    expires = None if days is None else now + 86400 * days
    _log(connection, name, "added")
    connection.execute(t.keys.insert().values(row | {"expires": expires, "revoked": False, "limits": limits.set_ones}))
    return name, key


def set_limits(connection: Connection, name: str, limits: Limits) -> bool:
    """Sets the limits of a key; returns whether it exists. Live jobs of its owner have to keep to them, too.

    Raises:
        ConfigError: `keys.limit`.
    """
    limits.check()
    num_keys = connection.execute(t.keys.update().where(t.keys.c.id == name).values(limits=limits.set_ones)).rowcount
    _lower_jobs(connection, name)
    return bool(num_keys)


def _lower_jobs(connection: Connection, key: str) -> None:
    """Lowers priorities and weights of the live jobs of a key's owner to the largest that the owner may give."""
    owner = connection.scalar(select(t.keys.c.owner).where(t.keys.c.id == key))
    limits = limits_of(connection, owner or "")
    most = {"priority": limits.priority, "weight": limits.weight}
    above = or_(*(t.jobs.c[name] > value for name, value in most.items()))
    query = select(t.jobs.c.id, t.jobs.c.priority, t.jobs.c.weight).where(t.jobs.c.owner == owner, above)
    for job in connection.execute(query.where(t.jobs.c.state.in_(LIVE))).mappings().all():
        values = {name: min(job[name], value) for name, value in most.items()}
        connection.execute(t.jobs.update().where(t.jobs.c.id == job["id"]).values(values))
        row = {"kind": "changed", "owner": owner, "job": job["id"], "at": time.time(), "data": values}
        connection.execute(t.events.insert().values(row))


def user_limits(connection: Connection) -> dict[str, Limits]:
    """The limits of the users that have any. Of several valid keys the widest counts."""
    of_user: dict[str, list[Limits]] = {}
    for row in connection.execute(select(t.keys)).mappings():
        if _is_valid(dict(row)):
            of_user.setdefault(row["owner"], []).append(Limits(**row["limits"]))
    return {user: widest for user, limits in of_user.items() if (widest := _widest(limits)) != Limits()}


def limits_of(connection: Connection, owner: str) -> Limits:
    """The limits of a user."""
    return user_limits(connection).get(owner, Limits())


def _widest(limits: Sequence[Limits]) -> Limits:
    def most(name: str) -> Any:
        values = [getattr(of_key, name) for of_key in limits]
        return None if None in values else max(values)

    return Limits(**{field.name: most(field.name) for field in fields(Limits)})


def find_owner(connection: Connection, key: str) -> Owner | None:
    """Returns whose valid key this is."""
    match = KEY.fullmatch(key)
    row = None if match is None else _valid_row(connection, match[1])
    if row is None or not hmac.compare_digest(row["sha256"], _digest(key)):
        return None
    return Owner(name=row["owner"], scopes=tuple(row["scopes"]), key=row["id"])


def open_session(connection: Connection, owner: Owner) -> str:
    """Starts a session of the page for the owner of a key. Returns its secret, of which a digest is stored."""
    secret, now, sessions = secrets.token_urlsafe(32), time.time(), t.page_sessions
    connection.execute(delete(sessions).where(sessions.c.expires < now))
    newest = select(sessions.c.sha256).where(sessions.c.key == owner.key).order_by(sessions.c.expires.desc())
    older = newest.limit(-1).offset(MOST_SESSIONS - 1)
    connection.execute(delete(sessions).where(sessions.c.sha256.in_(older)))
    row = {"sha256": _digest(secret), "key": owner.key, "expires": now + SESSION_S}
    connection.execute(sessions.insert().values(row))
    return secret


def find_session(connection: Connection, secret: str) -> Owner | None:
    """Returns for whom a session of the page asks. It ends with its key."""
    return _session_owner(connection, _digest(secret))


def close_session(connection: Connection, secret: str) -> None:
    connection.execute(delete(t.page_sessions).where(t.page_sessions.c.sha256 == _digest(secret)))


def is_valid(connection: Connection, owner: Owner) -> bool:
    """Returns whether the key or the session with which somebody asked is valid still."""
    if owner.session:
        return _session_owner(connection, owner.session) is not None
    return _valid_row(connection, owner.key) is not None


def _session_owner(connection: Connection, sha256: str) -> Owner | None:
    session = t.find_row(connection, t.page_sessions, sha256)
    if session is None or session["expires"] < time.time():
        return None
    row = _valid_row(connection, session["key"])
    if row is None:
        return None
    return Owner(name=row["owner"], scopes=tuple(row["scopes"]), key=row["id"], session=sha256)


def _valid_row(connection: Connection, name: str) -> dict[str, Any] | None:
    row = t.find_row(connection, t.keys, name)
    return row if row is not None and _is_valid(row) else None


def _is_valid(row: dict[str, Any]) -> bool:
    return not row["revoked"] and (row["expires"] is None or row["expires"] >= time.time())


def list_keys(connection: Connection) -> list[dict[str, Any]]:
    rows = connection.execute(select(t.keys).order_by(t.keys.c.created)).mappings()
    return [{name: value for name, value in row.items() if name != "sha256"} for row in rows]


def note_use(connection: Connection, used: dict[str, float]) -> None:
    """Takes when keys were last used, and empties the mapping of it."""
    while used:
        name, at = used.popitem()
        connection.execute(t.keys.update().where(t.keys.c.id == name).values(used=at))


def revoke_key(connection: Connection, name: str) -> bool:
    """Revokes a key and its sessions; returns whether it exists."""
    if connection.execute(select(t.keys.c.id).where(t.keys.c.id == name)).first() is None:
        return False
    _log(connection, name, "revoked")
    connection.execute(t.keys.update().where(t.keys.c.id == name).values(revoked=True))
    connection.execute(delete(t.page_sessions).where(t.page_sessions.c.key == name))
    _lower_jobs(connection, name)
    return True


def is_last_admin(connection: Connection, name: str) -> bool:
    """Returns whether no other valid key administers the service."""
    rows = [dict(row) for row in connection.execute(select(t.keys)).mappings()]
    admins = {row["id"] for row in rows if _is_valid(row) and "admin" in row["scopes"]}
    return admins == {name}


def had_keys(connection: Connection) -> bool:
    """Returns whether the database has any key, valid or not."""
    return connection.execute(select(t.keys.c.id).limit(1)).first() is not None


def restore_revocations(connection: Connection) -> bool:
    """Revokes what was revoked before the database was replaced by an older copy. Returns whether there was ever a key.

    Raises:
        ConfigError: `keys.log`, the log cannot be read.
    """
    rows = {row["id"]: row["revoked"] for row in list_keys(connection)}
    log_entries = _read_log(_log_file(connection))
    for name in [name for name, is_revoked in rows.items() if not is_revoked and log_entries.get(name) == "revoked"]:
        revoke_key(connection, name)
    for name, is_revoked in rows.items():  # of a home that has no log yet
        if name not in log_entries:
            _log(connection, name, "revoked" if is_revoked else "added")
    return bool(rows or log_entries)


def _log_file(connection: Connection) -> Path:
    return Path(str(connection.engine.url.database)).with_name(LOG)


def _log(connection: Connection, name: str, event: Literal["added", "revoked"]) -> None:
    """Notes a change before it is made: a line too many refuses somebody, a missing one admits everybody."""
    line = "\n" + json.dumps({"key": name, "event": event, "at": time.time()}) + "\n"  # the last one may be cut
    path = _log_file(connection)
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, line.encode())
            os.fsync(file)
        finally:
            os.close(file)
        sync(path.parent)
    except OSError as problem:
        code = "store.no-space" if problem.errno == errno.ENOSPC else "store.failed"
        message, why = f"{path.name} cannot be written.", problem.strerror or ""
        raise StoreError(
            code, message, why=why, fix="make room on the disk of the home folder, and try again"
        ) from None


def _read_log(file: Path) -> dict[str, str]:
    """Returns key → what happened to it last. A line that was cut by a power loss still says that there was a key."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return {}
    except OSError as problem:
        raise ConfigError("keys.log", f"{file} cannot be read.", why=str(problem.strerror), fix="mend it") from None
    events: dict[str, str] = {}
    for line in filter(str.strip, lines):
        try:
            entry = json.loads(line)
            name, event = str(entry["key"]), str(entry["event"])
        except (ValueError, TypeError, KeyError):
            name, event = line, "added"
        if events.get(name) != "revoked":
            events[name] = event
    return events


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
