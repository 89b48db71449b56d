"""Routes of clients and their sessions."""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response
from sqlalchemy import func, select

from lorafusion_jax.config.schema import BatchSettings
from lorafusion_jax.serve.api.access import once
from lorafusion_jax.serve.api.problems import ApiError
from lorafusion_jax.serve.states import LIVE
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.tinker.access import PREFIX, InTurn, Reader, ServiceOf, StreamsOf, Writer
from lorafusion_jax.serve.tinker.log import ALIVE_S, any_session, beat, find_session
from lorafusion_jax.serve.tinker.requests import ClientConfig, CreateSession, FinishSession, Heartbeat, Id, Loose

router = APIRouter(prefix=PREFIX, tags=["training API"], route_class=InTurn)
MOST_SESSIONS = 16  # of an owner that are alive
MOST_SAMPLES = 256  # of a client at once
WARNING = (
    "lorafusion-jax: the scale alpha of an adapter is 32, whatever its rank; train_unembed is ignored, because adapters"
    " of the head are not served. Projects are not served."
)


@router.post("/client/config")
def client_config(config: ClientConfig, owner: Reader) -> dict[str, Any]:
    """What a client shall use of what it knows."""
    del config, owner
    return {
        "pjwt_auth_enabled": False,
        "credential_default_source": "api_key",
        "parallel_fwdbwd_chunks": True,
        "proto_compress_fwdbwd": True,
        "sample_max_concurrent_requests": MOST_SAMPLES,
        "sample_use_retrieve_futures": False,
        "sample_join_sampling_session": False,
        "custom_loss_server_side": False,
    }


@router.post("/client/dynamic_config")
def dynamic_config(config: ClientConfig, owner: Reader) -> dict[str, Any]:
    """What of it may change while a client runs."""
    del config, owner
    return {"refresh_interval_sec": 300, "sample_cancel_enabled": True}


@router.get("/healthz")
def health(owner: Reader) -> dict[str, Any]:
    del owner
    return {"status": "ok"}


@router.get("/get_server_capabilities")
def capabilities(service: ServiceOf, owner: Reader) -> dict[str, Any]:
    """The base models, and the longest sequence."""
    del owner
    settings = service.settings
    most_tokens = BatchSettings.model_validate(settings.batch).largest
    samples = settings.mesh.get("tensor", 1) == 1  # a base that devices share makes no text
    model = {"trainable": True, "sampleable": samples, "max_context_length": most_tokens}
    return {"supported_models": [{"model_name": name} | model for name in settings.bases]}


@router.post("/telemetry")
def telemetry(body: Loose, owner: Reader) -> dict[str, Any]:
    """Takes what clients tell of themselves. Nothing of it is kept."""
    del body, owner
    return {"status": "accepted"}


@router.post("/create_session")
def create_session(
    body: CreateSession,
    service: ServiceOf,
    owner: Writer,
    key: Annotated[str | None, Header(alias="x-idempotency-key", max_length=200)] = None,
) -> Response:
    """Opens the session of a client, which lives as long as it beats."""
    values = body.model_dump(mode="json")

    def act(connection: Any) -> tuple[int, Any]:
        sessions = t.api_sessions.c
        alive = (sessions.owner == owner.name, sessions.ended.is_(None), sessions.beat > time.time() - ALIVE_S)
        count = select(func.count()).select_from(t.api_sessions).where(*alive)
        if (connection.scalar(count) or 0) >= MOST_SESSIONS:
            message = f"{owner.name} has {MOST_SESSIONS} sessions."
            raise ApiError(429, "api.sessions", message, fix="close some, or wait", headers={"Retry-After": "10"})
        now, session = time.time(), f"ses-{secrets.token_hex(8)}"
        row = {"id": session, "owner": owner.name, "created": now, "beat": now, "reason": {}, "data": values}
        connection.execute(t.api_sessions.insert().values(row))
        return 200, {"type": "create_session", "session_id": session, "warning_message": WARNING}

    return once(service, owner, key, f"POST {PREFIX}/create_session", values, act)


@router.post("/session_heartbeat")
def heartbeat(body: Heartbeat, service: ServiceOf, owner: Writer) -> dict[str, Any]:
    """Keeps a session alive."""
    with service.db.write() as connection:
        find_session(connection, body.session_id, owner.sees)
        beat(connection, body.session_id)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session}/finish", status_code=204)
def finish(session: Id, body: FinishSession, service: ServiceOf, streams: StreamsOf, owner: Writer) -> None:
    """Ends a session and its models. The first reason stays."""
    with service.db.write() as connection:
        row = any_session(connection, session, owner.sees)
        if row["ended"] is not None:
            return
        reason = {"reason": body.reason, "detail": body.detail}
        update = t.api_sessions.update().where(t.api_sessions.c.id == session)
        connection.execute(update.values(ended=time.time(), reason=reason))
        models = select(t.api_models.c.job).where(t.api_models.c.session == session)
        for job in connection.execute(models).scalars().all():
            if service.jobs.get(connection, job)["state"] in LIVE:
                service.jobs.ask(connection, job, "cancel", actor=row["owner"], why="its session is finished")
    streams.taken()


@router.get("/sessions")
def sessions(
    service: ServiceOf,
    owner: Reader,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    offset: Annotated[int, Query(ge=0, le=2**53)] = 0,
) -> dict[str, Any]:
    """Ids of sessions, newest first."""
    where = t.seen_by(t.api_sessions, owner.sees)
    query = select(t.api_sessions.c.id).where(*where).order_by(t.api_sessions.c.created.desc())
    with service.db.read() as connection:
        return {"sessions": list(connection.execute(query.limit(limit).offset(offset)).scalars())}


@router.get("/sessions/{session}")
def session(session: Id, service: ServiceOf, owner: Reader) -> dict[str, Any]:
    """A session with its models and samplers."""
    with service.db.read() as connection:
        row = any_session(connection, session, owner.sees)
        of_session = (select(table.c.id).where(table.c.session == session) for table in (t.api_models, t.api_samplers))
        models, samplers = (list(connection.execute(query).scalars()) for query in of_session)
    data = row["data"]
    metadata = None if data.get("user_metadata") is None else {k: str(v) for k, v in data["user_metadata"].items()}
    answer = {"training_run_ids": models, "sampler_ids": samplers, "user_metadata": metadata}
    return answer | {"display_name": data.get("display_name")}
