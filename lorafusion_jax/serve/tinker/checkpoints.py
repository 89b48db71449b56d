"""Checkpoints: rows that name folders. They belong to their owner, do not change, and may have an end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime

from sqlalchemy import Connection, func, select

from lorafusion_jax.serve.api.problems import ApiError, not_found
from lorafusion_jax.serve.states import LIVE
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.tinker.futures import Row

SCHEME = "tinker://"
TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
MOST_SAMPLERS = 256  # of an owner; who was used least recently leaves first


def checkpoint_path(model: str, kind: str, name: str) -> str:
    """The name of a checkpoint outside.

    >>> checkpoint_path("ses-1:train:0", "weights", "first")
    'tinker://ses-1:train:0/weights/first'
    """
    return f"{SCHEME}{model}/{kind}/{name}"


def checkpoint_folder(stream: str, seq: int) -> str:
    """Where the checkpoint that a request writes is, relative to the home.

    >>> checkpoint_folder("ses-1:train:0", 3)
    'checkpoints/ses-1/train-0/3'
    """
    session, kind, number = stream.split(":")
    return f"checkpoints/{session}/{kind}-{number}/{seq}"


def find_checkpoint(connection: Connection, path: str, owner: str | None) -> Row | None:
    row = t.find_row(connection, t.api_checkpoints, path, owner)
    is_over = row is not None and row["expires"] is not None and row["expires"] < time.time()
    return None if is_over else row


def get_checkpoint(connection: Connection, path: str, owner: str | None) -> Row:
    """Returns a checkpoint of an owner.

    Raises:
        ApiError: 404.
    """
    row = find_checkpoint(connection, path, owner)
    if row is None:
        raise not_found("such checkpoint")
    return row


def waiting_save(connection: Connection, model: str, name: str, before: int | None = None) -> int | None:
    """The number of a request of a model that is to write a state of this name; None if none is.

    Args:
        before: only requests with a lower number.
    """
    requests, futures = t.api_requests.c, t.api_futures.c
    both = t.api_requests.join(t.api_futures, (futures.stream == requests.stream) & (futures.seq == requests.seq))
    columns = select(requests.seq, requests.body).select_from(both).order_by(requests.seq.desc())
    where = (requests.stream == model, requests.kind == "save_weights", futures.state == "waiting")
    rows = connection.execute(columns.where(*where, *([] if before is None else [requests.seq < before])))
    return next((seq for seq, body in rows if body.get("name") == name and not body.get("refused")), None)


def record(connection: Connection, model: Row, request: Row, size: int) -> tuple[Row, list[str]]:
    """Adds the checkpoint, or the sampler, that a request has written. Returns its result and folders to remove.

    Raises:
        ApiError: there is one of this name; the new one is not kept.
    """
    values, owner, folder = request["body"], model["owner"], checkpoint_folder(model["id"], request["seq"])
    if values["name"] is None:
        sampler = f"{model['session']}:sample:{values['sampler']}"
        return {"type": request["kind"], "sampling_session_id": sampler}, add_sampler(
            connection, sampler, owner, model["session"], model["base"], folder=folder
        )
    path = checkpoint_path(model["id"], values["kind"], values["name"])
    before = connection.execute(select(t.api_checkpoints).where(t.api_checkpoints.c.path == path)).mappings().first()
    if before is not None and not values["overwrite"] and find_checkpoint(connection, path, None) is not None:
        fix = "another name" + (", or overwrite" if values["kind"] == "weights" else "")
        raise ApiError(409, "api.checkpoint-exists", f"there is a checkpoint {path}.", fix=fix)
    connection.execute(t.api_checkpoints.delete().where(t.api_checkpoints.c.path == path))
    now = time.time()
    row = {"path": path, "owner": owner, "model": model["id"], "kind": values["kind"], "name": values["name"]}
    row |= {"folder": folder, "base": model["base"], "bytes": size, "config": model["config"]}
    row |= {"data": values["data"], "created": now, "expires": None if values["ttl"] is None else now + values["ttl"]}
    connection.execute(t.api_checkpoints.insert().values(row))
    folders = [] if before is None or before["folder"] == folder else [before["folder"]]
    return {"type": request["kind"], "path": path, "size_bytes": size}, folders


def add_sampler(
    connection: Connection,
    sampler: str,
    owner: str,
    session: str,
    base: str,
    *,
    path: str | None = None,
    folder: str | None = None,
) -> list[str]:
    """Adds a sampler; of a repeated request the first one stays. Returns folders of those that leave for it."""
    table = t.api_samplers
    if connection.execute(select(table.c.id).where(table.c.id == sampler)).first() is None:
        row = {"id": sampler, "owner": owner, "session": session, "base": base, "path": path, "folder": folder}
        connection.execute(table.insert().values(row | dict.fromkeys(("created", "used"), time.time())))
    newest = table.c.used.desc(), table.c.created.desc()
    rest = select(table).where(table.c.owner == owner).order_by(*newest).offset(MOST_SAMPLERS)
    return remove_samplers(connection, [dict(row) for row in connection.execute(rest).mappings()])


def remove_samplers(connection: Connection, samplers: Sequence[Row]) -> list[str]:
    """Removes samplers. Returns the folders that are theirs alone."""
    connection.execute(t.api_samplers.delete().where(t.api_samplers.c.id.in_([row["id"] for row in samplers])))
    return [row["folder"] for row in samplers if row["folder"] is not None and row["path"] is None]


def remove_expired(connection: Connection) -> list[str]:
    """Removes checkpoints whose time is over, and samplers of sessions that are. Returns their folders."""
    over = t.api_checkpoints.c.expires < time.time()
    folders = list(connection.execute(select(t.api_checkpoints.c.folder).where(over)).scalars())
    if folders:
        connection.execute(t.api_checkpoints.delete().where(over))
    sessions = select(t.api_sessions.c.id).where(t.api_sessions.c.ended.is_not(None))
    samplers = connection.execute(select(t.api_samplers).where(t.api_samplers.c.session.in_(sessions))).mappings().all()
    return folders + (remove_samplers(connection, [dict(row) for row in samplers]) if samplers else [])


def folders_in_use(connection: Connection) -> set[str]:
    """Folders that are read again if a worker is lost: of requests in a log, and of models without a state."""
    requests, jobs = t.api_requests.c, t.jobs.c
    bodies = select(requests.body).where(requests.kind.in_(("load_weights", "sample")))
    folders = {body.get("folder") for body in connection.execute(bodies).scalars()}
    models = t.api_models.join(t.jobs, jobs.id == t.api_models.c.job)
    begun = select(jobs.spec).select_from(models).where(jobs.state.in_(LIVE), jobs.state_path.is_(None))
    loads = [spec["stream"]["load"] for spec in connection.execute(begun).scalars()]
    return {folder for folder in folders if folder} | {load["folder"] for load in loads if load is not None}


def count_expired(connection: Connection) -> int:
    """How many checkpoints and samplers are over."""
    over = select(func.count()).select_from(t.api_checkpoints).where(t.api_checkpoints.c.expires < time.time())
    sessions = select(t.api_sessions.c.id).where(t.api_sessions.c.ended.is_not(None))
    samplers = select(func.count()).select_from(t.api_samplers).where(t.api_samplers.c.session.in_(sessions))
    return (connection.scalar(over) or 0) + (connection.scalar(samplers) or 0)


def show(row: Row) -> Row:
    """A checkpoint as the API shows it."""
    data = row["data"].get("user_metadata")
    return {
        "checkpoint_id": f"{row['kind']}/{row['name']}",
        "checkpoint_type": TYPES[row["kind"]],
        "time": moment(row["created"]),
        "tinker_path": row["path"],
        "size_bytes": row["bytes"],
        "public": False,
        "user_metadata": None if data is None else {key: str(value) for key, value in data.items()},
        "expires_at": None if row["expires"] is None else moment(row["expires"]),
    }


def moment(seconds: float) -> str:
    """A time as the API shows it.

    >>> moment(0)
    '1970-01-01T00:00:00+00:00'
    """
    return datetime.fromtimestamp(seconds, UTC).isoformat()
