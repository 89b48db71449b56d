"""Futures: rows that outlive the server, and who waits for them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from sqlalchemy import Connection, select

from lorafusion_jax.serve.store import tables as t

READ_S, UNREAD_S = 3600.0, 86_400.0  # how long a result stays after it was read first, and unread
AT_ONCE = 500  # that are removed in one transaction
USER, SERVER = "user", "server"  # whose mistake a failure is
Row = dict[str, Any]


class Waiters:
    """Who waits for futures. They are woken by whoever completes one; nobody looks at the table again and again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: dict[str, set[asyncio.Event]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    async def wait(self, event: asyncio.Event, seconds: float) -> None:
        """Waits for an event that was registered before its future was read."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()

    def register(self, future: str) -> asyncio.Event:
        """Called on the event loop of the server; `forget` follows."""
        event = asyncio.Event()
        with self._lock:
            self._loop = asyncio.get_running_loop()
            self._events.setdefault(future, set()).add(event)
        return event

    def forget(self, future: str, event: asyncio.Event) -> None:
        with self._lock:
            events = self._events.get(future, set())
            events.discard(event)
            if not events:
                self._events.pop(future, None)

    def wake(self, futures: Iterable[str]) -> None:
        """Wakes from any thread who waits for these futures."""
        with self._lock:
            events = [event for future in futures for event in self._events.get(future, ())]
            loop = self._loop
        if events and loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(lambda: [event.set() for event in events])


def add_future(connection: Connection, future: str, owner: str, stream: str, seq: int, kind: str) -> Row:
    """Adds a future that waits."""
    row = {"id": future, "owner": owner, "stream": stream, "seq": seq, "kind": kind, "state": "waiting"}
    row |= {"result": None, "path": None, "sha256": "", "bytes": 0, "read": None, "until": None}
    connection.execute(t.api_futures.insert().values(row))
    return row


def find_future(connection: Connection, future: str, owner: str | None) -> Row | None:
    return t.find_row(connection, t.api_futures, future, owner)


def complete(connection: Connection, future: str, result: Row, **values: Any) -> bool:
    """Gives a future its result. The first one stays. Returns whether this is the first."""
    return _end(connection, future, "done", result, **values)


def fail(connection: Connection, future: str, message: str, category: str) -> bool:
    """Gives a future an error, which a client raises."""
    return _end(connection, future, "failed", {"error": message, "category": category})


def _end(connection: Connection, future: str, state: str, result: Row, **values: Any) -> bool:
    values |= {"state": state, "result": result, "until": time.time() + UNREAD_S}
    is_waiting = (t.api_futures.c.id == future, t.api_futures.c.state == "waiting")
    return bool(connection.execute(t.api_futures.update().where(*is_waiting).values(values)).rowcount)


def fail_waiting(connection: Connection, stream: str, message: str, category: str) -> list[str]:
    """Fails all futures of a stream that wait. Returns them."""
    where = (t.api_futures.c.stream == stream, t.api_futures.c.state == "waiting")
    futures = list(connection.execute(select(t.api_futures.c.id).where(*where)).scalars())
    for future in futures:
        fail(connection, future, message, category)
    return futures


def note_read(connection: Connection, future: str) -> None:
    """Notes that a result was sent: it stays for an hour from its first time."""
    now = time.time()
    first = (t.api_futures.c.id == future, t.api_futures.c.read.is_(None))
    connection.execute(t.api_futures.update().where(*first).values(read=now, until=now + READ_S))


def remove_expired(connection: Connection) -> list[str]:
    """Removes futures whose time is over. Returns the paths of their results."""
    over = t.api_futures.c.until < time.time()
    rows = connection.execute(select(t.api_futures.c.id, t.api_futures.c.path).where(over).limit(AT_ONCE)).all()
    connection.execute(t.api_futures.delete().where(t.api_futures.c.id.in_([row[0] for row in rows])))
    return [row[1] for row in rows if row[1] is not None]
