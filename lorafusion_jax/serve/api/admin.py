"""Routes of bases, adapters, the cluster, keys and the state of the service."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import select

from lorafusion_jax.serve.api.access import (
    WAITS_S,
    AdaptersRead,
    AdaptersWrite,
    Admin,
    Anybody,
    ClusterRead,
    IdempotencyKey,
    InTurn,
    JobsRead,
    Service,
    ServiceOf,
    check_origin,
    cookie_name,
    once,
)
from lorafusion_jax.serve.api.jobs import Tar, send_adapter
from lorafusion_jax.serve.api.pages import After, Limit, get_row, read_page
from lorafusion_jax.serve.api.problems import BESIDE_FILES, ApiError, not_found
from lorafusion_jax.serve.states import ON_WORKER
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.keys import (
    SCOPES,
    SESSION_S,
    USER,
    Limits,
    Owner,
    add_key,
    close_session,
    is_last_admin,
    limits_of,
    list_keys,
    open_session,
    revoke_key,
    set_limits,
)

router = APIRouter(prefix="/v1", route_class=InTurn)
open_router = APIRouter()
Name = Annotated[str, Field(max_length=64)]


class KeyLimits(BaseModel):
    """What the owner of a key has a right to; of several keys of an owner the widest counts."""

    model_config = ConfigDict(extra="forbid", strict=True)
    share: Annotated[float, Field(ge=0.001, le=1000, description="weight among the users who have work")] = 1.0
    jobs: Annotated[int, Field(ge=0, le=2**62, description="most live jobs")] | None = None
    places: Annotated[int, Field(ge=1, le=2**62, description="most places, with a policy GPUs, at once")] | None = None
    bytes: Annotated[int, Field(ge=0, le=2**62, description="most bytes of data sets")] | None = None
    priority: Annotated[int, Field(ge=-100, le=100, description="largest of a job")] = 100
    weight: Annotated[float, Field(ge=0.001, le=1000, description="largest of a job")] = 1000.0


class NewKey(BaseModel):
    """A key to add."""

    model_config = ConfigDict(extra="forbid", strict=True)
    owner: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
    scopes: list[Literal[SCOPES]] = list(USER)  # type: ignore[valid-type]
    days: Annotated[float, Field(gt=0, le=36500)] | None = None
    limits: KeyLimits | None = None


class Login(BaseModel):
    """A key, for which a session of the page starts."""

    model_config = ConfigDict(extra="forbid", strict=True)
    key: Annotated[str, Field(max_length=200)]


@router.get("/bases", tags=["cluster"])
def bases(service: ServiceOf, owner: JobsRead) -> dict[str, Any]:
    """Base models, their sessions, and free places by rank."""
    del owner
    controller = service.controller
    free: dict[str, dict[str, int]] = {name: {} for name in service.settings.bases}
    for group in controller.groups:
        job_by_place, layout = controller.places(group), controller.layout(group)
        free_by_class = free[controller.base_of(group)]
        for name, places in layout.classes.items():
            free_by_class[name] = free_by_class.get(name, 0) + sum(job_by_place[place] is None for place in places)
    return {
        "items": [
            {"name": name, "shape": _shape(path), "warm": controller.warm(name), "free_places": free[name]}
            for name, path in service.settings.bases.items()
        ]
    }


@router.get("/adapters", tags=["adapters"])
def adapters(service: ServiceOf, owner: AdaptersRead, after: After = None, limit: Limit = 100) -> dict[str, Any]:
    """Finished adapters, newest first; `next` of the answer is `after` of the next request."""
    with service.db.read() as connection:
        page = read_page(connection, t.artifacts, owner, after, limit)
    return page | {"items": [{k: v for k, v in row.items() if k != "path"} for row in page["items"]]}


@router.get("/adapters/{adapter}", tags=["adapters"], response_class=Tar, responses=BESIDE_FILES)
def adapter(adapter: Name, request: Request, service: ServiceOf, owner: AdaptersRead) -> Response:
    """One adapter: a tar of its PEFT folder."""
    return send_adapter(service, _find_adapter(service, adapter, owner), request)


@router.delete("/adapters/{adapter}", status_code=204, tags=["adapters"])
def delete_adapter(
    adapter: Name, service: ServiceOf, owner: AdaptersWrite, idempotency_key: IdempotencyKey = None
) -> Response:
    """Deletes an adapter that no live job uses, and its files."""
    jobs: list[str] = []

    def act(connection: Any) -> tuple[int, Any]:
        row = _find_adapter(service, adapter, owner)
        if live := service.jobs.using(connection, adapter):
            message, fix = f"{len(live)} live jobs use the adapter.", "cancel them, or wait for their end"
            raise ApiError(409, "adapter.in-use", message, where=live[0], fix=fix)
        jobs.append(row["job"])
        connection.execute(t.artifacts.delete().where(t.artifacts.c.id == adapter))
        connection.execute(t.removals.insert().prefix_with("OR IGNORE").values(path=row["path"]))
        return 204, None

    answer = once(service, owner, idempotency_key, f"DELETE /v1/adapters/{adapter}", {}, act)
    for job in jobs:
        service.controller.sweeper.add(job)
    return answer


@router.get("/cluster", tags=["cluster"])
def cluster(service: ServiceOf, owner: ClusterRead) -> dict[str, Any]:
    """Workers, their places and who is in them. Jobs of others are shown without a name."""
    with service.db.read() as connection:
        groups = [dict(row) for row in connection.execute(select(t.groups)).mappings()]
        jobs = {job["id"]: job for job in service.jobs.in_states(connection, *ON_WORKER)}
    controller = service.controller

    def slots(group: str) -> list[dict[str, Any]]:
        layout, job_by_place = controller.layout(group), controller.places(group)
        return [
            {"place": place, "kind": kind, "rank": rank} | _occupant(jobs.get(job_by_place[place] or ""), owner)
            for place, (rank, kind) in enumerate(zip(layout.ranks, layout.kinds, strict=True))
        ]

    return {
        "workers": [
            {key: value for key, value in row.items() if key not in ("pid", "received")}
            | {"connected": controller.is_connected(row["id"]), "slots": slots(row["id"])}
            for row in groups
        ],
        "gpus": service.settings.gpus,
        "policy": service.settings.policy,
        "refused_decisions": controller.refused_decisions,
        "problem": controller.problem,
    }


@router.get("/decisions", tags=["cluster"])
def decisions(
    service: ServiceOf, owner: ClusterRead, since: Annotated[int, Query(ge=0, le=2**53)] = 0
) -> dict[str, Any]:
    """What was decided and why; refused decisions, too."""
    del owner
    with service.db.read() as connection:
        query = select(t.decisions).where(t.decisions.c.seq > since).order_by(t.decisions.c.seq.desc()).limit(200)
        return {"items": [dict(row) for row in connection.execute(query).mappings()]}


@router.post("/workers/{worker}/{action}", status_code=202, tags=["cluster"])
def drain(
    worker: Name,
    action: Literal["drain", "undrain"],
    service: ServiceOf,
    owner: Admin,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Moves all jobs of a worker back to the queue and places none, for maintenance; or ends that."""

    def act(connection: Any) -> tuple[int, Any]:
        get_row(connection, t.groups, worker, None, "worker")
        connection.execute(t.groups.update().where(t.groups.c.id == worker).values(drained=action == "drain"))
        for job in service.jobs.in_states(connection, "starting", "running") if action == "drain" else []:
            if job["group"] != worker:
                continue
            service.jobs.ask(connection, job["id"], "preempt", actor=owner.name, why="its worker is drained")
        connection.execute(t.decisions.insert().values(at=time.time(), text=f"{worker}: {action} by {owner.name}"))
        return 202, {"worker": worker, "drained": action == "drain"}

    return once(service, owner, idempotency_key, f"POST /v1/workers/{worker}/{action}", {}, act)


@router.get("/me", tags=["keys"])
def me(service: ServiceOf, owner: Anybody) -> dict[str, Any]:
    """Who the key belongs to, and its limits."""
    limits: dict[str, Any] = {"live_jobs": service.settings.most_jobs, "upload_bytes": service.settings.most_upload}
    with service.db.read() as connection:
        limits |= asdict(limits_of(connection, owner.name))
    return {"owner": owner.name, "scopes": list(owner.scopes), "key": owner.key, "limits": limits}


@router.get("/keys", tags=["keys"])
def keys(service: ServiceOf, owner: Admin) -> dict[str, Any]:
    """All keys, without their secrets."""
    del owner
    with service.db.read() as connection:
        return {"items": list_keys(connection)}


@router.post("/keys", status_code=201, tags=["keys"])
def new_key(new: NewKey, service: ServiceOf, owner: Admin, idempotency_key: IdempotencyKey = None) -> Response:
    """Adds a key. It is shown this once; the answer to a repeated request has an empty one."""
    secrets: list[str] = []

    def act(connection: Any) -> tuple[int, Any]:
        name, key = add_key(connection, new.owner, new.scopes, days=new.days, limits=_limits(new.limits or KeyLimits()))
        secrets.append(key)
        return 201, {"id": name, "key": "", "owner": new.owner, "scopes": new.scopes}

    answer = once(service, owner, idempotency_key, "POST /v1/keys", new.model_dump(), act)
    return JSONResponse(json.loads(bytes(answer.body)) | {"key": secrets[0]}, 201) if secrets else answer


@router.put("/keys/{key}/limits", status_code=204, tags=["keys"])
def change_limits(key: Name, limits: KeyLimits, service: ServiceOf, owner: Admin) -> Response:
    """Sets the limits of a key; what is left out has its default."""
    del owner
    with service.db.write() as connection:
        if not set_limits(connection, key, _limits(limits)):
            raise not_found("such key")
    return Response(status_code=204)


def _limits(limits: KeyLimits) -> Limits:
    return Limits(**limits.model_dump())


@router.delete("/keys/{key}", status_code=204, tags=["keys"])
def delete_key(key: Name, service: ServiceOf, owner: Admin) -> Response:
    """Revokes a key. The last one that administers the service is revoked on its machine only."""
    del owner
    with service.db.write() as connection:
        if is_last_admin(connection, key):
            fix = f"another admin key first, or on the machine of the service: lorafusion keys revoke {key}"
            raise ApiError(409, "api.last-admin", "no other valid key administers the service.", fix=fix)
        if not revoke_key(connection, key):
            raise not_found("such key")
    return Response(status_code=204)


@router.post("/login", tags=["keys"], include_in_schema=False)
def login(typed: Login, request: Request, service: ServiceOf) -> Response:
    """Starts a session of the page for 12 h. The cookie has its secret, not the key."""
    check_origin(request, by_cookie=False)
    owner = service.access.find(typed.key, "") if typed.key else None
    if owner is None:
        raise ApiError(401, "api.key", "the key is not valid.", fix="lorafusion keys add makes one")
    with service.db.write() as connection:
        secret = open_session(connection, owner)
    answer, secure = JSONResponse({"owner": owner.name}), request.url.scheme == "https"
    answer.set_cookie(cookie_name(request), secret, max_age=SESSION_S, httponly=True, samesite="strict", secure=secure)
    return answer


@router.post("/logout", tags=["keys"], include_in_schema=False)
def logout(request: Request, service: ServiceOf) -> Response:
    """Ends the session of the page."""
    name, answer = cookie_name(request), JSONResponse({})
    if secret := request.cookies.get(name):
        check_origin(request, by_cookie=True)
        with service.db.write() as connection:
            close_session(connection, secret)
    answer.delete_cookie(name, httponly=True, samesite="strict", secure=request.url.scheme == "https")
    return answer


@open_router.get("/healthz", tags=["health"])
async def healthz() -> dict[str, str]:
    """The process answers. It waits for nothing."""
    return {"status": "ok"}


@open_router.get("/readyz", tags=["health"])
async def readyz(service: ServiceOf) -> Response:
    """A worker is ready, and the database could be used in the last round of the controller."""
    problem = service.controller.not_ready
    return JSONResponse({"status": problem or "ready"}, 503 if problem else 200)


@open_router.get("/metrics", tags=["health"], response_class=PlainTextResponse)
def prometheus(request: Request, service: ServiceOf) -> Response:
    """Metrics for Prometheus; for this machine only."""
    if request.client is None or request.client.host not in ("127.0.0.1", "::1"):
        raise ApiError(403, "api.local", "metrics are for this machine only.", fix="ask at 127.0.0.1")
    return Response(_metrics(service), media_type="text/plain; version=0.0.4; charset=utf-8")


class _Families:
    """What a registry of Prometheus collects."""

    def __init__(self, *families: Any):
        self._families = families

    def collect(self) -> Iterable[Any]:
        return self._families


def _metrics(service: Service) -> bytes:
    from prometheus_client import CollectorRegistry, Gauge, generate_latest
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
    from sqlalchemy import func

    registry, answers, waits, below = CollectorRegistry(), service.answers, list[tuple[str, float]](), 0
    by_status = CounterMetricFamily("lorafusion_answers", "Answers by status", labels=["status"])
    for status, count in answers.statuses.items():
        by_status.add_metric([str(status)], count)
    for limit in WAITS_S:
        below += answers.within[limit]
        waits.append(("+Inf" if limit == math.inf else f"{limit:g}", below))
    took = HistogramMetricFamily("lorafusion_answer_seconds", "Until the head of an answer", waits, answers.seconds)
    registry.register(_Families(by_status, took))
    with service.db.read() as connection:
        query = select(t.jobs.c.state, func.count()).group_by(t.jobs.c.state)
        by_state = {row[0]: row[1] for row in connection.execute(query)}
        steps = connection.scalar(select(func.count()).select_from(t.metrics).where(t.metrics.c.kind == "step")) or 0
        oldest = connection.scalar(select(func.min(t.jobs.c.created)).where(t.jobs.c.state == "checking"))
    jobs = Gauge("lorafusion_jobs", "Jobs by state", ["state"], registry=registry)
    for state, count in by_state.items():
        jobs.labels(state).set(count)
    queue_gauge = Gauge("lorafusion_child_waiting", "Requests that wait for a process", ["lane"], registry=registry)
    for lane, count in service.controller.child.waiting().items():
        queue_gauge.labels(lane).set(count)
    controller, home = service.controller, service.settings.home
    occupants = [job for group in controller.groups for job in controller.places(group).values()]
    values = {
        "lorafusion_places": ("Places of all sessions", len(occupants)),
        "lorafusion_places_free": ("Free places", sum(job is None for job in occupants)),
        "lorafusion_worker_ready": ("Whether the worker is ready", float(service.controller.ready)),
        "lorafusion_steps": ("Optimizer steps of all jobs", steps),
        "lorafusion_checking_seconds": ("Age of the oldest job in checking", time.time() - oldest if oldest else 0.0),
        "lorafusion_database_bytes": ("Size of the database", service.settings.database.stat().st_size),
        "lorafusion_disk_free_bytes": ("Free on the disk of the home", shutil.disk_usage(home).free),
        "lorafusion_sessions": ("Sessions", len(controller.groups)),
        "lorafusion_refused_decisions": (
            "Decisions of the policy that were refused and changed nothing",
            controller.refused_decisions,
        ),
        "lorafusion_refused_events": ("Messages of old epochs that were refused", service.controller.refused_events),
    }
    for name, (text, value) in values.items():
        Gauge(name, text, registry=registry).set(value)
    return generate_latest(registry)


def _find_adapter(service: Service, adapter: str, owner: Owner) -> dict[str, Any]:
    with service.db.read() as connection:
        return get_row(connection, t.artifacts, adapter, owner.sees, "adapter")


def _occupant(job: dict[str, Any] | None, owner: Owner) -> dict[str, Any]:
    if job is None:
        return {"job": None, "name": None, "state": None}
    is_visible = owner.sees in (None, job["owner"])
    return {"job": job["id"] if is_visible else "", "name": job["name"] if is_visible else "", "state": job["state"]}


def _shape(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    config_keys = ("model_type", "num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")
    return {key: config[key] for key in config_keys if key in config}
