"""lorafusion keys … and lorafusion backup: what is done with the database of a service on its machine."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorafusion_jax.errors import ConfigError, did_you_mean_path, first_few, quoted
from lorafusion_jax.report.console import out, plain_table

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from lorafusion_jax.serve.store.database import Database, OtherVersion

app = typer.Typer(no_args_is_help=True, help="Keys of a service, by its home.")
Home = Annotated[Path, typer.Option(help="home of the service")]
HOME = Path("service")
Share = Annotated[float, typer.Option(help="weight of the user among those who have work")]
Jobs = Annotated[int | None, typer.Option("--most-jobs", help="live jobs of the user")]
Places = Annotated[int | None, typer.Option("--most-places", help="places, with a policy GPUs, of the user at once")]
Bytes = Annotated[int | None, typer.Option("--most-bytes", help="bytes of the user's data sets")]
Priority = Annotated[int, typer.Option("--most-priority", help="largest priority that the user gives a job")]
Weight = Annotated[float, typer.Option("--most-weight", help="largest weight that the user gives a job")]


@app.command()
def add(
    owner: Annotated[str, typer.Argument(metavar="OWNER", help="who the key belongs to")],
    scope: Annotated[list[str] | None, typer.Option(help="what it may do", show_default="all but admin")] = None,
    admin: Annotated[bool, typer.Option("--admin", help="everything, also what belongs to others")] = False,
    days: Annotated[float | None, typer.Option(min=0.001, help="how long it is valid")] = None,
    share: Share = 1.0,
    jobs: Jobs = None,
    places: Places = None,
    data_bytes: Bytes = None,
    priority: Priority = 100,
    weight: Weight = 1000.0,
    home: Home = HOME,
) -> None:
    """Adds a key and prints it. It is not stored and cannot be shown again.

    Example: lorafusion keys add ana --home service --share 2 --most-jobs 100
    """
    from lorafusion_jax.serve.store.keys import SCOPES, USER, Limits, add_key

    limits = Limits(share=share, jobs=jobs, places=places, bytes=data_bytes, priority=priority, weight=weight)
    limits.check()
    db = open_home(home, new=True)
    with db.write() as connection:
        _, key = add_key(connection, owner, SCOPES if admin else tuple(scope or USER), days=days, limits=limits)
    db.close()
    print(key)


@app.command("limits")
def change_limits(
    key: Annotated[str, typer.Argument(metavar="KEY", help="its name, the 8 characters after tml-lf_")],
    share: Share = 1.0,
    jobs: Jobs = None,
    places: Places = None,
    data_bytes: Bytes = None,
    priority: Priority = 100,
    weight: Weight = 1000.0,
    home: Home = HOME,
) -> None:
    """Sets what the owner of a key has a right to; what is left out has its default.

    Example: lorafusion keys limits abcdefgh --share 2 --most-priority 0
    """
    from lorafusion_jax.serve.store.keys import Limits, set_limits

    db = open_home(home)
    with db.write() as connection:
        limits = Limits(share=share, jobs=jobs, places=places, bytes=data_bytes, priority=priority, weight=weight)
        name = _key_name(connection, key, home)
        set_limits(connection, name, limits)
    db.close()
    print(f"{name} changed")


@app.command("ls")
def list_all(home: Home = HOME) -> None:
    """Lists keys, without their secrets.

    Example: lorafusion keys ls --home service
    """
    from lorafusion_jax.serve.store.keys import list_keys

    db = open_home(home)
    table = plain_table(("key", "owner", "scopes", "created", "used", "state"), ())
    with db.read() as connection:
        for row in list_keys(connection):
            created_at, used_at = (
                time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) if at else "never"
                for at in (row["created"], row["used"])
            )
            is_expired = row["expires"] is not None and row["expires"] < time.time()
            state = "revoked" if row["revoked"] else "expired" if is_expired else "valid"
            table.add_row(row["id"], row["owner"], " ".join(row["scopes"]), created_at, used_at, state)
    db.close()
    out().print(table)


@app.command()
def revoke(
    key: Annotated[str, typer.Argument(metavar="KEY", help="its name, the 8 characters after tml-lf_")],
    home: Home = HOME,
) -> None:
    """Revokes a key at once.

    Example: lorafusion keys revoke abcdefgh --home service
    """
    from lorafusion_jax.serve.store.keys import revoke_key

    db = open_home(home)
    with db.write() as connection:
        name = _key_name(connection, key, home)
        revoke_key(connection, name)
    db.close()
    print(f"{name} revoked")


def _key_name(connection: Connection, typed: str, home: Path) -> str:
    """The name of a key that is there, from its name or a text with the key, which no message repeats.

    Raises:
        ConfigError: `keys.unknown`.
    """
    from lorafusion_jax.serve.store.keys import NAME, NAMED, list_keys

    match = NAMED.search(typed)
    name, rows = match[1] if match else typed, list_keys(connection)
    if any(row["id"] == name for row in rows):
        return name
    of_owner = [row["id"] for row in rows if row["owner"] == name and not row["revoked"]]
    fix = f"a key of {name}: {first_few(of_owner, 3)}" if of_owner else f"lorafusion keys ls --home {quoted(home)}"
    raise ConfigError("keys.unknown", f"there is no key {name if NAME.fullmatch(name) else 'of that name'}.", fix=fix)


def backup(
    to: Annotated[Path, typer.Argument(metavar="FILE", help="the copy; replaces a file once it is whole")],
    home: Home = HOME,
) -> None:
    """Copies the database of a service, also while it runs. Copy datasets/, jobs/ and keys.log of its home after it.

    Example: lorafusion backup backups/service.db --home service
    """
    db = open_home(home, other_version="read")
    try:
        db.copy(to.absolute())
    finally:
        db.close()
    print(f"the database of {home} copied to {to}; copy its datasets/, jobs/ and keys.log, too")


def open_home(home: Path, *, new: bool = False, other_version: OtherVersion = "refuse") -> Database:
    """Opens the database of a home.

    Args:
        new: make it if it is not there.
        other_version: what to do with a database of another version, see `Database`; only a server migrates.

    Raises:
        ConfigError: `keys.home`.
    """
    from lorafusion_jax.serve.server import open_database
    from lorafusion_jax.serve.settings import Settings

    os.umask(0o077)
    settings = Settings(home=home.absolute(), bases={}, places={})
    if not new and not settings.database.is_file():
        message = f"{home} is not the home of a service: it has no {settings.database.name}."
        beside = home.absolute().parent.glob(f"*/{settings.database.name}")
        near = did_you_mean_path(home, [path.parent.name for path in beside])
        raise ConfigError("keys.home", message, fix=near or "--home FOLDER of lorafusion serve")
    return open_database(settings, other_version=other_version)
