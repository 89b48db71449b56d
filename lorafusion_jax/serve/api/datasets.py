"""Routes of data sets."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field
from sqlalchemy import func, select
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from lorafusion_jax.files import sync
from lorafusion_jax.serve.api.access import (
    DataRead,
    DataWrite,
    IdempotencyKey,
    InTurn,
    Service,
    ServiceOf,
    ask_child,
    expect_turn,
    once,
)
from lorafusion_jax.serve.api.pages import After, Limit, get_row, read_page
from lorafusion_jax.serve.api.problems import ApiError, not_found, problems_answer
from lorafusion_jax.serve.control.spec import job_values
from lorafusion_jax.serve.refusals import with_names
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.keys import Owner, limits_of

router = APIRouter(prefix="/v1", tags=["data"], route_class=InTurn)
FORMATS = ("jsonl", "json", "csv", "parquet")
Dataset = Annotated[str, Field(max_length=80)]
SILENT_S, SLOWEST = 60, 1024  # seconds without a byte, and bytes a second after the first minute
NAME = r"^[a-z0-9][a-z0-9._-]{0,62}$"


@router.post(
    "/datasets",
    status_code=201,
    openapi_extra={"requestBody": {"required": True, "content": {"application/octet-stream": {"schema": {}}}}},
)
async def upload(
    request: Request,
    service: ServiceOf,
    owner: DataWrite,
    name: Annotated[str, Query(pattern=NAME, examples=["rows.jsonl"])],
) -> Response:
    """Uploads a file: the body is its bytes, the ending of `name` its format. Equal content has the same id."""
    ending = name.rpartition(".")[2]
    if ending not in FORMATS:
        raise ApiError(422, "data.unknown-kind", f"{name} has no known ending.", fix=f"one of {', '.join(FORMATS)}")
    most_bytes = min(service.settings.most_upload, await service.turns.run(owner.name, _room, service, owner))
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > most_bytes:
        raise _too_large(most_bytes)
    service.settings.datasets.mkdir(parents=True, exist_ok=True)
    draft = service.settings.datasets / f".upload-{secrets.token_hex(8)}"
    try:
        draft.mkdir()
        with service.uploads.of(owner.name):
            sha, size = await _receive(request, draft / f"data.{ending}", most_bytes)
            if not size:
                fix = "send the bytes of the file as the body"
                raise ApiError(422, "data.empty-file", "the body is empty.", fix=fix)
            return await keep(service, owner, draft, name, sha, size)
    except OSError as problem:
        message, why = "the file could not be stored.", problem.strerror or ""
        raise ApiError(507, "store.no-space", message, why=why, fix="try again later") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@router.get("/datasets")
def list_datasets(service: ServiceOf, owner: DataRead, after: After = None, limit: Limit = 100) -> dict[str, Any]:
    """Data sets of the owner, newest first; `next` of the answer is `after` of the next request."""
    with service.db.read() as connection:
        return read_page(connection, t.datasets, owner, after, limit)


@router.get("/datasets/{dataset}")
def show_dataset(dataset: Dataset, service: ServiceOf, owner: DataRead) -> dict[str, Any]:
    """One data set."""
    return _find(service, dataset, owner)


@router.get("/datasets/{dataset}/preview")
async def preview(
    dataset: Dataset,
    service: ServiceOf,
    owner: DataRead,
    row: Annotated[int, Query(ge=0, le=2**31)] = 0,
    base: Annotated[str | None, Query(max_length=100)] = None,
) -> Response:
    """A row as the model sees it: ⟦ ⟧ around what is learned."""
    expect_turn(service, owner, "preview")
    dataset_row, bases = await service.turns.run(owner.name, _find, service, dataset, owner), service.settings.bases
    if base is not None and base not in bases:
        raise not_found("such base")
    if row >= dataset_row["rows"]:
        message = f"the data set has {dataset_row['rows']} rows."
        raise ApiError(422, "data.row", message, where="row", fix="a smaller row")
    base_name = base or next(iter(bases))
    spec = {
        "data": {"train": dataset},
        "lora": {},
        "optim": {},
        "batch": {"global_samples": 1},
        "epochs": 1,
        "seed": 0,
        "weight": 1.0,
        "steps": None,
    }
    files = {dataset: service.settings.datasets / dataset / f"data.{dataset_row['format']}"}
    session = {"base": {}, "batch": {}, "mesh": {}, "train": {}}
    values = job_values(spec, "preview", base=bases[base_name], files=files, session=session, start=None)
    answer = await ask_child(service, owner, "preview", {"values": values, "row": row})
    problems = answer.pop("problems")
    if problems:
        shown = {str(files[dataset]): dataset_row["name"]}
        return problems_answer([with_names(problem, shown) for problem in problems])
    answer["text"] = answer["text"].replace(str(files[dataset]), dataset_row["name"])
    return JSONResponse(answer)


@router.delete("/datasets/{dataset}", status_code=204)
def delete_dataset(
    dataset: Dataset, service: ServiceOf, owner: DataWrite, idempotency_key: IdempotencyKey = None
) -> Response:
    """Deletes a data set that no live job uses."""
    folders: list[str] = []

    def act(connection: Any) -> tuple[int, Any]:
        _find(service, dataset, owner)
        if live := service.jobs.using(connection, dataset):
            message, fix = f"{len(live)} live jobs use the data set.", "cancel them, or wait for their end"
            raise ApiError(409, "data.in-use", message, where=live[0], fix=fix)
        connection.execute(t.datasets.delete().where(t.datasets.c.id == dataset))
        folders.append(f"datasets/{dataset}")
        connection.execute(t.removals.insert().prefix_with("OR IGNORE").values(path=folders[0]))
        return 204, None

    with service.datasets:
        answer = once(service, owner, idempotency_key, f"DELETE /v1/datasets/{dataset}", {}, act)
        for path in folders:
            shutil.rmtree(service.settings.path(path), ignore_errors=True)
            service.controller.sweeper.remove(path)
    return answer


def _room(service: Service, owner: Owner) -> int:
    """Bytes that the owner may still upload.

    Raises:
        ApiError: 403, `data.over-limit`.
    """
    with service.db.read() as connection:
        limit = limits_of(connection, owner.name).bytes
        size = connection.scalar(select(func.sum(t.datasets.c.bytes)).where(t.datasets.c.owner == owner.name)) or 0
    if limit is not None and size >= limit:
        message = f"{owner.name} has {size} bytes of data sets, of at most {limit}."
        raise ApiError(403, "data.over-limit", message, fix="delete some, or ask an administrator")
    return 2**62 if limit is None else limit - size


async def _receive(request: Request, file: Path, most_bytes: int) -> tuple[str, int]:
    """Writes the body to a file part by part, durably. Returns its digest and size."""
    sha, size = hashlib.sha256(), 0
    try:
        parts, began = aiter(request.stream()), time.monotonic()
        with file.open("wb") as stream:
            while part := await _next_part(parts, size, began):
                size += len(part)
                if size > most_bytes:
                    raise _too_large(most_bytes)
                sha.update(part)
                await run_in_threadpool(stream.write, part)
            stream.flush()
            await run_in_threadpool(os.fsync, stream.fileno())
    except ClientDisconnect:
        raise ApiError(400, "data.incomplete", "the upload was broken off.", fix="upload it again") from None
    return sha.hexdigest(), size


async def _next_part(parts: AsyncIterator[bytes], size: int, began: float) -> bytes:
    """Returns the next part of a body; empty at its end.

    Raises:
        ApiError: 408, `data.slow`: the client holds a connection and sends next to nothing.
    """
    try:
        async with asyncio.timeout(SILENT_S):
            part = b""
            while not part:
                part = await anext(parts)
    except StopAsyncIteration:
        return b""
    except TimeoutError:
        raise ApiError(408, "data.slow", f"nothing came for {SILENT_S} s.", fix="upload it again") from None
    if size < SLOWEST * (time.monotonic() - began - SILENT_S):
        raise ApiError(408, "data.slow", f"an upload has at least {SLOWEST} bytes a second.", fix="upload it again")
    return part


async def keep(service: Service, owner: Owner, draft: Path, name: str, sha: str, size: int) -> Response:
    """Reads an uploaded file in a child process; keeps it if it has rows.

    The id is the digest of owner and content, so nobody learns what others have uploaded.
    """
    (file,) = draft.iterdir()
    dataset = "sha256-" + hashlib.sha256(f"{owner.name}\n{sha}\n{file.suffix}".encode()).hexdigest()
    if (dataset_row := await service.turns.run(owner.name, _known, service, dataset)) is not None:
        return JSONResponse(dataset_row, 201)
    counts = await ask_child(service, owner, "count", {"file": str(file), "most_bytes": service.settings.most_upload})
    if counts["problems"]:
        return problems_answer(counts["problems"])
    row = {
        "id": dataset,
        "owner": owner.name,
        "name": name,
        "sha256": sha,
        "format": file.suffix.removeprefix("."),
        "rows": counts["rows"],
        "columns": counts["columns"],
        "bytes": size,
        "created": time.time(),
    }
    return await service.turns.run(owner.name, _store, service, draft, row)


def _store(service: Service, draft: Path, row: dict[str, Any]) -> Response:
    dataset = row["id"]
    target = service.settings.datasets / dataset
    with service.datasets:
        if (dataset_row := _known(service, dataset)) is not None:  # uploaded twice at once
            return JSONResponse(dataset_row, 201)
        if target.exists():  # of a database that was lost
            service.controller.sweeper.put_aside(target)
        sync(draft)
        draft.rename(target)
        sync(target.parent)
        with service.db.write() as connection:
            connection.execute(t.removals.delete().where(t.removals.c.path == f"datasets/{dataset}"))
            connection.execute(t.datasets.insert().values(row))
    return JSONResponse(row, 201)


def _known(service: Service, dataset: str) -> dict[str, Any] | None:
    with service.db.read() as connection:
        return t.find_row(connection, t.datasets, dataset)


def _find(service: Service, dataset: str, owner: Owner) -> dict[str, Any]:
    with service.db.read() as connection:
        return get_row(connection, t.datasets, dataset, owner.sees, "data set")


def _too_large(most_bytes: int) -> ApiError:
    return ApiError(413, "data.too-large", f"a data set has at most {most_bytes} bytes here.", fix="split it")
