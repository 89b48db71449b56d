"""Routes of samplers and samples."""

from __future__ import annotations

import json
import secrets
import time
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from sqlalchemy import Connection

from lorafusion_jax.files import make_folder
from lorafusion_jax.serve.api.pages import get_row
from lorafusion_jax.serve.api.problems import ApiError
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.tinker.access import PREFIX, InTurn, Reader, ServiceOf, StreamsOf, Writer
from lorafusion_jax.serve.tinker.checkpoints import add_sampler, get_checkpoint
from lorafusion_jax.serve.tinker.futures import Row, add_future, find_future
from lorafusion_jax.serve.tinker.log import beat, check_waiting, find_session, future_of, payload_of
from lorafusion_jax.serve.tinker.requests import CreateSampler, Id, Loose, Seq

router = APIRouter(prefix=PREFIX, tags=["training API"], route_class=InTurn)
MOST_SAMPLES = 128  # of one prompt


class Sample(Loose):
    """A request for samples. The worker reads the rest: what is wrong there fails the future."""

    sampling_session_id: Id
    seq_id: Seq
    num_samples: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] = 1


@router.post("/create_sampling_session")
def create_sampler(body: CreateSampler, service: ServiceOf, streams: StreamsOf, owner: Writer) -> dict[str, Any]:
    """Makes a sampler of a base, or of weights that were saved. What it samples from never changes."""
    sampler = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
    with service.db.write() as connection:
        session = find_session(connection, body.session_id, owner.sees)
        beat(connection, body.session_id)
        base, folder = body.base_model, None
        if body.model_path is not None:
            checkpoint = get_checkpoint(connection, body.model_path, owner.sees)
            if checkpoint["kind"] == "external_weights":
                message = "external weights are for other programs."
                raise ApiError(422, "api.value", message, fix="save_weights_for_sampler, and its path")
            base, folder = checkpoint["base"], checkpoint["folder"]
        if base not in service.settings.bases:
            message = f"base_model {str(base)[:200]} is not served."
            raise ApiError(422, "api.value", message, fix=f"one of {', '.join(service.settings.bases)}")
        arguments = (connection, sampler, session["owner"], session["id"], str(base))
        for path in add_sampler(*arguments, path=body.model_path, folder=folder):
            streams.remove(connection, path)
    streams.taken()
    return {"type": "create_sampling_session", "sampling_session_id": sampler}


@router.get("/samplers/{sampler}")
def show_sampler(sampler: Id, service: ServiceOf, owner: Reader) -> dict[str, Any]:
    """Says what a sampler samples from."""
    with service.db.read() as connection:
        row = get_row(connection, t.api_samplers, sampler, owner.sees, "sampler")
    return {"sampler_id": row["id"], "base_model": row["base"], "model_path": row["path"]}


@router.post("/asample")
def sample(body: Sample, service: ServiceOf, streams: StreamsOf, owner: Writer) -> dict[str, Any]:
    """Asks for samples. A repeated request gets the first future."""
    future = future_of(body.sampling_session_id, body.seq_id)
    with service.db.write() as connection:
        sampler = get_row(connection, t.api_samplers, body.sampling_session_id, owner.sees, "sampler")
        if find_future(connection, future, None) is None:
            _add(connection, service.settings.home, sampler, body)
    streams.push_samples()
    return {"request_id": future, "sample_sequence_ids": [f"{future}:{number}" for number in range(body.num_samples)]}


def _add(connection: Connection, home: Path, sampler: Row, body: Sample) -> None:
    """Adds a request with the seed and the weights that it has also if it runs again."""
    values, stream, seq = body.model_dump(mode="json"), sampler["id"], body.seq_id
    params = values.get("sampling_params")
    if isinstance(params, dict) and params.get("seed") is None:
        params["seed"] = secrets.randbelow(2**63)
    size = len(json.dumps(values))
    check_waiting(connection, stream, sampler["owner"], size)
    make_folder((home / payload_of(stream, seq)).parent)  # of its result
    row = {"stream": stream, "seq": seq, "kind": "sample", "bytes": size, "at": time.time()}
    row |= {"body": {"request": values, "folder": sampler["folder"]}}
    connection.execute(t.api_requests.insert().values(row))
    add_future(connection, future_of(stream, seq), sampler["owner"], stream, seq, "sample")
    same = t.api_samplers.c.id == stream
    connection.execute(t.api_samplers.update().where(same).values(used=time.time()))
    beat(connection, sampler["session"])
