"""Who asks: keys, scopes, limits of requests, and repeated requests."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from inspect import iscoroutinefunction
from typing import Annotated, Any
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from fastapi import Depends, Header, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from sqlalchemy import func, select
from starlette.concurrency import run_in_threadpool

from lorafusion_jax.serve.api.problems import ApiError
from lorafusion_jax.serve.control.child import MOST_WAITING, Question, ServerEnds, TooManyWaiting
from lorafusion_jax.serve.control.controller import Controller
from lorafusion_jax.serve.settings import Settings
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.database import Database, StoreError
from lorafusion_jax.serve.store.jobs import Jobs
from lorafusion_jax.serve.store.keys import (
    LOCAL,
    LOG,
    Owner,
    find_owner,
    find_session,
    had_keys,
    is_valid,
    restore_revocations,
)

LOOK_S = 0.1
COOKIE = "lorafusion_session"
WITHOUT_KEY = ("/v1/login", "/v1/logout")
RATE, BURST = 100.0, 200.0  # requests a second of one key, and at once
CALLS, MORE_CALLS = "/api/v1/", 10  # of the training API, whose clients send a request for each call and its result
REMEMBERED_S, MOST_REMEMBERED = 1.0, 1000  # seconds and number of keys whose owners are remembered
CHANGES_S = 10.0  # after a line in the log of keys, until its transaction has surely ended
DAY = 86400.0
WAITS_S = 0.01, 0.1, 1.0, 10.0, math.inf
MOST_REPEATABLE = 10_000  # requests of an owner whose answers are kept
MOST_UPLOADS = 8  # of an owner at once
MOST_COMPLETIONS = 512  # of an owner at once: more would only wait for rows of the sampler
MOST_STREAMS, MOST_OF_ALL = 50, 1000  # streams of a key, and of all together
READING = "requests that read data"
THREADS, ALL_THREADS = 4, 16  # that work for an owner, and for all, of the server's 40


class Service:
    """What the routes share."""

    def __init__(self, settings: Settings, db: Database, controller: Controller):
        self.settings, self.db, self.controller, self.jobs = settings, db, controller, Jobs(db)
        self.access, self.limits, self.calls = Access(db, controller.used_keys), Limits(), Limits(MORE_CALLS)
        self.answers = Answers()
        self.streams: dict[str, int] = {}
        self.uploads, self.turns = Places("uploads", MOST_UPLOADS), Turns()
        self.completions = Places("completions", MOST_COMPLETIONS)
        self.forms = asyncio.Lock()
        self.news = News(db)
        self.datasets = threading.Lock()  # their rows and folders change together


class Answers:
    """How many answers there were by status, and how long their clients waited for the head.

    Attributes:
        within: of `WAITS_S` → answers that took at most so long, and longer than the one before.
    """

    def __init__(self) -> None:
        self.statuses, self.within, self.seconds = Counter[int](), Counter[float](), 0.0

    def note(self, status: int, seconds: float) -> None:
        self.statuses[status] += 1
        self.within[next(limit for limit in WAITS_S if seconds <= limit)] += 1
        self.seconds += seconds


class Limits:
    """Token buckets by key.

    Args:
        factor: of rate and burst.
    """

    def __init__(self, factor: float = 1.0) -> None:
        self._lock, self._factor = threading.Lock(), factor
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, key: str) -> bool:
        now = time.monotonic()
        with self._lock:
            allowance, at = self._left.get(key, (BURST * self._factor, now))
            allowance = min(BURST * self._factor, allowance + (now - at) * RATE * self._factor)
            self._left[key] = (allowance - 1 if allowance >= 1 else allowance, now)
            return allowance >= 1


class Places:
    """How much each owner has of a kind of work under way."""

    def __init__(self, kind: str, most: int):
        self._kind, self._most, self._counts = kind, most, Counter[str]()

    @contextmanager
    def of(self, owner: str) -> Iterator[None]:
        """Takes a place of an owner.

        Raises:
            ApiError: 429, `api.turns`.
        """
        if self._counts[owner] >= self._most:
            raise too_many(owner, self._most, self._kind)
        self._counts[owner] += 1
        try:
            yield
        finally:
            self._counts[owner] -= 1
            if not self._counts[owner]:
                del self._counts[owner]


class Turns:
    """Who may have a thread. An owner who asks for much waits for himself, and who waits holds no thread."""

    def __init__(self) -> None:
        self._of_all = asyncio.Semaphore(ALL_THREADS)
        self._of_owners: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # while somebody waits

    @asynccontextmanager
    async def of(self, owner: str) -> AsyncIterator[None]:
        of_owner = self._of_owners.setdefault(owner, asyncio.Semaphore(THREADS))
        async with of_owner, self._of_all:
            yield

    async def run[T](self, owner: str, work: Callable[..., T], *arguments: Any) -> T:
        """Returns what a function returns, in a thread."""
        async with self.of(owner):
            return await run_in_threadpool(work, *arguments)


class InTurn(APIRoute):
    """A route whose function, if it runs in a thread, has to wait for its owner's turn."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if iscoroutinefunction(self.endpoint):
            return handle

        async def wait(request: Request) -> Response:
            service: Service = request.app.state.service
            owner = "" if self.path in WITHOUT_KEY else identify(request, service).name
            async with service.turns.of(owner):
                return await handle(request)

        return wait


def too_many(owner: str, most_turns: int, kind: str) -> ApiError:
    headers = {"Retry-After": "5"}
    return ApiError(
        429, "api.turns", f"{owner} has {most_turns} {kind} under way.", fix="wait for them", headers=headers
    )


def service_ends() -> ApiError:
    return ApiError(
        503, "api.ends", "the service ends.", fix="ask again once it is started again", headers={"Retry-After": "5"}
    )


def expect_turn(service: Service, owner: Owner, question: Question) -> None:
    """Refuses at once what a child process would not take: a flood ends here, before any thread works for it.

    Raises:
        ApiError: 429, `api.turns`.
    """
    if service.controller.child.is_full(owner.name, question):
        raise too_many(owner.name, MOST_WAITING, READING)


async def ask_child(service: Service, owner: Owner, question: Question, request: dict[str, Any]) -> dict[str, Any]:
    """Waits for the answer of a child process in the owner's turn, without a thread.

    Raises:
        ApiError: 429, `api.turns`; 503, `api.ends`.
    """
    try:
        return await asyncio.wrap_future(service.controller.child.submit(owner.name, question, request))
    except TooManyWaiting:
        raise too_many(owner.name, MOST_WAITING, READING) from None
    except ServerEnds:
        raise service_ends() from None
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        raise service_ends() from None


class Access:
    """Finds who asks. It runs on the event loop of the server: nobody waits for a thread to have a key checked.

    A service is open to everybody on its machine if it never had a key. That is decided when it starts; the first key
    closes it, and nothing opens it again.

    The owner of a key is remembered for a second. A key that is added or revoked, by whatever process, is in the log of
    keys before it counts: for a while after that nothing is remembered.

    Args:
        used: takes when each key was last used (None: nobody asks).
    """

    def __init__(self, db: Database, used: dict[str, float] | None = None):
        self._db, self._used = db, {} if used is None else used
        self._remembered: dict[str, Owner | None] = {}  # by digest of the key
        self._since, self._log_state = 0.0, (0, 0)
        with db.write() as connection:
            self._is_open = not restore_revocations(connection)

    def find(self, key: str, session: str) -> Owner | None:
        """Returns the owner of a key or, without one, of a session of the page."""
        if not key and not session and not self._is_open:
            return None
        remembered = self._recall() if key else {}
        digest = hashlib.sha256(key.encode()).hexdigest()
        if digest in remembered:
            owner = remembered[digest]
        else:
            with self._db.glance() as connection:
                self._is_open = self._is_open and not had_keys(connection)
                owner = find_owner(connection, key) if key else find_session(connection, session) if session else None
            remembered[digest] = owner
        if owner is not None:
            self._used[owner.key] = time.time()
        return owner or (LOCAL if self._is_open and not key else None)

    def _recall(self) -> dict[str, Owner | None]:
        """The owners of keys that may be remembered."""
        now = time.time()
        try:
            status = self._db.file.with_name(LOG).stat()
        except OSError:
            return {}
        if not 0 <= now - self._since < REMEMBERED_S or self._log_state != (status.st_size, status.st_mtime_ns):
            self._remembered, self._since, self._log_state = {}, now, (status.st_size, status.st_mtime_ns)
        may_change = now - status.st_mtime < CHANGES_S or len(self._remembered) >= MOST_REMEMBERED
        return {} if may_change else self._remembered

    def is_valid(self, owner: Owner) -> bool:
        """Returns whether somebody who asked before may still ask."""
        with self._db.glance() as connection:
            self._is_open = self._is_open and not had_keys(connection)
            return is_valid(connection, owner) if owner.key else self._is_open


async def service_of(request: Request) -> Service:
    return request.app.state.service


ServiceOf = Annotated[Service, Depends(service_of)]


async def owner_of(request: Request, service: ServiceOf) -> Owner:
    """Returns the owner of a request, see `identify`."""
    return identify(request, service)


def identify(request: Request, service: Service) -> Owner:
    """Finds the owner of a request, once. Only its head is looked at.

    Raises:
        ApiError: 401, no valid key; 403, a write by cookie from another page; 429.
    """
    if (request_owner := getattr(request.state, "owner", None)) is not None:
        return request_owner
    key = sent_key(request)
    owner = service.access.find(key, request.cookies.get(cookie_name(request), ""))
    if owner is None:
        fix = "send a key: Authorization: Bearer tml-lf_…; lorafusion keys add makes one"
        message = "the key is not valid." if key else "this service wants a key."
        raise ApiError(401, "api.key", message, fix=fix, headers={"WWW-Authenticate": "Bearer"})
    if request.method not in ("GET", "HEAD"):
        check_origin(request, by_cookie=bool(owner.session))
    calls = request.url.path.startswith(CALLS)
    if not (service.calls if calls else service.limits).take(owner.key or owner.name):
        message = f"more than {RATE * (MORE_CALLS if calls else 1):g} requests a second."
        raise ApiError(429, "api.rate", message, fix="wait a second", headers={"Retry-After": "1"})
    request.state.owner = owner
    return owner


def sent_key(request: Request) -> str:
    bearer = request.headers.get("authorization", "")
    if bearer.lower().startswith("bearer "):
        return bearer[7:].strip()
    return request.headers.get("x-api-key", "")


def cookie_name(request: Request) -> str:
    """A browser sends the one of an encrypted connection to this host and port alone."""
    return f"__Host-{COOKIE}" if request.url.scheme == "https" else COOKIE


def check_origin(request: Request, *, by_cookie: bool) -> None:
    """Refuses writes that a page of another site makes a browser send.

    Raises:
        ApiError: 403, `api.csrf`.
    """
    origin = request.headers.get("origin")
    foreign = origin is not None and urlsplit(origin).netloc != request.headers.get("host")
    if foreign or (by_cookie and "x-requested-with" not in request.headers):
        message = "a write with a cookie needs the header X-Requested-With, from this page."
        raise ApiError(403, "api.csrf", message, fix="send a key instead of the cookie: Authorization: Bearer tml-lf_…")


def needs(scope: str) -> Callable[..., Coroutine[Any, Any, Owner]]:
    """Returns the dependency that finds an owner with a scope.

    Raises:
        ApiError: 403, `api.scope`.
    """

    async def allowed(owner: Annotated[Owner, Depends(owner_of)]) -> Owner:
        if scope not in owner.scopes and "admin" not in owner.scopes:
            fix = f"a key with it: lorafusion keys add {owner.name} --scope {scope}"
            raise ApiError(403, "api.scope", f"the key lacks the scope {scope}.", fix=fix)
        return owner

    return allowed


JobsRead = Annotated[Owner, Depends(needs("jobs:read"))]
JobsWrite = Annotated[Owner, Depends(needs("jobs:write"))]
DataRead = Annotated[Owner, Depends(needs("data:read"))]
DataWrite = Annotated[Owner, Depends(needs("data:write"))]
AdaptersRead = Annotated[Owner, Depends(needs("adapters:read"))]
AdaptersWrite = Annotated[Owner, Depends(needs("adapters:write"))]
ClusterRead = Annotated[Owner, Depends(needs("cluster:read"))]
Admin = Annotated[Owner, Depends(needs("admin"))]
Anybody = Annotated[Owner, Depends(owner_of)]
IdempotencyKey = Annotated[
    str | None,
    Header(max_length=200, description="a repeated request acts once, for 24 h and 10 000 requests of its owner"),
]


def once(
    service: Service, owner: Owner, key: str | None, route: str, body: Any, act: Callable[[Any], tuple[int, Any]]
) -> Response:
    """Acts in one transaction; a repeated request with the same key gets the first answer.

    Args:
        act: (connection) → (status, answer); 204 has no answer.

    Raises:
        ApiError: 409, `api.idempotency`: the key was used for another request.
    """
    sha = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    with service.db.write() as connection:
        if key is not None:
            connection.execute(t.idempotency.delete().where(t.idempotency.c.at < time.time() - DAY))
            where = (t.idempotency.c.owner == owner.name, t.idempotency.c.key == key)
            row = connection.execute(select(t.idempotency).where(*where)).mappings().one_or_none()
            if row is not None:
                if (row["route"], row["body_sha"]) != (route, sha):
                    message = "this Idempotency-Key was used for another request."
                    raise ApiError(409, "api.idempotency", message, fix="a new key for each request")
                return _response(row["status"], row["response"])
        status, answer = act(connection)
        if key is not None:
            of_owner = t.idempotency.c.owner == owner.name
            newest = select(t.idempotency.c.at).where(of_owner).order_by(t.idempotency.c.at.desc())
            older = newest.offset(MOST_REPEATABLE - 1).limit(1).scalar_subquery()
            connection.execute(t.idempotency.delete().where(of_owner, t.idempotency.c.at <= older))
            row = {"owner": owner.name, "key": key, "route": route, "body_sha": sha, "status": status}
            connection.execute(t.idempotency.insert().values(row | {"response": answer, "at": time.time()}))
    return _response(status, answer)


def _response(status: int, answer: Any) -> Response:
    return Response(status_code=204) if status == 204 else JSONResponse(answer, status)


class News:
    """Looks for new events while somebody waits for them: once for all streams.

    Attributes:
        at: number of the newest event that it has seen.
    """

    def __init__(self, db: Database):
        self._db, self.at = db, db.last_event
        self._floor, self._newest = self.at, dict[str | None, int]()  # by job and by owner; unknown: up to the floor
        self._waiting = 0
        self._changed = asyncio.Condition()
        self._looking: asyncio.Task[None] | None = None

    def newest(self, scope: str | None) -> int:
        """Number of the newest event of a job or an owner (None: of all), as far as it was looked for."""
        return self.at if scope is None else self._newest.get(scope, self._floor)

    async def changed(self, last_seen: int, seconds: float) -> bool:
        """Waits for an event after `last_seen`. Returns whether there is one."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        self._waiting += 1
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: self.at > last_seen)
            return True
        except TimeoutError:
            return False
        finally:
            self._waiting -= 1

    async def _look(self) -> None:
        while self._waiting:
            if self._db.last_event > self.at:
                with suppress(StoreError):  # busy: the next look may be lucky
                    await self._tell(*await run_in_threadpool(self._read))
            await asyncio.sleep(LOOK_S)
        self._floor, self._newest = self.at, {}  # who comes next reads for itself

    async def _tell(self, newest: int, rows: list[tuple[str, str | None, int]]) -> None:
        for owner, job, number in rows:
            self._newest |= {owner: number, job: number}
        async with self._changed:
            self.at = newest
            self._changed.notify_all()

    def _read(self) -> tuple[int, list[tuple[str, str | None, int]]]:
        """Returns the number of the newest event, and that of each owner and job since the last time."""
        number = func.max(t.events.c.seq)
        query = select(t.events.c.owner, t.events.c.job, number).where(t.events.c.seq > self.at)
        with self._db.read() as connection:
            rows = connection.execute(query.group_by(t.events.c.owner, t.events.c.job).order_by(number)).all()
        return max((row[2] for row in rows), default=self.at), [(row[0], row[1], row[2]) for row in rows]
