"""Routes of results: a long poll that the end of a request wakes, and the end of samples that nobody waits for."""

from __future__ import annotations

import hashlib

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from sqlalchemy import select

from lorafusion_jax.serve.api.access import Service
from lorafusion_jax.serve.api.problems import ApiError
from lorafusion_jax.serve.states import ON_WORKER
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.keys import Owner
from lorafusion_jax.serve.tinker.access import PREFIX, InTurn, Reader, ServiceOf, StreamsOf, Writer
from lorafusion_jax.serve.tinker.futures import SERVER, USER, Row, fail, find_future
from lorafusion_jax.serve.tinker.log import forget_request, missing_request
from lorafusion_jax.serve.tinker.messages import MEDIA_TYPE
from lorafusion_jax.serve.tinker.requests import Cancel, Retrieve

router = APIRouter(prefix=PREFIX, tags=["training API"], route_class=InTurn)
HOLD_S = 20.0  # that a request for a result waits


@router.post("/retrieve_future")
async def retrieve_future(body: Retrieve, service: ServiceOf, streams: StreamsOf, owner: Reader) -> Response:
    """Returns the result of a request; of one that is not done it says so after 20 seconds."""
    event = streams.waiters.register(body.request_id)
    try:
        row = await service.turns.run(owner.name, _find_future, service, body.request_id, owner)
        if row["state"] == "waiting":
            await streams.waiters.wait(event, HOLD_S)
            row = await service.turns.run(owner.name, _find_future, service, body.request_id, owner)
    finally:
        streams.waiters.forget(body.request_id, event)
    if row["state"] == "waiting":
        state = await service.turns.run(owner.name, _queue_state, service, row)
        return JSONResponse({"type": "try_again", "request_id": row["id"]} | state)
    streams.reads.append(row["id"])
    if row["path"] is None:
        return JSONResponse(row["result"])
    content = await service.turns.run(owner.name, _read_result, service, row)
    if content is None:
        return JSONResponse({"error": "the result was damaged on the server's disk", "category": SERVER})
    return Response(content, media_type=MEDIA_TYPE)


def _read_result(service: Service, future: Row) -> bytes | None:
    """Returns the result of a request; None if its file is not what was written."""
    try:
        content = service.settings.path(future["path"]).read_bytes()
    except OSError:
        return None
    return content if hashlib.sha256(content).hexdigest() == future["sha256"] else None


@router.post("/cancel_future", status_code=204)
def cancel_future(body: Cancel, service: ServiceOf, streams: StreamsOf, owner: Writer) -> None:
    """Ends samples that nobody waits for any more."""
    with service.db.write() as connection:
        row = _in_owners(find_future(connection, body.request_id, owner.sees))
        if row["kind"] != "sample":
            message = "requests of a model have an order, and cannot be cancelled."
            raise ApiError(422, "api.value", message, fix="cancel samples alone")
        if not fail(connection, row["id"], "it was cancelled", USER):
            return
        forget_request(connection, row["stream"], row["seq"])
    streams.cancel(row["id"])


def _find_future(service: Service, future: str, owner: Owner) -> Row:
    with service.db.read() as connection:
        return _in_owners(find_future(connection, future, owner.sees))


def _in_owners(row: Row | None) -> Row:
    if row is None:
        message = "there is no such request, or its result was removed."
        raise ApiError(410, "api.future", message, fix="send the request again")
    return row


def _queue_state(service: Service, future: Row) -> Row:
    """Whether the model of a future trains, or waits for a place."""
    with service.db.read() as connection:
        query = select(t.jobs).join(t.api_models, t.api_models.c.job == t.jobs.c.id)
        job = connection.execute(query.where(t.api_models.c.id == future["stream"])).mappings().one_or_none()
        if job is None:
            return {"queue_state": "active"}
        if (missing := missing_request(connection, future["stream"], job["step"], future["seq"])) is not None:
            reason = f"it waits for request {missing} of this model, which has not arrived"
            return {"queue_state": "paused_capacity", "queue_state_reason": reason}
        if job["state"] in ON_WORKER:
            return {"queue_state": "active"}
        waits = service.controller.outlook(connection, dict(job)).get("waits", {"position": 1, "why": job["state"]})
    reason = f"number {waits['position']} of those that wait: {waits['why']}"
    return {"queue_state": "paused_capacity", "queue_state_reason": reason}
