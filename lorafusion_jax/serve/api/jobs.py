"""Routes of jobs."""

from __future__ import annotations

import io
import math
import re
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import select

from lorafusion_jax.adapters.table import adapter_kind
from lorafusion_jax.config.references import BASE, START
from lorafusion_jax.digests import FILE as DIGESTS
from lorafusion_jax.digests import digest_of, read_digests
from lorafusion_jax.serve.api.access import (
    AdaptersRead,
    IdempotencyKey,
    InTurn,
    JobsRead,
    JobsWrite,
    Service,
    ServiceOf,
    ask_child,
    expect_turn,
    once,
)
from lorafusion_jax.serve.api.pages import After, Limit, cursor_of, page_of
from lorafusion_jax.serve.api.problems import BESIDE_FILES, ApiError, not_found, problems_answer
from lorafusion_jax.serve.control.spec import LONGEST_JOB, Deadline, JobSpec, examine
from lorafusion_jax.serve.refusals import describe
from lorafusion_jax.serve.settings import ONE_SESSION
from lorafusion_jax.serve.states import LIVE, STATES
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.jobs import SHOWN, Job
from lorafusion_jax.serve.store.keys import Limits, Owner, limits_of

router = APIRouter(prefix="/v1", tags=["jobs"], route_class=InTurn)
Name = Annotated[str, Field(max_length=64)]


class Tar(StreamingResponse):
    """A tar of a PEFT folder."""

    media_type = "application/x-tar"


class Change(BaseModel):
    """What of a job can change."""

    model_config = ConfigDict(extra="forbid", strict=True)
    weight: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] | None = None
    deadline: Deadline | None = None


@router.post("/jobs", status_code=201)
async def submit(
    spec: JobSpec, service: ServiceOf, owner: JobsWrite, idempotency_key: IdempotencyKey = None, dry_run: bool = False
) -> Response:
    """Submits a job: 201 with the job, or 422 with every problem. Data and memory are checked next."""
    values, turns = spec.model_dump(mode="json"), service.turns
    if problems := await turns.run(owner.name, find_problems, service, owner, spec):
        return problems_answer(problems)
    if dry_run:
        expect_turn(service, owner, "check")
        job, controller = {"id": "dry-run", "spec": values, "base": spec.base}, service.controller
        answer = await ask_child(service, owner, "check", await turns.run(owner.name, controller.question, job))
        verdict = await turns.run(owner.name, controller.verdict, job, answer)
        return problems_answer(verdict["problems"]) if verdict["problems"] else JSONResponse(verdict)

    def act(connection: Any) -> tuple[int, Any]:
        live, limits = service.jobs.count_live(connection, owner.name), limits_of(connection, owner.name)
        _check_shares(limits, values)
        if live >= min(service.settings.most_jobs, limits.jobs if limits.jobs is not None else live + 1):
            raise ApiError(429, "job.limit", f"{owner.name} has {live} live jobs already.", fix="cancel some, or wait")
        return 201, show(service.jobs.submit(connection, owner.name, values))

    return await turns.run(owner.name, once, service, owner, idempotency_key, "POST /v1/jobs", values, act)


@router.get("/jobs", response_model=dict[str, Any])
def list_jobs(
    service: ServiceOf,
    owner: JobsRead,
    state: Annotated[list[Literal[STATES]] | None, Query()] = None,  # type: ignore[valid-type]
    after: After = None,
    limit: Limit = 100,
) -> Response:
    """Jobs, newest first; `next` of the answer is `after` of the next request."""
    with service.db.read() as connection:
        rows = service.jobs.page(
            connection, owner=owner.sees, states=state or (), after=cursor_of(after), limit=limit + 1
        )
    page = page_of(rows, limit)
    return JSONResponse(page | {"items": [show(row) for row in page["items"]]})  # its values are JSON already


@router.get("/jobs/{job}")
def show_job(job: Name, service: ServiceOf, owner: JobsRead) -> dict[str, Any]:
    """A job with its transitions; one that waits says for what, one that trains when it is expected to end."""
    with service.db.read() as connection:
        row = _find(service, connection, job, owner)
        outlook = _finite(service.controller.outlook(connection, row))
        return show(row) | outlook | {"transitions": service.jobs.transitions(connection, job)}


@router.patch("/jobs/{job}")
def change_job(job: Name, change: Change, service: ServiceOf, owner: JobsWrite) -> dict[str, Any]:
    """Changes weight, priority or deadline."""
    values = change.model_dump(exclude_none=True)
    with service.db.write() as connection:
        row = _find(service, connection, job, owner)
        if row["state"] not in LIVE:
            raise ApiError(409, "job.state", f"a job that is {row['state']} does not change.", fix="submit a new job")
        _check_shares(limits_of(connection, owner.name), values)
        if values:
            service.jobs.set(connection, job, **values)
            service.db.add_event(connection, "changed", row["owner"], job, values)
        return show(service.jobs.get(connection, job))


def _check_shares(limits: Limits, values: dict[str, Any]) -> None:
    """Checks that a user may ask for this priority and weight.

    Raises:
        ApiError: 403, `job.over-limit`.
    """
    for name in ("priority", "weight"):
        value, share = values.get(name), getattr(limits, name)
        if value is not None and value > share:
            message, fix = f"{name} {value:g} is above {share:g}, which is the most for you.", f"{name}: {share:g}"
            raise ApiError(403, "job.over-limit", message, where=name, fix=f"{fix}, or ask an administrator")


@router.post("/jobs/{job}/cancel", status_code=202)
def cancel(job: Name, service: ServiceOf, owner: JobsWrite, idempotency_key: IdempotencyKey = None) -> Response:
    """Cancels a job. Asking again changes nothing."""
    return _ask(service, owner, job, "cancel", idempotency_key)


@router.post("/jobs/{job}/pause", status_code=202)
def pause(job: Name, service: ServiceOf, owner: JobsWrite, idempotency_key: IdempotencyKey = None) -> Response:
    """Pauses a job: its place is free, its state on the disk. Asking again changes nothing."""
    return _ask(service, owner, job, "pause", idempotency_key)


@router.post("/jobs/{job}/continue", status_code=202)
def resume(job: Name, service: ServiceOf, owner: JobsWrite, idempotency_key: IdempotencyKey = None) -> Response:
    """Continues a paused job. Asking again changes nothing."""
    return _ask(service, owner, job, "continue", idempotency_key)


def _ask(service: Service, owner: Owner, job: str, action: str, idempotency_key: str | None) -> Response:
    def act(connection: Any) -> tuple[int, Any]:
        _find(service, connection, job, owner)
        return 202, show(service.jobs.ask(connection, job, action, actor=owner.name))

    return once(service, owner, idempotency_key, f"POST /v1/jobs/{job}/{action}", {}, act)


@router.delete("/jobs/{job}", status_code=202)
def delete_job(job: Name, service: ServiceOf, owner: JobsWrite) -> dict[str, Any]:
    """Deletes a job that has ended; again: nothing more happens. Its adapter stays until it is deleted itself."""
    with service.db.write() as connection:
        row = service.jobs.find(connection, job, owner.sees, deleted=True)
        if row is None:
            raise not_found("such job")
        if row["state"] != "deleted":
            row = service.jobs.change(connection, job, "delete", actor=owner.name)
    service.controller.sweeper.add(job)
    return show(row)


@router.get("/jobs/{job}/metrics", response_model=dict[str, Any])
def metrics(
    job: Name,
    service: ServiceOf,
    owner: JobsRead,
    from_step: Annotated[int, Query(ge=0, le=2**31)] = 0,
    every: Annotated[int, Query(ge=1, le=2**31)] = 1,
) -> Response:
    """Rows as in `metrics.jsonl` of a run."""
    with service.db.read() as connection:
        _find(service, connection, job, owner)
        return JSONResponse({"items": _finite(service.jobs.metrics(connection, job, from_step, every))})


@router.get("/jobs/{job}/log", response_class=PlainTextResponse, responses=BESIDE_FILES)
def log(
    job: Name, service: ServiceOf, owner: JobsRead, tail: Annotated[int, Query(ge=1, le=10000)] = 200
) -> PlainTextResponse:
    """What happened to a job, as text."""
    with service.db.read() as connection:
        _find(service, connection, job, owner)
        rows = service.jobs.transitions(connection, job)
    lines = [
        f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(row['at']))}Z  {row['before']} -> {row['after']}"
        f"  ({row['event']} by {row['actor']}{': ' + row['why'] if row['why'] else ''})"
        for row in rows[-tail:]
    ]
    return PlainTextResponse("".join(line + "\n" for line in lines))


@router.get("/jobs/{job}/timeline")
def timeline(job: Name, service: ServiceOf, owner: JobsRead) -> dict[str, Any]:
    """Where a job was: its placements, and its states with their times."""
    with service.db.read() as connection:
        _find(service, connection, job, owner)
        query = select(t.placements).where(t.placements.c.job == job).order_by(t.placements.c.epoch)
        places = [dict(row) for row in connection.execute(query).mappings()]
        return {"placements": places, "transitions": service.jobs.transitions(connection, job)}


@router.get("/jobs/{job}/adapter", response_class=Tar, responses=BESIDE_FILES)
def adapter(job: Name, request: Request, service: ServiceOf, owner: AdaptersRead) -> Response:
    """The trained adapter: a tar of its PEFT folder with digests."""
    with service.db.read() as connection:
        _find(service, connection, job, owner)
        row = connection.execute(select(t.artifacts).where(t.artifacts.c.job == job)).mappings().one_or_none()
    if row is None:
        raise ApiError(404, "job.no-adapter", "the job has no adapter yet.", fix="wait until it is done")
    return send_adapter(service, dict(row), request)


def send_adapter(service: Service, row: dict[str, Any], request: Request) -> Response:
    """Streams a PEFT folder as a tar; its ETag is the digest of the digests.

    Raises:
        ApiError: 410, `adapter.gone`: files of the adapter are missing.
    """
    folder = service.settings.path(row["path"])
    if why := _missing(folder, row["sha256"]):
        fix = "restore the folder jobs/ of the home from a copy, or train the job again"
        raise ApiError(410, "adapter.gone", "the files of the adapter are not there any more.", why=why, fix=fix)
    tag = f'"{row["sha256"]}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"ETag": tag})
    headers = {"ETag": tag, "Content-Disposition": f'attachment; filename="{row["job"]}-step-{row["step"]}.tar"'}
    return Tar(_tar(folder), headers=headers)


def _missing(folder: Path, sha: str) -> str:
    """Why a folder is not the adapter that was written; empty if its files are there."""
    try:
        if digest_of(folder / DIGESTS) != sha:
            return f"{DIGESTS} is not that of the adapter"
        absent = [name for name in read_digests(folder) if not (folder / name).is_file()]
    except (OSError, ValueError):
        return f"the folder {folder.parent.parent.name}/adapter/{folder.name} is not there, or cannot be read"
    return f"{absent[0]} is not there" if absent else ""


def show(job: Job) -> dict[str, Any]:
    """A job as the API shows it."""
    fields = {key: job[key] if key == "spec" else _finite(job[key]) for key in SHOWN}  # its numbers are finite
    waited_s = None if job["queued"] is None else round((job["started"] or time.time()) - job["created"], 3)
    return fields | {"waited_s": waited_s}


def find_problems(service: Service, owner: Owner, spec: JobSpec) -> list[dict[str, str]]:
    """Everything that is wrong with a job before its data is read."""
    problems: list[dict[str, str]] = []
    if len(spec.model_dump_json()) > LONGEST_JOB:
        message, fix = f"the values of a job have at most {LONGEST_JOB} bytes.", "shorter lists and texts"
        return [{"code": "job.too-long", "where": "job", "what": message, "fix": fix}]
    if spec.base not in service.settings.bases:
        fix = f"one of: {', '.join(service.settings.bases)}"
        problems.append({"code": "job.base", "where": "base", "what": f"there is no base {spec.base!r}.", "fix": fix})
    with service.db.read() as connection:
        for key in ("train", "eval"):
            dataset = getattr(spec.data, key)
            if dataset and t.find_row(connection, t.datasets, dataset, owner.sees) is None:
                message, fix = "there is no such data set.", "upload it first: POST /v1/datasets"
                problems.append({"code": "job.dataset", "where": f"data.{key}", "what": message, "fix": fix})
        reference = None if spec.objective.reference in (BASE, START) else spec.objective.reference
        for key_path, adapter in (("init_from", spec.init_from), ("objective.reference", reference)):
            if adapter and t.find_row(connection, t.artifacts, adapter, owner.name) is None:
                message, fix = "there is no such adapter.", "an id of GET /v1/adapters"
                problems.append({"code": "job.adapter", "where": key_path, "what": message, "fix": fix})
    if spec.max_slowdown is not None and service.settings.policy == ONE_SESSION:
        message, fix = "one session for all jobs bounds no slowdown.", "leave it out, or lorafusion serve --policy ours"
        problems.append({"code": "job.max-slowdown", "where": "max_slowdown", "what": message, "fix": fix})
    if problems:
        return problems
    job = {"spec": spec.model_dump(mode="json"), "base": spec.base, "id": spec.name}
    config, errors = examine(service.controller.values(job))
    if config is not None and not errors and adapter_kind(kind := config.adapters[0].lora.adapter_kind).merge_only:
        message, why = f"an adapter of kind {kind} has no form in PEFT.", "a service gives adapters out as PEFT folders"
        fix = "train it in a run: lorafusion train, then lorafusion export RUN ADAPTER --merge --to FOLDER"
        return [{"code": "job.not-served", "where": "lora.kind", "what": message, "why": why, "fix": fix}]
    return [describe(error) | {"where": error.where.removeprefix("job") or _key_in(error.what)} for error in errors]


def _key_in(text: str) -> str:
    """The key of a job file that a message names, as a job of the API has it.

    >>> _key_in("'adapters[0].lora.kind' must be one of lora, dora.")
    'lora.kind'
    """
    key = re.search(r"'adapters\[0\]\.([\w.]+)'", text)
    return key[1] if key else ""


def _find(service: Service, connection: Any, job: str, owner: Owner) -> Job:
    row = service.jobs.find(connection, job, owner.sees)
    if row is None:
        raise not_found("such job")
    return row


def _finite(value: Any) -> Any:
    """Numbers that JSON cannot hold become null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tar(folder: Path) -> Iterator[bytes]:
    """Writes a tar file by file; of one file at most 1 MiB is in memory."""
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.is_symlink():
            continue
        info = tarfile.TarInfo(path.relative_to(folder).as_posix())
        info.size, info.mode, info.mtime = path.stat().st_size, 0o644, int(path.stat().st_mtime)
        yield info.tobuf(tarfile.PAX_FORMAT)
        with path.open("rb") as file:
            while part := file.read(1 << 20):
                yield part
        yield b"\0" * (-info.size % tarfile.BLOCKSIZE)
    yield io.BytesIO(b"\0" * 2 * tarfile.BLOCKSIZE).getvalue()
