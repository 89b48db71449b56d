"""The application: routes, limits of every request, and the page."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorafusion_jax.serve.api import admin, datasets, jobs, mlora, openai, problems, streams
from lorafusion_jax.serve.api.access import CALLS, WITHOUT_KEY, Answers, Service, identify, service_ends
from lorafusion_jax.serve.api.problems import ApiError
from lorafusion_jax.serve.refusals import completed
from lorafusion_jax.serve.store.database import StoreError
from scheduling import plots

LARGEST_BODY, LARGEST_LOGIN = 1 << 20, 4 << 10  # but for data sets
BODIES, BODIES_OF_OWNER = 48 << 20, 16 << 20  # bytes of bodies in memory
SHOWN_KEY = 60  # characters
MOST_VALUES = 10_000  # of a body, counted by its commas and brackets: a job has fewer than 1 000
MOST_TOKENS = 400_000  # the same of a prompt
BODY_S = 30  # for it to arrive
DEEPEST, BRACKETS = 32, re.compile(rb"[\[\]{}]")
TEXTS = re.compile(rb'"(?:[^"\\]|\\.)*(?:"|$)', re.DOTALL)  # in them, commas and brackets count for nothing
PAGE = Path(__file__).parents[1] / "page"
PLOTS = Path(plots.__file__).parent
FILES = {
    "/": PAGE / "index.html",
    "/app.js": PAGE / "app.js",
    "/style.css": PAGE / "style.css",
    "/charts.js": PLOTS / "charts.js",
    "/theme.css": PLOTS / "theme.css",
}
PROMPTS = (*openai.PATHS, f"{CALLS}asample")  # their bodies may be tokens
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
ROUTERS = (jobs.router, datasets.router, streams.router, admin.router, openai.router)
SECURE = (
    (b"content-security-policy", b"default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)


def make_app(
    service: Service | None = None, *, names: Sequence[str] = LOCAL_NAMES, uploads: Collection[str] = ()
) -> FastAPI:
    """Builds the application.

    Args:
        service: what the routes share (None: only the description of the API is wanted).
        names: values of the header Host that are answered; others may be a page that rebinds a name to this machine.
        uploads: further paths whose routes limit their bodies themselves.
    """
    app = FastAPI(
        title="lorafusion-jax",
        version="1",
        description="Jobs in, adapters out: fine-tunes LoRA adapters of one base model together.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    for router in ROUTERS:
        app.include_router(router, responses=problems.ANSWERS)
    app.include_router(admin.open_router, responses={status: problems.ANSWERS[status] for status in (403, 503)})
    uploads = {"/v1/datasets", *uploads}
    if service is not None and service.settings.mlora_compat:
        app.include_router(mlora.router)
        app.add_exception_handler(mlora.Refused, mlora.answer_refused)
        uploads |= set(mlora.UPLOADS)
    routers = (*ROUTERS, admin.open_router, mlora.router)
    problems.install(app, [route for router in routers for route in router.routes])
    for path, file in FILES.items():
        app.add_api_route(path, _sender(file), include_in_schema=False)
    app.add_middleware(Guard, service=service, names=names, uploads=uploads)
    return app


def _sender(file: Path) -> Callable[[], Awaitable[FileResponse]]:
    async def send() -> FileResponse:
        return FileResponse(file, headers={"Cache-Control": "no-cache"})

    return send


class Bodies:
    """Bytes of all bodies that are in memory. Every owner has a share of them."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()

    def have_room(self, owner: str, count: int) -> bool:
        return self._bytes[owner] + count <= BODIES_OF_OWNER and self._bytes.total() + count <= BODIES

    def take(self, owner: str, count: int) -> bool:
        has_room = self.have_room(owner, count)
        self._bytes[owner] += count if has_room else 0
        return has_room

    def give_back(self, owner: str, count: int) -> None:
        self._bytes[owner] -= count
        if not self._bytes[owner]:
            del self._bytes[owner]


class Guard:
    """Refuses foreign hosts, unknown keys, large and deep bodies before a route sees them; adds security headers.

    No byte of a body is read before its key is known, but for that of the page's login. A request beyond the rate of
    its key is refused before a route is looked for, which takes ten times longer.

    Args:
        uploads: paths whose routes limit their bodies themselves.
    """

    def __init__(self, app: ASGIApp, service: Service | None, names: Sequence[str], uploads: Collection[str]):
        self._app, self._service, self._names, self._uploads = app, service, tuple(names), frozenset(uploads)
        self._bodies = Bodies()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send, None if self._service is None else self._service.answers)
        try:
            await self._look(scope, receive, answer)
        except asyncio.CancelledError:  # the server ends; what is half sent breaks off, but for a stream of events
            if answer.media_type is None:
                await problems.answer_problem(Request(scope), service_ends())(scope, receive, answer)
            elif answer.media_type.startswith(b"text/event-stream"):
                last = openai.cut_line() if scope["path"] in openai.PATHS else b""
                await answer({"type": "http.response.body", "body": last, "more_body": False})

    async def _look(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        if "*" not in self._names and _without_port(host) not in self._names:
            message, fix = "this host name is not answered.", "lorafusion serve --host-name NAME, or use localhost"
            await _refuse(421, "api.host", "Host", message, fix)(scope, receive, send)
            return
        may_have_body = scope["method"] in ("POST", "PUT", "PATCH", "DELETE")
        owner, largest = "", LARGEST_LOGIN
        if scope["path"] not in WITHOUT_KEY and (may_have_body or _is_read(scope)):
            assert self._service is not None
            request = Request(scope)
            try:
                asker = identify(request, self._service)
            except (ApiError, StoreError) as problem:
                await problems.answer_problem(request, problem)(scope, receive, send)
                return
            owner, largest = asker.key or asker.name, LARGEST_BODY
        if not may_have_body or scope["path"].rstrip("/") in self._uploads:
            await self._app(scope, receive, send)
            return
        length, sizes = headers.get(b"content-length", b""), list[int]()
        expected = int(length) if length.isdigit() else 0

        def take(count: int) -> bool:
            if not sizes and not self._bodies.have_room(owner, expected):  # read nothing of what will be refused
                return False
            has_room = self._bodies.take(owner, count)
            sizes.extend([count] if has_room else [])
            return has_room

        try:
            values = MOST_TOKENS if scope["path"] in PROMPTS else MOST_VALUES
            body = await _checked_body(receive, expected, largest, values, take)
            if isinstance(body, JSONResponse):
                await body(scope, receive, send)
            else:
                await self._app(scope, _replay(body, receive), send)
        except ClientDisconnect:  # before all of its body had come
            return
        finally:
            self._bodies.give_back(owner, sum(sizes))


def _is_read(scope: Scope) -> bool:
    """Whether a request reads what needs a key."""
    return scope["method"] in ("GET", "HEAD") and scope["path"].startswith("/v1/")


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host


def _refuse(
    status: int, code: str, where: str, message: str, fix: str, headers: dict[str, str] | None = None
) -> JSONResponse:
    error = completed({"code": code, "what": message, "where": where, "fix": fix})
    return JSONResponse({"error": error}, status, headers)


async def _checked_body(
    receive: Receive, length: int, largest: int, values: int, take: Callable[[int], bool]
) -> bytes | JSONResponse:
    """Returns the body, or how it is refused."""
    try:
        async with asyncio.timeout(BODY_S):
            body = await _read(receive, length, largest, take)
    except TimeoutError:
        return _refuse(408, "api.slow", "body", f"a body takes at most {BODY_S} s.", "send it faster")
    except BlockingIOError:
        message = f"the bodies of one owner have at most {BODIES_OF_OWNER} bytes together, and all {BODIES}."
        return _refuse(429, "api.bodies", "body", message, "send fewer at once", {"Retry-After": "1"})
    if body is None:
        return _refuse(413, "api.too-large", "body", f"it has at most {largest} bytes.", "data goes to /v1/datasets")
    without_texts = TEXTS.sub(b"", body)
    if sum(map(without_texts.count, (b"[", b"{", b","))) > values:
        return _refuse(422, "api.values", "body", f"a body has at most {values} values.", "fewer values")
    if _depth(without_texts) > DEEPEST:
        return _refuse(422, "api.depth", "body", f"a body is nested at most {DEEPEST} deep.", "flatter values")
    if (key := _key_given_twice(body)) is not None:
        return _refuse(422, "api.twice", "body", f"the key {key[:SHOWN_KEY]!r} is given twice.", "keep one of them")
    return body


def _key_given_twice(body: bytes) -> str | None:
    """A key that an object of a body has twice, of which a reader would take the last; None in what is no JSON."""
    repeated: list[str] = []

    def note(pairs: list[tuple[str, Any]]) -> None:
        if len(dict(pairs)) < len(pairs):
            (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
            repeated.append(key)

    with suppress(ValueError, RecursionError):
        json.loads(body, object_pairs_hook=note)
    return next(iter(repeated), None)


async def _read(receive: Receive, length: int, largest: int, take: Callable[[int], bool]) -> bytes | None:
    """Returns the body; None if it is too large.

    Raises:
        BlockingIOError: there is no memory for it now.
        ClientDisconnect: the rest of it will not come.
    """
    if length > largest:
        return None
    if not take(0):
        raise BlockingIOError
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientDisconnect
        part = message.get("body", b"")
        if len(body) + len(part) > largest:
            return None
        if not take(len(part)):
            raise BlockingIOError
        body += part
        if not message.get("more_body"):
            return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    is_replayed = False

    async def replayed() -> Message:
        nonlocal is_replayed
        if is_replayed:
            return await receive()
        is_replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


def _depth(body: bytes) -> int:
    """Returns how deep brackets are nested, if that can be too deep."""
    if body.count(b"[") + body.count(b"{") <= DEEPEST:
        return 0
    deepest = depth = 0
    for bracket in BRACKETS.finditer(body):
        depth += 1 if bracket[0] in (b"[", b"{") else -1
        deepest = max(deepest, depth)
        if deepest > DEEPEST:
            break
    return deepest


class _Answer:
    """Sends an answer with security headers, and notes how long its client waited for the head.

    Attributes:
        media_type: of the answer; None: nothing is sent yet.
    """

    def __init__(self, send: Send, answers: Answers | None):
        self._send, self._answers, self._began = send, answers, time.monotonic()
        self.media_type: bytes | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if self._answers is not None:
                self._answers.note(message["status"], time.monotonic() - self._began)
            self.media_type = dict(message["headers"]).get(b"content-type", b"")
            message = {**message, "headers": [*message["headers"], *SECURE]}
        await self._send(message)


def describe() -> dict[str, Any]:
    """Returns the OpenAPI description."""
    return json.loads(json.dumps(make_app().openapi()))
