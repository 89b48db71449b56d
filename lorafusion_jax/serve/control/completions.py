"""Completions under way: what workers tell of them goes to the requests that wait. Nothing of it is on the disk."""

from __future__ import annotations

import asyncio
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lorafusion_jax.serve.control.hub import Connection, Hub
from lorafusion_jax.serve.wire import Message

LOOK_S = 1.0  # between two looks whether the worker and the client are there


@dataclass(slots=True, kw_only=True, eq=False)
class Completion:
    """A completion that a worker writes.

    Attributes:
        worker: the connection over which it was asked for. Another one may lack parts of it.
        events: of the worker.
        loop: of the request that waits.
        is_done: whether its worker has told all of it.
    """

    id: str
    worker: Connection
    events: asyncio.Queue[Message]
    loop: asyncio.AbstractEventLoop
    is_done: bool = False


class Completions:
    """Completions of a service. All methods but `take` are called on its event loop."""

    def __init__(self, hub: Hub):
        self._hub, self._lock = hub, threading.Lock()
        self._running: dict[str, Completion] = {}
        self._sender = ThreadPoolExecutor(1, "completions")  # a worker that does not read holds up nobody else

    async def start(self, group: str, folder: str | None, values: dict[str, Any]) -> Completion | None:
        """Asks the worker of a session. None: it is not connected."""
        worker = self._hub.connections.get(group)
        if worker is None:
            return None
        completion = Completion(
            id=secrets.token_hex(12), worker=worker, events=asyncio.Queue(), loop=asyncio.get_running_loop()
        )
        message = {"command": "complete", "future": completion.id, "folder": folder, "values": values}
        with self._lock:
            self._running[completion.id] = completion
        if await asyncio.wrap_future(self._sender.submit(self._hub.send, group, message)):
            return completion
        self.end(completion)
        return None

    async def next(self, completion: Completion) -> Message | None:
        """Waits for the next event, for `LOOK_S` at most.

        Raises:
            ConnectionError: the worker is gone.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                event = await completion.events.get()
                completion.is_done = bool(event.get("ended", "error" in event))
                return event
        if self._hub.connections.get(completion.worker.group) is not completion.worker:
            raise ConnectionError
        return None

    def end(self, completion: Completion) -> None:
        """Forgets a completion. One that is not done ends on its worker."""
        with self._lock:
            self._running.pop(completion.id, None)
        if not completion.is_done:
            message = {"command": "cancel", "future": completion.id}
            self._sender.submit(self._hub.send, completion.worker.group, message)

    def close(self) -> None:
        self._sender.shutdown(wait=False, cancel_futures=True)

    def take(self, source: Connection, event: Message) -> None:
        """Takes what a worker tells, in the thread of its connection."""
        with self._lock:
            completion = self._running.get(event["future"])
        if completion is not None and completion.worker is source and not completion.loop.is_closed():
            with suppress(RuntimeError):  # the loop ends now
                completion.loop.call_soon_threadsafe(completion.events.put_nowait, event)
