"""Routes of OpenAI's API: completions of the bases and of every adapter that a key may read, whole and in chunks."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from pydantic import Field
from sqlalchemy import Connection, select
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.generation.answer_text import UNFINISHED
from lorafusion_jax.serve.api.access import AdaptersRead, Service, ServiceOf, service_ends
from lorafusion_jax.serve.api.completion_bodies import Body, ChatBody, CompletionBody
from lorafusion_jax.serve.api.problems import ApiError, answer_problem
from lorafusion_jax.serve.control.completions import LOOK_S, Completion
from lorafusion_jax.serve.refusals import Problem, completed
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.keys import Owner

MOST_MODELS = 1000  # of a list, the newest adapters
CHECKPOINTS = "tinker://"  # before the name of what a model of the training API has saved
PATHS = ("/v1/completions", "/v1/chat/completions")  # whose bodies are long texts
Row = dict[str, Any]


class OpenAIRoute(APIRoute):
    """A route whose errors also have the keys that clients of OpenAI's API look for."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handle(request)
            except (ApiError, LoraFusionError, RequestValidationError) as problem:
                answer = answer_problem(request, problem)
                body = json.loads(bytes(answer.body))
                body["error"] |= _for_clients(body["error"])
                headers = {key: value for key, value in answer.headers.items() if not key.startswith("content-")}
                return JSONResponse(body, answer.status_code, headers)

        return handled


class Stream(StreamingResponse):
    """Server-sent events that hold resources, also where the client is gone before the first one."""

    def __init__(self, lines: AsyncIterator[str], resources: ExitStack):
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(lines, media_type="text/event-stream", headers=headers)
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._resources:
            await super().__call__(scope, receive, send)


router = APIRouter(prefix="/v1", tags=["completions"], route_class=OpenAIRoute)


@router.get("/models")
def models(service: ServiceOf, owner: AdaptersRead) -> dict[str, Any]:
    """The bases, and the newest 1000 adapters: by the name of their job, older ones of the same name by their own."""
    bases = [_shown(name, 0, "lorafusion", name) for name in service.settings.bases]
    with service.db.read() as connection:
        rows = _adapters(connection, owner, limit=MOST_MODELS)
    names: set[str] = set(service.settings.bases)
    adapters = []
    for row in rows:
        name = row["id"] if row["name"] in names else row["name"]
        names.add(row["name"])
        adapters.append(_of_adapter(name, row))
    return {"object": "list", "data": bases + adapters}


@router.get("/models/{model:path}")
def model(model: Annotated[str, Field(max_length=1000)], service: ServiceOf, owner: AdaptersRead) -> dict[str, Any]:
    """A base; or an adapter by its name, the name or id of its job, or the path of a checkpoint for samplers."""
    if model in service.settings.bases:
        return _shown(model, 0, "lorafusion", model)
    return _of_adapter(model, _find(service, model, owner))


@router.post("/completions", response_model=None)
async def complete(body: CompletionBody, request: Request, service: ServiceOf, owner: AdaptersRead) -> Response:
    """Goes on with texts or tokens. With `stream`, server-sent events that end with `[DONE]`."""
    return await _answer(body, body.values(), TEXT, request, service, owner)


@router.post("/chat/completions", response_model=None)
async def chat(body: ChatBody, request: Request, service: ServiceOf, owner: AdaptersRead) -> Response:
    """Writes the next message, with the chat template of the adapter. With `stream` as `/v1/completions`."""
    return await _answer(body, body.values(), CHAT, request, service, owner)


async def _answer(
    body: Body, values: dict[str, Any], shape: Shape, request: Request, service: Service, owner: Owner
) -> Response:
    base, folder = await run_in_threadpool(_target, service, body.model, owner)
    values |= {"n": body.n or 1, "stream": bool(body.stream)}
    with ExitStack() as resources:
        resources.enter_context(service.completions.of(owner.name))
        completion = await _start(service, base, folder, values)
        resources.callback(service.controller.completions.end, completion)
        body_writer, events = Written(shape, body.model, completion.id), _events(completion, request, service, owner)
        first = await anext(events)
        if "error" in first:
            raise _failed(first["error"])
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            return Stream(_lines(body_writer, first, events, usage=usage), resources.pop_all())
        body_writer.take(first)
        async for event in events:
            if "error" in event:
                raise _failed(event["error"])
            body_writer.take(event)
        return JSONResponse(body_writer.whole())


async def _start(service: Service, base: str, folder: str | None, values: dict[str, Any]) -> Completion:
    controller = service.controller
    for group in controller.groups:
        if controller.base_of(group) == base and controller.is_connected(group):
            completion = await controller.completions.start(group, folder, values)
            if completion is not None:
                return completion
    why = controller.not_ready or "no session of this base runs now"
    raise ApiError(
        503, "api.no-worker", f"nothing samples from {base} now.", why=why, fix="ask again later",
        headers={"Retry-After": "5"},
    )  # fmt: skip


async def _events(completion: Completion, request: Request, service: Service, owner: Owner) -> AsyncIterator[Row]:
    """What the worker tells, until it has told all. Ends early where the client is gone or its key is revoked."""
    looked = time.monotonic()
    while not completion.is_done:
        try:
            event = await service.controller.completions.next(completion)
        except ConnectionError:
            event = {"error": {"code": "api.no-worker", "what": "the worker was lost."}}
            completion.is_done = True
        if event is not None:
            yield event
            if completion.is_done or time.monotonic() - looked < LOOK_S:  # else also while one follows the other
                continue
        looked = time.monotonic()
        if not service.access.is_valid(owner):
            yield {"error": {"code": "api.key", "what": "the key is not valid any more."}}
            return
        if await request.is_disconnected():
            yield {"error": {"code": "api.slow", "what": "the client is gone."}}
            return


async def _lines(written: Written, first: Row, events: AsyncIterator[Row], *, usage: bool) -> AsyncIterator[str]:
    event: Row | None = first
    while event is not None:
        if "error" in event:
            yield _error_line(_failed(event["error"]))
            return
        for chunk in written.chunks(event, usage=usage):
            yield _line(chunk)
        event = await anext(events, None)
    yield "data: [DONE]\n\n"


def cut_line() -> bytes:
    """The last line of a stream that the end of the service cuts: without it the answer would look whole."""
    return _error_line(service_ends()).encode()


def _error_line(failure: ApiError) -> str:
    problem = completed(failure.error, "the stream")
    return _line({"error": problem | _for_clients(problem)})


def _line(value: Row) -> str:
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n"


def _failed(problem: Problem) -> ApiError:
    """The error of a completion that its worker could not write."""
    status = {"api.internal": 500, "api.no-worker": 503, "api.key": 401, "api.slow": 408}.get(problem["code"], 422)
    fix = problem.get("fix") or ("" if status == 422 else "ask again later")  # a wrong value stays wrong
    headers = {"Retry-After": "5"} if status == 503 else None
    more = {key: problem[key] for key in ("where", "why") if problem.get(key)}
    return ApiError(status, problem["code"], problem["what"], fix=fix, headers=headers, **more)


def _for_clients(problem: Problem) -> dict[str, Any]:
    kind = (
        "server_error" if problem["code"] in ("api.internal", "api.no-worker", "api.ends") else "invalid_request_error"
    )
    message = f"{problem['what']} {problem['why']}; {problem['fix']}"
    return {"message": message, "type": kind, "param": problem["where"] or None}


def _target(service: Service, name: str, owner: Owner) -> tuple[str, str | None]:
    """Returns the base and the folder of a model."""
    if name in service.settings.bases:
        return name, None
    row = _find(service, name, owner)
    return row["base"], str(service.settings.path(row["folder"]))


def _find(service: Service, name: str, owner: Owner) -> Row:
    """Returns an adapter: by its id, or that of its job, or the newest of this name; or a checkpoint for samplers.

    Raises:
        ApiError: 404.
    """
    with service.db.read() as connection:
        if name.startswith(CHECKPOINTS):
            rows = _checkpoints(connection, name, owner)
        else:
            by_id = (t.artifacts.c.id == name) | (t.artifacts.c.job == name)
            rows = _adapters(connection, owner, by_id, limit=1) or _adapters(
                connection, owner, t.jobs.c.name == name, limit=1
            )
    if not rows:
        fix = "a name of GET /v1/models"
        raise ApiError(404, "api.not-found", f"there is no model {name[:200]}.", fix=fix, where="model")
    return rows[0]


def _adapters(connection: Connection, owner: Owner, *where: Any, limit: int) -> list[Row]:
    """Adapters that an owner sees, the newest first."""
    a = t.artifacts.c
    query = select(a.id, a.job, a.owner, a.created, a.path.label("folder"), t.jobs.c.name, t.jobs.c.base)
    query = query.join(t.jobs, t.jobs.c.id == a.job).where(*where).order_by(a.created.desc(), a.id).limit(limit)
    query = query.where(*t.seen_by(t.artifacts, owner.sees))
    return [dict(row) for row in connection.execute(query).mappings()]


def _checkpoints(connection: Connection, path: str, owner: Owner) -> list[Row]:
    c = t.api_checkpoints.c
    query = select(c.path.label("id"), c.model.label("job"), c.owner, c.created, c.folder, c.name, c.base)
    query = query.where(c.path == path, c.kind == "sampler_weights", (c.expires.is_(None)) | (c.expires > time.time()))
    query = query.where(*t.seen_by(t.api_checkpoints, owner.sees))
    return [dict(row) for row in connection.execute(query).mappings()]


def _of_adapter(name: str, row: Row) -> Row:
    return _shown(name, int(row["created"]), row["owner"], row["base"]) | {"adapter": row["id"], "job": row["job"]}


def _shown(name: str, created: int, owner: str, base: str) -> Row:
    return {"id": name, "object": "model", "created": created, "owned_by": owner, "root": base}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What differs between texts and chats.

    Attributes:
        object, chunk: kinds of the whole and of its chunks.
    """

    prefix: str
    object: str
    chunk: str


TEXT = Shape(prefix="cmpl-", object="text_completion", chunk="text_completion")
CHAT = Shape(prefix="chatcmpl-", object="chat.completion", chunk="chat.completion.chunk")


class Written:
    """What a worker has written of a completion."""

    def __init__(self, shape: Shape, model: str, name: str):
        self._shape = shape
        self._head = {"id": f"{shape.prefix}{name}", "created": int(time.time()), "model": model}
        self._texts: dict[int, list[str]] = {}
        self._logprobs: dict[int, list[Any]] = {}
        self._ends: dict[int, str] = {}
        self._drawn: dict[int, int] = {}
        self._prompt_tokens = 0

    def take(self, event: Row) -> None:
        """Takes an event of a worker, which has parts of answers."""
        self._prompt_tokens = event["prompt_tokens"]
        for part in event["parts"]:
            index = part["index"]
            self._texts.setdefault(index, []).append(part["text"])
            if "logprobs" in part:
                self._logprobs.setdefault(index, []).extend(part["logprobs"])
            if part["end"]:
                self._ends[index], self._drawn[index] = part["end"], part["tokens"]

    def whole(self) -> Row:
        """The answer to a request without `stream`."""
        choices = []
        for index in sorted(self._texts):
            text, logprobs = "".join(self._texts[index]), self._listed(self._logprobs.get(index), 0)
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
            choice = {"index": index} | (content if self._shape is CHAT else {"text": text})
            choices.append(choice | {"logprobs": logprobs, "finish_reason": self._ends[index]})
        return self._head | {"object": self._shape.object, "choices": choices, "usage": self._usage()}

    def chunks(self, event: Row, *, usage: bool) -> Iterator[Row]:
        """The chunks of an event.

        Args:
            usage: whether a last chunk counts tokens.
        """
        head = self._head | {"object": self._shape.chunk} | ({"usage": None} if usage else {})
        for part in event["parts"]:
            index = part["index"]
            is_first, before = index not in self._texts, sum(map(len, self._texts.get(index, ())))
            logprobs = self._listed(part.get("logprobs"), before)
            self.take(event | {"parts": [part]})
            if self._shape is TEXT:
                if part["text"] or part["end"] or logprobs:
                    choice = {"index": index, "text": part["text"], "logprobs": logprobs}
                    yield head | {"choices": [choice | {"finish_reason": part["end"]}]}
                continue
            role = {"role": "assistant"} if is_first else {}
            if part["text"] or is_first or logprobs:
                choice = {"index": index, "delta": role | {"content": part["text"]}, "logprobs": logprobs}
                yield head | {"choices": [choice | {"finish_reason": None}]}
            if part["end"]:
                yield head | {
                    "choices": [{"index": index, "delta": {}, "logprobs": None, "finish_reason": part["end"]}]
                }
        if usage and event["ended"]:
            yield head | {"choices": [], "usage": self._usage()}

    def _usage(self) -> Row:
        completion_tokens = sum(self._drawn.values())
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._prompt_tokens + completion_tokens,
        }

    def _listed(self, entries: list[Any] | None, offset: int) -> Row | None:
        """log p of tokens, which begin at a character of the answer."""
        if entries is None:
            return None
        if self._shape is CHAT:
            return {
                "content": [
                    _token(piece, logprob) | {"top_logprobs": [_token(*alternative) for alternative in alternatives]}
                    for piece, logprob, alternatives in entries
                ],
                "refusal": None,
            }
        offsets = []
        for piece, _, _ in entries:
            offsets.append(offset)
            offset += len(piece)
        return {
            "tokens": [piece for piece, _, _ in entries],
            "token_logprobs": [logprob for _, logprob, _ in entries],
            "top_logprobs": [dict(alternatives) for _, _, alternatives in entries],
            "text_offset": offsets,
        }


def _token(piece: str, logprob: float) -> Row:
    is_part = UNFINISHED in piece  # of a character: a piece does not say which bytes it has
    return {"token": piece, "logprob": logprob, "bytes": None if is_part else list(piece.encode())}
