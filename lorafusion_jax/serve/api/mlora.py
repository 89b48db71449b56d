"""mLoRA's routes over the service, so that programs written for its server run against this one.

It has no users and answers every request with status 200 and a message. A prompt is a Jinja template with a row of the
data as `data_point`; it is rendered in the child process, in the sandbox of chat templates.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from email.parser import BytesParser
from email.policy import HTTP
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse
from sqlalchemy import Connection, select
from starlette.concurrency import run_in_threadpool

from lorafusion_jax.config.read import has_half_character
from lorafusion_jax.digests import digest_of
from lorafusion_jax.serve.api.access import JobsWrite, Service, ServiceOf, ask_child, needs
from lorafusion_jax.serve.api.datasets import keep
from lorafusion_jax.serve.api.jobs import find_problems
from lorafusion_jax.serve.control.spec import JobSpec
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.keys import Owner

router = APIRouter(tags=["mlora"], dependencies=[Depends(needs("jobs:write"))])
UPLOADS = ("/data", "/prompt")
UPLOAD_S = 60.0
MOST_BYTES = 64 << 20  # of an uploaded file, which is read into memory
OBJECTIVES = {"train": "sft", "dpo": "dpo", "cpo": "cpo"}
PROMPTS = {"train": "instruction", "dpo": "preference", "cpo": "preference"}
KINDS = {"lora": "lora", "loraplus": "lora", "vera": "vera", "dora": "dora"}
STATES = {
    "done": "DONE",
    "draining": "TERMINATING",
    "failed": "FAILED",
    "rejected": "FAILED",
    "cancelled": "TERMINATED",
}
LONGEST_NAME = 100
TEXTS = ("name", "data_name", "prompt_name", "prompt_type", "preprocess", "type", "dataset", "adapter", "reference")
TEXTS += ("optimizer", "lrscheduler", "loss_type")
WRONG = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError)  # of values; pydantic's is a ValueError
Name = Annotated[str, Query(min_length=1, max_length=LONGEST_NAME)]
Message = dict[str, str]


class Refused(Exception):
    """A request that is answered with a message."""


def _say(text: str) -> Message:
    return {"message": text}


@router.get("/data")
def list_data(service: ServiceOf) -> list[dict[str, str]]:
    """Uploaded files."""
    return _files(service, "data")


@router.get("/prompt")
def list_prompts(service: ServiceOf) -> list[dict[str, str]]:
    """Uploaded templates."""
    return _files(service, "prompt")


@router.post("/data")
async def add_data(name: Name, request: Request, service: ServiceOf) -> Message:
    """Uploads rows as the file `data_file` of a form: JSON, or YAML."""
    return await _upload(service, request, "data", name)


@router.post("/prompt")
async def add_prompt(name: Name, request: Request, service: ServiceOf) -> Message:
    """Uploads a template as the file `data_file` of a form: YAML with the key `template`."""
    return await _upload(service, request, "prompt", name)


@router.delete("/data")
def delete_data(name: Name, service: ServiceOf) -> Message:
    """Forgets a file."""
    return _delete_file(service, "data", name)


@router.delete("/prompt")
def delete_prompt(name: Name, service: ServiceOf) -> Message:
    """Forgets a template."""
    return _delete_file(service, "prompt", name)


@router.get("/dataset")
def list_datasets(service: ServiceOf) -> list[str]:
    """Pairs of a file and a template, each as JSON."""
    return [json.dumps(value) for value in _entries(service, "dataset")]


@router.post("/dataset")
async def add_dataset(request: Request, service: ServiceOf) -> Message:
    """Joins a file and a template."""
    fields = await _json(request, "name", "data_name", "prompt_name", "prompt_type", "preprocess")

    def add(connection: Connection) -> Message:
        files = {kind: _read(connection, kind, fields[f"{kind}_name"]) for kind in ("data", "prompt")}
        if fields["prompt_type"] not in PROMPTS.values():
            raise Refused(
                f"prompt_type {fields['prompt_type']} is not served: {', '.join(sorted(set(PROMPTS.values())))}"
            )
        paths = {kind: value["file"] for kind, value in files.items() if value is not None}
        if len(paths) < 2:
            raise Refused("error parameters")
        _add(connection, "dataset", fields["name"], fields | paths, "dataset already exist")
        return _say("success")

    return await run_in_threadpool(_change, service, add)


@router.delete("/dataset")
def delete_dataset(name: Name, service: ServiceOf) -> Message:
    """Forgets a pair."""
    return _change(service, lambda connection: _delete(connection, "dataset", name, "the dataset not exist"))


@router.get("/showcase")
async def show_first_row(name: Name, service: ServiceOf, owner: JobsWrite) -> dict[str, Any]:
    """The first row of a data set, rendered."""
    dataset = await run_in_threadpool(_lookup, service, "dataset", name)
    if dataset is None:
        return _say("the dataset not exist")
    answer = await ask_child(service, owner, "render", _rendering(service, dataset) | {"most": 1, "to": None})
    problems = answer["problems"]
    return (
        _say(problems[0]["what"])
        if problems
        else {"example": [text for row in answer["rows"] for text in row.values()]}
    )


@router.get("/adapter")
def list_adapters(service: ServiceOf) -> list[str]:
    """Settings of adapters with the states of their tasks, each as JSON."""
    states = {task["adapter"]: task for task in _tasks(service)}
    return [
        json.dumps(adapter | {"state": task["state"] if task else "UNK", "task": task["name"] if task else "NO"})
        for adapter in _entries(service, "adapter")
        for task in [states.get(adapter["name"])]
    ]


@router.post("/adapter")
async def add_adapter(request: Request, service: ServiceOf) -> Message:
    """Adds the settings of an adapter."""
    fields = await _json(request, "name", "type", "r", "alpha", "target_modules", "optimizer", "lr")

    def add(connection: Connection) -> Message:
        if fields["type"] not in KINDS:
            raise Refused(f"adapter type {fields['type']} is not served: {', '.join(KINDS)}")
        _add(connection, "adapter", fields["name"], fields | {"path": secrets.token_hex(4)}, "already exist")
        return _say("success")

    return await run_in_threadpool(_change, service, add)


@router.delete("/adapter")
def delete_adapter(name: Name, service: ServiceOf) -> Message:
    """Forgets the settings of an adapter that nothing trains."""
    if any(task["adapter"] == name and task["state"] != "DONE" for task in _tasks(service)):
        return _say("adapter with a task, cannot be delete.")
    return _change(service, lambda connection: _delete(connection, "adapter", name, "the adapter not exist"))


@router.get("/task")
def list_tasks(service: ServiceOf) -> list[str]:
    """Tasks with their states: UNK, a percentage, DONE, FAILED, TERMINATING or TERMINATED; each as JSON."""
    return [json.dumps(task) for task in _tasks(service)]


@router.post("/task")
async def add_task(request: Request, service: ServiceOf, owner: JobsWrite) -> Message:
    """Submits a job."""
    fields = await _json(request, "name", "type", "dataset", "adapter", "batch_size", "num_epochs", "cutoff_len")
    pair = await run_in_threadpool(_find_pair, service, fields)
    try:
        train = await _render(service, owner, pair.dataset)
        spec = JobSpec.model_validate(_spec(service, fields, pair.adapter, train, pair.reference))
    except WRONG as problem:
        return _say(f"invalid: {problem}")
    return await run_in_threadpool(_submit, service, owner, fields, spec)


@router.delete("/task")
def end_task(name: Name, service: ServiceOf, owner: JobsWrite) -> Message:
    """Cancels a task, or forgets one that is done."""

    def end(connection: Connection) -> Message:
        task = _read(connection, "task", name)
        if task is None:
            raise Refused("the task not exist")
        job = service.jobs.get(connection, task["job"])
        if job["state"] in STATES and job["state"] != "draining":
            _delete(connection, "task", name, "")
            return _say("delete the done task.")
        service.jobs.ask(connection, job["id"], "cancel", actor=owner.name)
        return _say(f"to terminate the task {name}, wait.")

    return _change(service, end)


@router.get("/dispatcher")
def show_dispatcher(service: ServiceOf) -> dict[str, Any]:
    """What runs and what waits."""
    tasks = _tasks(service)
    names = [task["name"] for task in tasks if task["state"].endswith("%")]
    return {"running": names, "ready": [task["name"] for task in tasks if task["state"] == "UNK"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """What a task names. `reference` is the id of a finished adapter."""

    dataset: dict[str, Any]
    adapter: dict[str, Any]
    reference: str | None


def _find_pair(service: Service, fields: dict[str, Any]) -> _Pair:
    with service.db.read() as connection:
        dataset, adapter = (
            _read(connection, "dataset", fields["dataset"]),
            _read(connection, "adapter", fields["adapter"]),
        )
        task, reference = _read(connection, "task", fields["name"]), fields.get("reference", "base")
        reference_task = None if reference == "base" else _finished(service, connection, reference)
    if task is not None:
        raise Refused("already exist")
    if dataset is None or adapter is None:
        raise Refused(f"can not found the {'dataset' if dataset is None else 'adapter'}")
    if reference != "base" and reference_task is None:
        raise Refused("can not found the reference adapter")
    if PROMPTS.get(fields["type"]) != dataset["prompt_type"]:
        raise Refused(f"a task of type {fields['type']} with prompts of type {dataset['prompt_type']} is not served")
    return _Pair(dataset=dataset, adapter=adapter, reference=reference_task)


def _submit(service: Service, owner: Owner, fields: dict[str, Any], spec: JobSpec) -> Message:
    if problems := find_problems(service, owner, spec):
        return _say("; ".join(problem["what"] for problem in problems))

    def submit(connection: Connection) -> Message:
        job = service.jobs.submit(connection, owner.name, spec.model_dump(mode="json"))
        _add(connection, "task", fields["name"], fields | {"job": job["id"]}, "already exist")
        return _say("success")

    return _change(service, submit)


def _spec(
    service: Service, fields: dict[str, Any], adapter: dict[str, Any], train: str, reference: str | None
) -> dict[str, Any]:
    """Returns the job of a task."""
    modules = adapter["target_modules"]
    optim = {"name": adapter["optimizer"], "lr": float(adapter["lr"]), "schedule": "constant", "warmup": 0}
    if adapter.get("lrscheduler") == "cosine":
        optim |= {"schedule": "cosine", "min_lr_ratio": float(adapter.get("eta_min", 0.0)) / float(adapter["lr"])}
    if adapter["optimizer"] == "sgd":
        optim |= {"momentum": float(adapter.get("momentum", 0.0))}
    if adapter["type"] == "loraplus":
        optim |= {"lr_ratio": float(adapter["lr_ratio"])}
    kind = KINDS[adapter["type"]]
    lora = {"kind": kind, "rank": int(adapter["r"]), "alpha": float(adapter["alpha"])}
    lora |= {"targets": [name for name, is_target in modules.items() if is_target]}
    lora |= {} if kind == "dora" else {"dropout": float(adapter.get("dropout", 0.0))}
    objective: dict[str, Any] = {"name": OBJECTIVES[fields["type"]]}
    if fields["type"] != "train":
        objective |= {"beta": float(fields["beta"]), "label_smoothing": float(fields.get("label_smoothing", 0.0))}
        objective |= {"loss": fields["loss_type"]} if "loss_type" in fields else {}
    if fields["type"] == "dpo":
        objective |= {"reference": reference or "base"}
    return {
        "name": "".join(c if c.isalnum() else "-" for c in fields["name"].lower())[:60].strip("-") or "task",
        "base": next(iter(service.settings.bases)),
        "data": {"train": train, "max_length": int(fields["cutoff_len"])}
        | ({"loss": "all"} if fields["type"] == "train" else {}),
        "lora": lora,
        "optim": optim,
        "objective": objective,
        "batch": {"global_samples": int(fields["batch_size"])},
        "epochs": int(fields["num_epochs"]),
    }


async def _render(service: Service, owner: Owner, dataset: dict[str, Any]) -> str:
    """Renders all rows of a data set and keeps them. Returns the id of the result."""
    service.settings.datasets.mkdir(parents=True, exist_ok=True)
    draft = service.settings.datasets / f".upload-{secrets.token_hex(8)}"
    file = draft / "data.jsonl"
    try:
        draft.mkdir()
        answer = await ask_child(
            service, owner, "render", _rendering(service, dataset) | {"most": None, "to": str(file)}
        )
        if answer["problems"]:
            raise Refused(answer["problems"][0]["what"])
        sha = await run_in_threadpool(digest_of, file)
        response = await keep(service, owner, draft, "rendered.jsonl", sha, file.stat().st_size)
        row = json.loads(bytes(response.body))
        if "id" not in row:
            raise Refused(row["error"]["what"] if "error" in row else "the rows cannot be used")
        return row["id"]
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _rendering(service: Service, dataset: dict[str, Any]) -> dict[str, Any]:
    folder = _folder(service)
    return {
        "file": str(folder / dataset["data"]),
        "prompt": str(folder / dataset["prompt"]),
        "type": dataset["prompt_type"],
    }


def _tasks(service: Service) -> list[dict[str, Any]]:
    with service.db.read() as connection:
        pairs = [(task, service.jobs.get(connection, task["job"])) for task in _entries(service, "task")]
    return [{key: value for key, value in task.items() if key != "job"} | {"state": _state(job)} for task, job in pairs]


def _state(job: dict[str, Any]) -> str:
    if job["state"] in STATES:
        return STATES[job["state"]]
    return f"{100 * job['step'] / job['steps']:g}%" if job["state"] == "running" and job["steps"] else "UNK"


def _finished(service: Service, connection: Connection, adapter: str) -> str | None:
    """Id of the adapter that a done task has trained under this name."""
    for task in _entries(service, "task"):
        if task["adapter"] == adapter:
            return connection.scalar(select(t.artifacts.c.id).where(t.artifacts.c.job == task["job"]))
    return None


async def _json(request: Request, *needed: str) -> dict[str, Any]:
    """Reads a JSON object with these keys.

    Raises:
        Refused: a key is missing.
    """
    try:
        fields = json.loads(await request.body())
    except (ValueError, RecursionError):
        fields = None
    missing = [key for key in needed if not isinstance(fields, dict) or key not in fields]
    if missing or not isinstance(fields, dict):
        raise Refused(f"error parameters: {', '.join(missing)}")
    if wrong := [key for key, value in fields.items() if not _is_served(key, value)]:
        raise Refused(f"error parameters: {', '.join(map(ascii, wrong))}")
    return fields


def _is_served(key: str, value: Any) -> bool:
    """Whether a field has the type of its name, and what a text or a number can hold."""
    if has_half_character(key):
        return False
    if key in TEXTS:
        return isinstance(value, str) and 0 < len(value) <= LONGEST_NAME and not has_half_character(value)
    if key == "target_modules":
        names = value if isinstance(value, dict) else {"": None}
        return all(isinstance(is_target, bool) and not has_half_character(name) for name, is_target in names.items())
    if isinstance(value, str):
        return not has_half_character(value)
    return not isinstance(value, dict | list) and not (isinstance(value, float) and not math.isfinite(value))


async def _upload(service: Service, request: Request, kind: str, name: str) -> Message:
    length = request.headers.get("content-length", "")
    if not length.isdigit() or int(length) > MOST_BYTES:
        return _say("the file is too large")
    head = b"Content-Type: " + request.headers.get("content-type", "").encode("latin-1") + b"\r\n\r\n"
    try:
        async with service.forms, asyncio.timeout(UPLOAD_S):  # one is in memory
            ending, content = await run_in_threadpool(_read_form, head, await request.body())
    except TimeoutError:
        return _say("the upload is too slow")
    if ending not in ("json", "yaml"):
        return _say("unsupport file type" if content else "error file name")
    file = f"{secrets.token_hex(8)}.{ending}"

    def add(connection: Connection) -> Message:
        _add(connection, kind, name, {"file": file}, "file already exist")
        folder = _folder(service)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content)
        return _say("success")

    return await run_in_threadpool(_change, service, add)


def _read_form(head: bytes, body: bytes) -> tuple[str, bytes]:
    """Returns the ending and the content of the only file of a form; empty if it is none."""
    try:
        form = BytesParser(policy=HTTP).parsebytes(head + body)
        parts = [part for part in form.iter_parts() if part.get_filename()] if form.is_multipart() else []
        if len(parts) != 1:
            return "", b""
        content = parts[0].get_payload(decode=True)
        return (parts[0].get_filename() or "").rpartition(".")[2], content if isinstance(content, bytes) else b""
    except (ValueError, LookupError, TypeError, AttributeError):  # of headers that the library cannot read
        return "", b""


def _folder(service: Service) -> Path:
    return service.settings.home / "mlora"


def _lookup(service: Service, kind: str, name: str) -> dict[str, Any] | None:
    with service.db.read() as connection:
        return _read(connection, kind, name)


def _files(service: Service, kind: str) -> list[dict[str, str]]:
    with service.db.read() as connection:
        rows = connection.execute(select(t.mlora).where(t.mlora.c.kind == kind).order_by(t.mlora.c.name)).mappings()
        return [{"name": row["name"], "file": row["value"]["file"]} for row in rows]


def _delete_file(service: Service, kind: str, name: str) -> Message:
    with service.db.read() as connection:
        value = _read(connection, kind, name)
    answer = _change(service, lambda connection: _delete(connection, kind, name, "file not exist", "delete success"))
    if value is not None:
        (_folder(service) / value["file"]).unlink(missing_ok=True)
    return answer


def _entries(service: Service, kind: str) -> list[dict[str, Any]]:
    with service.db.read() as connection:
        query = select(t.mlora.c.value).where(t.mlora.c.kind == kind).order_by(t.mlora.c.name)
        return list(connection.execute(query).scalars())


def _read(connection: Connection, kind: str, name: Any) -> dict[str, Any] | None:
    query = select(t.mlora.c.value).where(t.mlora.c.kind == kind, t.mlora.c.name == str(name))
    return connection.scalar(query)


def _add(connection: Connection, kind: str, name: str, value: dict[str, Any], message: str) -> None:
    if _read(connection, kind, name) is not None:
        raise Refused(message)
    connection.execute(t.mlora.insert().values(kind=kind, name=name, value=value))


def _delete(connection: Connection, kind: str, name: str, absent: str, done: str = "") -> Message:
    if _read(connection, kind, name) is None:
        raise Refused(absent)
    connection.execute(t.mlora.delete().where(t.mlora.c.kind == kind, t.mlora.c.name == name))
    return _say(done or f"delete the {kind}")


def _change(service: Service, act: Callable[[Connection], Message]) -> Message:
    """Acts in one transaction; what is refused changes nothing."""
    with service.db.write() as connection:
        return act(connection)


async def answer_refused(request: Request, problem: Exception) -> JSONResponse:
    """Answers what is refused, as mLoRA does."""
    del request
    return JSONResponse(_say(str(problem)))
