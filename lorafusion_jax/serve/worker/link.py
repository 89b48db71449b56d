"""The worker's side of the connection: commands in, events out. It survives a restart of the server.

Events are numbered and kept until the server has taken them, so none is lost and none counts twice. One thread sends
them, in the order of their numbers, and another receives: who emits never waits for the server.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lorafusion_jax.serve.watched import start_watched
from lorafusion_jax.serve.wire import Closed, Message, Wire, connect

AGAIN_S = 0.25


class Link:
    """Connects in the background, again and again.

    Args:
        address: of the server, see `wire.connect`.
        holds: says which jobs are here, for a server that has just started. A job that has ended is among them until
            its end was emitted.
        secret: of the service; workers of its own machine need none.
        on_refused: called once the server does not want this worker.

    Attributes:
        commands: what the server asks.
        refused: why the server does not want this worker; it has to end.
    """

    def __init__(
        self,
        address: str,
        group: str,
        epoch: int,
        beat_s: float,
        holds: Callable[[], list[Message]],
        secret: str = "",
        *,
        on_refused: Callable[[], None] = lambda: None,
    ):
        self._address, self._group, self._epoch, self._holds, self._secret = address, group, epoch, holds, secret
        self._beat_s, self._on_refused = beat_s, on_refused
        self.commands: queue.Queue[Message] = queue.Queue()
        self.refused = ""
        self._changed = threading.Condition()  # of what follows
        self._number = 0
        self._waiting: deque[Message] = deque()  # not sent over this connection
        self._sent: deque[Message] = deque()  # and not known to be taken
        self._wire: Wire | None = None
        self._contact = time.monotonic()
        self._ended = threading.Event()
        for name, work in (("link", self._connect), ("events", self._send)):
            start_watched(name, work, self._ended)

    @property
    def silent_s(self) -> float:
        """Seconds since the server was there."""
        return time.monotonic() - self._contact

    @property
    def untaken(self) -> int:
        """Number of events that the server is not known to have taken."""
        return len(self._waiting) + len(self._sent)

    def emit(self, kind: str, **data: Any) -> None:
        """Sends an event, soon or after the next connection."""
        with self._changed:
            self._number += 1
            self._waiting.append({"number": self._number, "event": kind} | data)
            self._changed.notify_all()

    def close(self, wait_s: float = 5.0) -> None:
        """Waits for the server to take what was emitted."""
        with self._changed:
            self._changed.wait_for(lambda: not self.untaken or bool(self.refused), wait_s)
        self._ended.set()

    def _send(self) -> None:
        """Sends events, and a beat when there are none."""
        while not self._ended.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._wire is not None and bool(self._waiting), self._beat_s)
                wire, message = self._wire, {"beat": True}
                if wire is None:
                    continue
                if self._waiting:
                    message = self._waiting.popleft()
                    self._sent.append(message)
            with suppress(Closed):  # sent again after the next connection
                wire.send(message)

    def _connect(self) -> None:
        while not self._ended.is_set() and not self.refused:
            try:
                wire = Wire(connect(self._address))
            except OSError:
                self._ended.wait(AGAIN_S)
                continue
            try:
                self._talk(wire)
            except (Closed, OSError):
                pass  # tried again
            finally:
                with self._changed:
                    self._wire = None
                wire.close()
            self._ended.wait(AGAIN_S)

    def _talk(self, wire: Wire) -> None:
        hello = {"hello": self._group, "epoch": self._epoch, "pid": os.getpid(), "jobs": self._holds()}
        last = self._number  # after `holds`: what is not held any more has been told of by then
        wire.send(hello | {"last": last, "secret": self._secret})
        answer = wire.receive()
        if "refused" in answer:
            with self._changed:
                self.refused = answer["refused"]
                self._changed.notify_all()
            self._on_refused()
            return
        with self._changed:
            self._waiting.extendleft(reversed(self._sent))
            self._sent.clear()
            _forget(self._waiting, answer["received"])
            self._wire, self._contact = wire, time.monotonic()
            self._changed.notify_all()
        while True:
            message = wire.receive()
            self._contact = time.monotonic()
            if "received" in message:
                with self._changed:
                    _forget(self._sent, message["received"])
                    self._changed.notify_all()
            elif "command" in message:
                self.commands.put(message)


def _forget(events: deque[Message], received: int) -> None:
    while events and events[0]["number"] <= received:
        events.popleft()
