"""Routes of models: they are made, trained by calls, and ended."""

from __future__ import annotations

import mmap
import secrets
import time
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from sqlalchemy import Connection, func, select

from lorafusion_jax.config.places import Places
from lorafusion_jax.serve.api.access import Service
from lorafusion_jax.serve.api.problems import ApiError
from lorafusion_jax.serve.states import LIVE
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.keys import Owner, limits_of
from lorafusion_jax.serve.tinker.access import PREFIX, InTurn, Reader, ServiceOf, StreamsOf, Writer
from lorafusion_jax.serve.tinker.bodies import Body, BodyError
from lorafusion_jax.serve.tinker.futures import USER, Row, add_future, complete, fail, find_future
from lorafusion_jax.serve.tinker.log import accept, beat, find_model, find_session, future_of
from lorafusion_jax.serve.tinker.messages import MEDIA_TYPE, Head, read_head, read_turn
from lorafusion_jax.serve.tinker.requests import CreateModel, ModelOnly, OptimStep
from lorafusion_jax.serve.tinker.streams import Streams

router = APIRouter(prefix=PREFIX, tags=["training API"], route_class=InTurn)
MOST_MODELS = 64  # of an owner that live
ALPHA = 32.0
TARGETS = {"train_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "train_mlp": ("gate_proj", "up_proj", "down_proj")}


@router.post("/create_model")
def create_model(body: CreateModel, service: ServiceOf, streams: StreamsOf, owner: Writer) -> dict[str, Any]:
    """Asks for a place for a new adapter. Its future is there once the adapter has one."""
    config = {} if body.lora_config is None else body.lora_config.model_dump(exclude={"type"})
    config |= {"optimizer": body.optimizer_config.type}
    if config.get("seed") is None:
        config["seed"] = secrets.randbelow(2**31)
    problem = refuse_model(service, body.base_model, config)
    answer = {"type": "create_model"}
    future = add_model(
        service, owner, body.session_id, body.model_seq_id, body.base_model, config, answer, problem, body.user_metadata
    )
    streams.taken()
    return future


def add_model(
    service: Service, owner: Owner, session: str, seq: int, base: str, config: Row, answer: Row, problem: str,
    data: Row | None, load: Row | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Adds a model, or only the future of one that is refused. A repeated request gets the first future.

    Args:
        answer: result of its future, beside the id of the model.
        problem: why it is refused.
        load: checkpoint from which it starts.
    """
    model = f"{session}:train:{seq}"
    future = future_of(model, 0)
    with service.db.write() as connection:
        owner_name = find_session(connection, session, owner.sees)["owner"]
        beat(connection, session)
        if find_future(connection, future, None) is None:
            kind = answer["type"]
            add_future(connection, future, owner_name, model, 0, kind)
            if problem:
                fail(connection, future, problem, USER)
                return {"request_id": future}
            check_models(service, connection, owner_name)
            spec = _spec(model, base, config, answer, load)
            job = service.jobs.submit(connection, owner_name, spec)["id"]
            service.jobs.change(connection, job, "accept", actor="training API", rank=config["rank"], tokens=0)
            now = time.time()
            row = {"id": model, "session": session, "owner": owner_name, "seq": seq, "job": job, "base": base}
            row |= {"config": config, "data": data or {}, "created": now, "used": now}
            connection.execute(t.api_models.insert().values(row))
        elif load is None and (difference := _difference(connection, model, base, config)):
            message = f"model {seq} of this session was made with {difference}."
            fix = "a model_seq_id of its own for each model: one client for a session, in one process"
            raise ApiError(422, "api.other-request", message, fix=fix)
    return {"request_id": future, "model_id": model}


def _difference(connection: Connection, model: str, base: str, config: Row) -> str:
    """In what a model differs from what is asked for again; "" if in nothing, and of one that was refused."""
    query = select(t.api_models.c.base, t.api_models.c.config).where(t.api_models.c.id == model)
    row = connection.execute(query).first()
    if row is None:
        return ""
    first, asked = {"base_model": row.base} | row.config, {"base_model": base} | config
    changed = [key for key in asked if key != "seed" and asked[key] != first.get(key)]
    return ", ".join(f"{key} {first.get(key)} instead of {asked[key]}" for key in changed)


def _spec(model: str, base: str, config: Row, answer: Row, load: Row | None) -> Row:
    """The job of a model: it has a place and states like others, and its data comes by requests."""
    targets = [name for flag, names in TARGETS.items() if config[flag] for name in names]
    lora = {"kind": "lora", "rank": config["rank"], "alpha": ALPHA, "dropout": 0.0}
    lora |= {"targets": "all-linear" if len(targets) == sum(map(len, TARGETS.values())) else targets}
    return {
        "name": model.replace(":", "-"),
        "base": base,
        "data": {},
        "lora": lora,
        "optim": {},
        "objective": {},
        "batch": {"global_samples": 1},
        "steps": None,
        "epochs": 1,
        "seed": config["seed"],
        "weight": 1.0,
        "stream": {"model": model, "answer": answer, "load": load},
    }


def refuse_model(service: Service, base: str, config: Row) -> str:
    """Says why there can be no such model; empty if there can."""
    if base not in service.settings.bases:
        return f"base_model {base[:200]} is not served; there is {', '.join(service.settings.bases)}"
    if "rank" not in config:
        return "full fine-tuning is not served; give a lora_config"
    if config["optimizer"] != "adamw":
        return f"the optimizer {config['optimizer'][:100]} is not served; there is adamw"
    if not (config["train_attn"] or config["train_mlp"]):
        return "adapters of the head alone are not served; train_attn or train_mlp must be true"
    places = Places.of(service.settings.places)
    if not places.holds("lora", config["rank"]):
        by_kind = zip(places.kinds, places.ranks, strict=True)
        largest = max((rank for kind, rank in by_kind if kind == "lora"), default=0)
        return f"rank {config['rank']} is above the largest place of the service, {largest}"
    return ""


def check_models(service: Service, connection: Any, owner: str) -> None:
    """Refuses another model of an owner who has too many.

    Raises:
        ApiError: 429, `api.models` or `job.limit`.
    """
    live = t.api_models.join(t.jobs, t.jobs.c.id == t.api_models.c.job)
    count = select(func.count()).select_from(live).where(t.api_models.c.owner == owner, t.jobs.c.state.in_(LIVE))
    models, limits = connection.scalar(count) or 0, limits_of(connection, owner)
    jobs = service.jobs.count_live(connection, owner)
    most = min(service.settings.most_jobs, jobs + 1 if limits.jobs is None else limits.jobs)
    if models >= MOST_MODELS or jobs >= most:
        message = f"{owner} has {models} models and {jobs} live jobs."
        raise ApiError(429, "api.models", message, fix="end some, or wait", headers={"Retry-After": "10"})


@router.post("/unload_model")
def unload_model(body: ModelOnly, service: ServiceOf, owner: Writer) -> dict[str, Any]:
    """Ends a model; its place is free."""
    with service.db.write() as connection:
        model = find_model(connection, body.model_id, owner.sees)
        future = f"{model['id']}:unload"
        if find_future(connection, future, None) is None:
            add_future(connection, future, model["owner"], model["id"], 0, "unload_model")
            complete(connection, future, {"type": "unload_model", "model_id": model["id"]})
            if service.jobs.get(connection, model["job"])["state"] in LIVE:
                service.jobs.ask(connection, model["job"], "cancel", actor=model["owner"], why="it was unloaded")
    return {"request_id": future, "model_id": body.model_id}


@router.post("/get_info")
def get_info(body: ModelOnly, service: ServiceOf, owner: Reader) -> dict[str, Any]:
    """Says what a model is."""
    with service.db.read() as connection:
        model = find_model(connection, body.model_id, owner.sees)
    data = {"arch": "", "model_name": model["base"], "tokenizer_id": model["base"]}
    answer = {"type": "get_info", "model_id": model["id"], "model_data": data, "model_name": model["base"]}
    return answer | {"is_lora": True, "lora_rank": model["config"]["rank"], "optimizer_config": {"type": "adamw"}}


@router.post("/forward_backward")
async def forward_backward(request: Request, service: ServiceOf, streams: StreamsOf, owner: Writer) -> dict[str, Any]:
    """Adds rows to the sums of a model, or only computes their log-probabilities."""
    if not request.headers.get("content-type", "").startswith(MEDIA_TYPE):
        raise ApiError(415, "api.media-type", f"the body must be {MEDIA_TYPE}.", fix="tinker 0.25 or newer")
    part = service.settings.home / "requests" / f".{secrets.token_hex(8)}.part"
    body = await streams.receiver.receive(request, owner.name, part)
    try:
        return await service.turns.run(owner.name, _accept_rows, service, streams, owner, body)
    finally:
        part.unlink(missing_ok=True)  # it was moved, or is not needed


def _accept_rows(service: Service, streams: Streams, owner: Owner, body: Body) -> dict[str, Any]:
    """Adds a body to the log of its model; one that is of no use fails in its turn, if it says which that is.

    Raises:
        ApiError: 413 or 422, it does not; and those of `accept`.
    """
    problem = body.problem
    if problem is None:
        try:
            head = _read_head(body.path)
        except BodyError as unreadable:
            problem = unreadable
        else:
            kind = "forward" if head.forward_only else "forward_backward"
            return accept_call(service, streams, owner, head.model_id, head.seq_id, kind, body=body, tokens=head.tokens)
    turn = read_turn(body.start)
    if turn is None:
        raise problem
    values = {"refused": f"{problem.error['what'].removesuffix('.')}: {problem.error['fix']}"}
    return accept_call(service, streams, owner, turn.model_id, turn.seq_id, "forward_backward", values=values)


def _read_head(path: Path) -> Head:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as body:
            return read_head(body)
    except ValueError as problem:  # an empty file cannot be mapped either
        raise BodyError(422, "api.body", str(problem), fix="send it as the SDK does") from None


@router.post("/optim_step")
def optim_step(body: OptimStep, service: ServiceOf, streams: StreamsOf, owner: Writer) -> dict[str, Any]:
    """Takes an optimizer step from the sums of a model, with numbers of its own."""
    values: Row = {"refused": ""}
    if body.adam_params is None:
        name = "" if body.optimizer_params is None else body.optimizer_params.type
        values["refused"] = f"the model trains with adamw, not with {name[:100]!r}"
    else:
        values |= body.adam_params.model_dump(exclude={"type"})
    return accept_call(service, streams, owner, body.model_id, body.seq_id, "optim_step", values=values | body.mistake)


def accept_call(
    service: Service, streams: Streams, owner: Owner, model: str, seq: int, kind: str, **request: Any
) -> dict[str, Any]:
    """Adds a request to the log of a model, and sends what can run now."""
    with service.db.write() as connection:
        row = find_model(connection, model, owner.sees)
        future = accept(connection, service.jobs, service.settings.home, row, seq, kind, **request)
    streams.push(row["job"])
    return {"request_id": future["id"], "model_id": row["id"]}
