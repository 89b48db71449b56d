"""Routes that save and load models."""

from __future__ import annotations

import secrets
from typing import Any

from fastapi import APIRouter

from lorafusion_jax.serve.api.problems import ApiError
from lorafusion_jax.serve.tinker.access import PREFIX, InTurn, Reader, ServiceOf, StreamsOf, Writer
from lorafusion_jax.serve.tinker.checkpoints import find_checkpoint, get_checkpoint, waiting_save
from lorafusion_jax.serve.tinker.futures import Row
from lorafusion_jax.serve.tinker.log import find_model
from lorafusion_jax.serve.tinker.requests import (
    CHECKPOINT,
    LONGEST_TTL,
    SHORTEST_TTL,
    LoadWeights,
    Save,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
    WeightsInfo,
)
from lorafusion_jax.serve.tinker.training import accept_call, add_model, refuse_model

router = APIRouter(prefix=PREFIX, tags=["training API"], route_class=InTurn)


@router.post("/save_weights")
def save_weights(body: SaveWeights, service: ServiceOf, streams: StreamsOf, owner: Writer) -> dict[str, Any]:
    """Writes weights and optimizer state, from which models can be made."""
    values = _values(body, "weights", overwrite=body.overwrite)
    if body.path is None:
        values["name"] = f"request-{body.seq_id}"
    return accept_call(
        service, streams, owner, body.model_id, body.seq_id, "save_weights", values=values | body.mistake
    )


@router.post("/save_weights_for_sampler")
def save_for_sampler(body: SaveForSampler, service: ServiceOf, streams: StreamsOf, owner: Writer) -> dict[str, Any]:
    """Writes weights to sample from: under a name, or for a sampler alone."""
    values = _values(body, "sampler_weights", sampler=body.sampling_session_seq_id)
    if body.kind != "snapshot":
        values["refused"] = "samplers whose weights move while they are used (inflight) are not served"
    elif body.path is None and body.sampling_session_seq_id is None:
        values["refused"] = "there is neither a path nor a sampling_session_seq_id"
    kind = "save_weights_for_sampler"
    return accept_call(service, streams, owner, body.model_id, body.seq_id, kind, values=values | body.mistake)


@router.post("/save_weights_external")
def save_external(body: SaveExternal, service: ServiceOf, streams: StreamsOf, owner: Writer) -> dict[str, Any]:
    """Writes a PEFT folder to download."""
    values = _values(body, "external_weights")
    if body.path is None:
        values["refused"] = "there is no path"
    elif body.age_encryption_recipients:
        values["refused"] = "files are not encrypted here; encrypt them after the download"
    kind = "save_weights_external"
    return accept_call(service, streams, owner, body.model_id, body.seq_id, kind, values=values | body.mistake)


def _values(body: Save, kind: str, *, overwrite: bool = False, sampler: int | None = None) -> Row:
    """What the worker and the row of the checkpoint need. A mistake fails the request in its turn: the log goes on."""
    mistake = ""
    if body.path is not None and CHECKPOINT.fullmatch(body.path) is None:
        mistake = (
            f"{body.path[:140]!r} is no name of a checkpoint; it has 1 to 128 letters, digits, '.', '_' and '-',"
            " the first of them a letter or digit"
        )
    elif body.ttl_seconds is not None and not SHORTEST_TTL <= body.ttl_seconds <= LONGEST_TTL:
        mistake = f"ttl_seconds is {SHORTEST_TTL} to {LONGEST_TTL}, not {body.ttl_seconds}"
    return {
        "refused": mistake,
        "kind": kind,
        "name": body.path,
        "overwrite": overwrite,
        "ttl": body.ttl_seconds,
        "sampler": sampler,
        "data": {} if body.user_metadata is None else {"user_metadata": body.user_metadata},
    }


@router.post("/load_weights")
def load_weights(body: LoadWeights, service: ServiceOf, streams: StreamsOf, owner: Writer) -> dict[str, Any]:
    """Makes a model from a checkpoint, or replaces the weights of one."""
    if body.mistake and body.model_id is not None and body.seq_id is not None:
        return accept_call(service, streams, owner, body.model_id, body.seq_id, "load_weights", values=body.mistake)
    with service.db.read() as connection:
        row = find_checkpoint(connection, body.path, owner.sees)
        model = None if body.model_id is None else find_model(connection, body.model_id, owner.sees)
        before = body.seq_id if row is not None and body.model_id == row["model"] else None
        writer = None if row is None else waiting_save(connection, row["model"], row["name"], before)
    mistake = _refuse_load(body, row, model)
    if writer is not None and not mistake:
        mistake = f"{body.path[:300]} is written by request {writer} of its model; wait for its result, then load it"
    if body.session_id is not None and body.model_seq_id is not None:
        config = {} if row is None else row["config"]
        base = "" if row is None else row["base"]
        mistake = mistake or refuse_model(service, base, config)
        load = None if row is None else {"folder": row["folder"], "optimizer": body.optimizer}
        answer = {"type": "load_weights", "path": body.path}
        config = config | ({} if body.optimizer else {"seed": config.get("seed", secrets.randbelow(2**31))})
        future = add_model(
            service, owner, body.session_id, body.model_seq_id, base, config, answer, mistake, body.user_metadata, load
        )
        streams.taken()
        return future
    if body.model_id is None or body.seq_id is None:
        message = "load_weights wants session_id and model_seq_id, or model_id and seq_id."
        raise ApiError(422, "api.missing", message, fix="send it as the SDK does")
    values = {"refused": mistake, "folder": "" if row is None else row["folder"], "optimizer": body.optimizer}
    values |= {"path": body.path}
    return accept_call(service, streams, owner, body.model_id, body.seq_id, "load_weights", values=values)


def _refuse_load(body: LoadWeights, row: Row | None, model: Row | None) -> str:
    if body.weights_access_token is not None:
        return "tokens of other accounts are not served; checkpoints are their owner's only"
    if row is None:
        return f"there is no checkpoint {body.path[:300]}"
    if row["kind"] != "weights":
        return f"{body.path[:300]} has weights alone; save_state writes what a model can be made from"
    if body.base_model not in (None, row["base"]):
        return f"the checkpoint is of the base {row['base']}, not of {str(body.base_model)[:200]}"
    if body.optimizer_config is not None and body.optimizer_config.type != "adamw":
        return f"the optimizer {body.optimizer_config.type[:100]} is not served; there is adamw"
    if model is None:
        return ""
    for key in ("rank", "train_mlp", "train_attn"):
        if row["config"][key] != model["config"][key]:
            its, other = row["config"][key], model["config"][key]
            return f"{key} of the checkpoint is {its}, and of the model {other}; make a model from the state instead"
    return ""


@router.post("/weights_info")
def weights_info(body: WeightsInfo, service: ServiceOf, owner: Reader) -> dict[str, Any]:
    """Says of what a checkpoint is."""
    with service.db.read() as connection:
        row = get_checkpoint(connection, body.tinker_path, owner.sees)
    config = row["config"]
    flags = {"train_unembed": False, "train_mlp": config["train_mlp"], "train_attn": config["train_attn"]}
    answer = {"base_model": row["base"], "is_lora": True, "lora_rank": config["rank"]}
    return answer | flags | {"optimizer_config": {"type": "adamw"}}
