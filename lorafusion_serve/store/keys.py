"""Keys: `tml-lf_`, 8 characters that name the key, `_`, 43 characters of 256 random bits. Only a digest is stored."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from lorafusion_jax.errors import ConfigError
from lorafusion_serve.store import tables as t

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
KEY = re.compile(r"tml-lf_([a-z2-7]{8})_([A-Za-z0-9_-]{43})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who asks, and what he may do."""

    name: str
    scopes: tuple[str, ...]
    key: str = ""

    @property
    def sees(self) -> str | None:
        """The owner whose things he sees; None: everything."""
        return None if "admin" in self.scopes else self.name


LOCAL = Owner(name="local", scopes=SCOPES)  # without any key, everybody on this machine


def add_key(
    connection: Connection, owner: str, scopes: Sequence[str] = USER, *, days: float | None = None
) -> tuple[str, str]:
    """Adds a key. Returns its name and the key, which is not stored.

    Raises:
        ConfigError: `keys.owner`, `keys.scope`.
    """
    if not NAME.fullmatch(owner):
        raise ConfigError("keys.owner", f"{owner!r} is not a name.", fix="lower-case letters, digits, . _ - (up to 63)")
    if wrong := [scope for scope in scopes if scope not in SCOPES]:
        raise ConfigError("keys.scope", f"there is no scope {wrong[0]!r}.", fix=f"some of {', '.join(SCOPES)}")
    name = base64.b32encode(secrets.token_bytes(5)).decode().lower()
    key = f"tml-lf_{name}_{secrets.token_urlsafe(32)}"
    now = time.time()
    row = {"id": name, "sha256": _digest(key), "owner": owner, "scopes": list(scopes), "created": now}
    expires = None if days is None else now + 86400 * days
    connection.execute(t.keys.insert().values(row | {"expires": expires, "revoked": False}))
    return name, key


def find_owner(connection: Connection, key: str) -> Owner | None:
    """Returns whose valid key this is."""
    match = KEY.fullmatch(key)
    row = None
    if match is not None:
        row = connection.execute(select(t.keys).where(t.keys.c.id == match[1])).mappings().one_or_none()
    if row is None or not hmac.compare_digest(row["sha256"], _digest(key)):
        return None
    if row["revoked"] or (row["expires"] is not None and row["expires"] < time.time()):
        return None
    return Owner(name=row["owner"], scopes=tuple(row["scopes"]), key=row["id"])


def list_keys(connection: Connection) -> list[dict[str, Any]]:
    rows = connection.execute(select(t.keys).order_by(t.keys.c.created)).mappings()
    return [{name: value for name, value in row.items() if name != "sha256"} for row in rows]


def revoke_key(connection: Connection, name: str) -> bool:
    """Revokes a key; returns whether it exists."""
    done = connection.execute(t.keys.update().where(t.keys.c.id == name).values(revoked=True))
    return bool(done.rowcount)


def has_keys(connection: Connection) -> bool:
    return connection.execute(select(t.keys.c.id).where(~t.keys.c.revoked).limit(1)).first() is not None


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
