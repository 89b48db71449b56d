"""Server-sent events. The id of an event is its number, so `Last-Event-ID` continues a stream."""

from __future__ import annotations

import json
import math
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from fastapi.responses import StreamingResponse
from pydantic import Field
from sqlalchemy import select
from starlette.concurrency import run_in_threadpool

from lorafusion_jax.serve.api.access import MOST_OF_ALL, MOST_STREAMS, JobsRead, Service, ServiceOf
from lorafusion_jax.serve.api.problems import ApiError, not_found
from lorafusion_jax.serve.states import ENDED
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.keys import Owner

router = APIRouter(prefix="/v1", tags=["events"])
COMMENT_S = 15.0
AT_ONCE = 500
LastEvent = Annotated[str | None, Header(max_length=20)]
After = Annotated[int | None, Query(ge=0, le=2**53, description="as Last-Event-ID")]


@router.get("/events", response_class=StreamingResponse)
async def events(
    service: ServiceOf, owner: JobsRead, last_event_id: LastEvent = None, after: After = None
) -> StreamingResponse:
    """Events of all jobs of the owner, from now on or after `Last-Event-ID`."""
    return _answer(service, owner, None, last_event_id, after)


@router.get("/jobs/{job}/events", response_class=StreamingResponse)
async def job_events(
    job: Annotated[str, Field(max_length=64)],
    service: ServiceOf,
    owner: JobsRead,
    last_event_id: LastEvent = None,
    after: After = None,
) -> StreamingResponse:
    """Events of one job, from its beginning or after `Last-Event-ID`. The stream ends with the job."""
    if not await run_in_threadpool(_exists, service, job, owner):
        raise not_found("such job")
    return _answer(service, owner, job, last_event_id, 0 if after is None else after)


def _answer(
    service: Service, owner: Owner, job: str | None, last_event_id: str | None, after: int | None
) -> StreamingResponse:
    start = int(last_event_id) if last_event_id and last_event_id.isdigit() else after
    name = owner.key or owner.name
    for count, most in ((service.streams.get(name, 0), MOST_STREAMS), (sum(service.streams.values()), MOST_OF_ALL)):
        if count >= most:
            message = f"a key has at most {MOST_STREAMS} streams, and all together {MOST_OF_ALL}."
            raise ApiError(429, "api.streams", message, fix="close some, or wait", headers={"Retry-After": "15"})
    first = service.db.last_event if start is None else start
    return StreamingResponse(
        _stream(service, owner, job, first, name),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _stream(service: Service, owner: Owner, job: str | None, seq: int, name: str) -> AsyncIterator[str]:
    service.streams[name] = service.streams.get(name, 0) + 1
    news, scope, clock = service.news, job or owner.sees, time.monotonic
    try:
        yield ": connected\n\n"
        more, checked_at = True, clock()  # there may be events that it has not read
        while True:
            if clock() - checked_at >= COMMENT_S:  # its key may be revoked meanwhile, or its session over
                if not service.access.is_valid(owner):
                    return
                checked_at = clock()
                yield ": still here\n\n"
            newest = news.at
            if more or news.newest(scope) > seq:
                rows = await run_in_threadpool(_events, service, owner, job, seq)
                for row in rows:
                    seq = row["seq"]
                    yield _text(row)
                more = len(rows) == AT_ONCE
                if job is not None and not more and await run_in_threadpool(_has_ended, service, job):
                    return
                seq = seq if more else max(seq, newest)
            if not more:
                await news.changed(newest, max(0.0, checked_at + COMMENT_S - clock()))
    finally:
        service.streams[name] -= 1
        if not service.streams[name]:
            del service.streams[name]


def _exists(service: Service, job: str, owner: Owner) -> bool:
    with service.db.read() as connection:
        return service.jobs.find(connection, job, owner.sees) is not None


def _events(service: Service, owner: Owner, job: str | None, seq: int) -> list[dict[str, Any]]:
    where = [t.events.c.seq > seq]
    where += [] if owner.sees is None else [t.events.c.owner == owner.sees]
    where += [] if job is None else [t.events.c.job == job]
    with service.db.read() as connection:
        query = select(t.events).where(*where).order_by(t.events.c.seq).limit(AT_ONCE)
        return [dict(row) for row in connection.execute(query).mappings()]


def _has_ended(service: Service, job: str) -> bool:
    with service.db.read() as connection:
        return service.jobs.get(connection, job)["state"] in ENDED


def _text(row: dict[str, Any]) -> str:
    data = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row["data"].items()}
    body = json.dumps({"job": row["job"], "at": row["at"]} | data)
    return f"id: {row['seq']}\nevent: {row['kind']}\ndata: {body}\n\n"
