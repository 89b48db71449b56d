"""Routes of models and checkpoints that are there already: lists, ends, downloads."""

from __future__ import annotations

import hashlib
import hmac
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse, StreamingResponse
from sqlalchemy import Connection, func, select

from lorafusion_jax.serve.api.problems import ApiError, not_found
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.tinker.access import PREFIX, Downloader, InTurn, Reader, ServiceOf, StreamsOf, Writer
from lorafusion_jax.serve.tinker.checkpoints import checkpoint_path, find_checkpoint, get_checkpoint, moment, show
from lorafusion_jax.serve.tinker.futures import Row
from lorafusion_jax.serve.tinker.log import find_model
from lorafusion_jax.serve.tinker.requests import Id, Ttl, check_ttl

router = APIRouter(prefix=PREFIX, tags=["training API"], route_class=InTurn)
signed_router = APIRouter(prefix=PREFIX)  # its URLs are keys
CHECKPOINT = "/training_runs/{run}/checkpoints/{kind}/{name}"
URLS_S = 3600  # that a signed URL is valid
ARCHIVE = "archive.tar"  # a name in URLs of folders
Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, le=2**53)]


@router.get("/training_runs")
def training_runs(service: ServiceOf, owner: Reader, limit: Limit = 20, offset: Offset = 0) -> dict[str, Any]:
    """Models, newest first."""
    where = t.seen_by(t.api_models, owner.sees)
    query = select(t.api_models).where(*where).order_by(t.api_models.c.created.desc())
    with service.db.read() as connection:
        total = connection.scalar(select(func.count()).select_from(t.api_models).where(*where)) or 0
        rows = connection.execute(query.limit(limit).offset(offset)).mappings().all()
        runs = [_run(connection, dict(row)) for row in rows]
    return {"training_runs": runs, "cursor": {"offset": offset, "limit": limit, "total_count": total}}


@router.get("/training_runs/{run}")
def training_run(run: Id, service: ServiceOf, owner: Reader) -> dict[str, Any]:
    """A model."""
    with service.db.read() as connection:
        return _run(connection, find_model(connection, run, owner.sees))


def _run(connection: Connection, model: Row) -> Row:
    table = t.api_checkpoints
    newest = select(table).where(table.c.model == model["id"]).order_by(table.c.created.desc())
    rows = [dict(row) for row in connection.execute(newest).mappings()]

    def last(kind: str) -> Row | None:
        return next((show(row) for row in rows if row["kind"] == kind), None)

    data = model["data"] or None
    return {
        "training_run_id": model["id"],
        "base_model": model["base"],
        "model_owner": model["owner"],
        "is_lora": True,
        "corrupted": False,
        "lora_rank": model["config"]["rank"],
        "last_request_time": moment(model["used"]),
        "last_checkpoint": last("weights"),
        "last_sampler_checkpoint": last("sampler_weights"),
        "user_metadata": None if data is None else {key: str(value) for key, value in data.items()},
    }


@router.get("/training_runs/{run}/checkpoints")
def checkpoints_of_run(run: Id, service: ServiceOf, owner: Reader) -> dict[str, Any]:
    """Checkpoints of a model."""
    with service.db.read() as connection:
        find_model(connection, run, owner.sees)
        rows = _checkpoints(connection, t.api_checkpoints.c.model == run)
    return {"checkpoints": [show(row) for row in rows]}


@router.get("/checkpoints")
def checkpoints(service: ServiceOf, owner: Reader, limit: Limit = 100, offset: Offset = 0) -> dict[str, Any]:
    """Checkpoints of the owner, newest first."""
    where = t.seen_by(t.api_checkpoints, owner.sees)
    with service.db.read() as connection:
        rows = _checkpoints(connection, *where)
    cursor = {"offset": offset, "limit": limit, "total_count": len(rows)}
    return {"checkpoints": [show(row) for row in rows[offset : offset + limit]], "cursor": cursor}


def _checkpoints(connection: Connection, *where: Any) -> Sequence[Row]:
    table = t.api_checkpoints
    live = table.c.expires.is_(None) | (table.c.expires > time.time())
    query = select(table).where(live, *where).order_by(table.c.created.desc())
    return [dict(row) for row in connection.execute(query).mappings()]


@router.delete(CHECKPOINT, status_code=204)
def delete(run: Id, kind: Id, name: Id, service: ServiceOf, streams: StreamsOf, owner: Writer) -> None:
    """Removes a checkpoint and its files. A request that is repeated because its answer was lost succeeds again."""
    path = checkpoint_path(run, kind, name)
    with service.db.write() as connection:
        if find_checkpoint(connection, path, None) is None and (owner.name, path) in streams.deleted:
            return
        row = get_checkpoint(connection, path, owner.sees)
        streams.deleted.append((owner.name, path))
        connection.execute(t.api_checkpoints.delete().where(t.api_checkpoints.c.path == row["path"]))
        streams.remove(connection, row["folder"])
    streams.taken()


@router.put(CHECKPOINT + "/ttl", status_code=204)
def set_ttl(run: Id, kind: Id, name: Id, body: Ttl, service: ServiceOf, owner: Writer) -> None:
    """Sets how long a checkpoint lives from now on; null: it is kept."""
    check_ttl(body.ttl_seconds)
    with service.db.write() as connection:
        row = get_checkpoint(connection, checkpoint_path(run, kind, name), owner.sees)
        expires = None if body.ttl_seconds is None else time.time() + body.ttl_seconds
        same = t.api_checkpoints.c.path == row["path"]
        connection.execute(t.api_checkpoints.update().where(same).values(expires=expires))


@router.get(CHECKPOINT + "/external_weights_urls")
def external_weights_urls(
    run: Id, kind: Id, name: Id, request: Request, service: ServiceOf, streams: StreamsOf, owner: Downloader
) -> dict[str, Any]:
    """Signed URLs of the files of a PEFT folder, which are valid for an hour without a key."""
    if kind != "external_weights":
        message = f"{kind} cannot be downloaded as files."
        raise ApiError(422, "api.value", message, fix="save_weights_external, and its path")
    with service.db.read() as connection:
        row = get_checkpoint(connection, checkpoint_path(run, kind, name), owner.sees)
    folder = service.settings.path(row["folder"])
    files = sorted(path.name for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    until = int(time.time()) + URLS_S
    urls = {file: _signed_url(request, streams.secret, f"{row['folder']}/{file}", until) for file in files}
    return {"urls": urls, "expires": moment(until)}


@router.get(CHECKPOINT + "/archive")
def archive_url(
    run: Id, kind: Id, name: Id, request: Request, service: ServiceOf, streams: StreamsOf, owner: Downloader
) -> dict[str, Any]:
    """A signed URL of a PEFT folder as a tar file, for clients older than 0.36."""
    if kind == "weights":
        message = "states to train on are no archives."
        raise ApiError(422, "api.value", message, fix="save_weights_for_sampler, and its path")
    with service.db.read() as connection:
        row = get_checkpoint(connection, checkpoint_path(run, kind, name), owner.sees)
    until = int(time.time()) + URLS_S
    url = _signed_url(request, streams.secret, f"{row['folder']}/{ARCHIVE}", until)
    return {"url": url, "expires": moment(until)}


def _signed_url(request: Request, secret: bytes, path: str, until: int) -> str:
    base = str(request.base_url).rstrip("/")
    return f"{base}{PREFIX}/files/{quote(path)}?until={until}&signature={_sign(secret, path, until)}"


@signed_router.get("/files/checkpoints/{session}/{model}/{seq}/{file}", include_in_schema=False)
def download(
    session: Id, model: Id, seq: Id, file: Id, until: int, signature: str, service: ServiceOf, streams: StreamsOf
) -> Response:
    """A file by a signed URL."""
    path = f"checkpoints/{session}/{model}/{seq}/{file}"
    right_signature = _sign(streams.secret, path, until)
    if until < time.time() or not hmac.compare_digest(right_signature.encode(), signature.encode()):
        message = "this URL is not valid any more."
        raise ApiError(403, "api.signature", message, fix="ask for new ones: external_weights_urls")
    local_file = service.settings.path(path)
    if file == ARCHIVE and local_file.parent.is_dir():
        return StreamingResponse(_tar(local_file.parent), media_type="application/x-tar")
    if not local_file.is_file():
        raise not_found("such file")
    return FileResponse(local_file, media_type="application/octet-stream")


def _tar(folder: Path) -> Iterator[bytes]:
    """Yields a tar file of a folder. An empty file at its end says that it is complete."""
    for path in sorted(folder.iterdir()):
        member = tarfile.TarInfo(path.name)
        member.size = path.stat().st_size
        yield member.tobuf()
        with path.open("rb") as file:
            while data := file.read(1 << 20):
                yield data
        yield bytes(-member.size % tarfile.BLOCKSIZE)
    yield tarfile.TarInfo("checkpoint_complete").tobuf()
    yield bytes(2 * tarfile.BLOCKSIZE)


def _sign(secret: bytes, path: str, until: int) -> str:
    return hmac.new(secret, f"{until}:{path}".encode(), hashlib.sha256).hexdigest()
