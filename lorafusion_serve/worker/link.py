"""The worker's side of the connection: commands in, events out. It survives a restart of the server.

Events are numbered and kept until the server has taken them, so none is lost and none counts twice.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from lorafusion_serve.wire import Closed, Message, Wire, connect

AGAIN_S = 0.25


class Link:
    """Connects in the background, again and again.

    Args:
        address: of the server, see `wire.connect`.
        holds: says which jobs are here, for a server that has just started.
        secret: of the service; workers of its own machine need none.

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
    ):
        self._address, self._group, self._epoch, self._holds, self._secret = address, group, epoch, holds, secret
        self._beat_s = beat_s
        self.commands: queue.Queue[Message] = queue.Queue()
        self.refused = ""
        self._outbox: deque[Message] = deque()
        self._lock = threading.Lock()  # of what follows
        self._number = 0
        self._wire: Wire | None = None
        self._emitting = threading.Lock()  # the server takes events in the order of their numbers
        self._contact = time.monotonic()
        self._ended = threading.Event()
        for name, work in (("link", self._connect), ("beat", self._beat)):
            threading.Thread(target=work, name=name, daemon=True).start()

    @property
    def silent_s(self) -> float:
        """Seconds since the server was there."""
        return time.monotonic() - self._contact

    def emit(self, kind: str, **data: Any) -> None:
        """Sends an event, now or after the next connection."""
        with self._emitting:
            with self._lock:
                self._number += 1
                message = {"number": self._number, "event": kind} | data
                self._outbox.append(message)
                wire = self._wire
            self._try(wire, message)

    def close(self, wait_s: float = 5.0) -> None:
        """Waits for the server to take what was emitted."""
        until = time.monotonic() + wait_s
        while self._outbox and time.monotonic() < until and not self.refused:
            time.sleep(0.02)
        self._ended.set()

    def _try(self, wire: Wire | None, message: Message) -> None:
        try:
            if wire is not None:
                wire.send(message)
        except Closed:
            pass  # sent again after the next connection

    def _beat(self) -> None:
        while not self._ended.wait(self._beat_s):
            self._try(self._wire, {"beat": True})

    def _connect(self) -> None:
        while not self._ended.is_set() and not self.refused:
            try:
                with connect(self._address) as connection:
                    self._talk(Wire(connection))
            except (OSError, Closed):
                pass  # tried again
            self._wire = None
            self._ended.wait(AGAIN_S)

    def _talk(self, wire: Wire) -> None:
        hello = {"hello": self._group, "epoch": self._epoch, "pid": os.getpid(), "jobs": self._holds()}
        wire.send(hello | {"secret": self._secret})
        answer = wire.receive()
        if "refused" in answer:
            self.refused = answer["refused"]
            return
        with self._lock:
            self._forget(answer["received"])
            for message in self._outbox:
                wire.send(message)
            self._wire, self._contact = wire, time.monotonic()
        while True:
            message = wire.receive()
            self._contact = time.monotonic()
            if "received" in message:
                with self._lock:
                    self._forget(message["received"])
            elif "command" in message:
                self.commands.put(message)

    def _forget(self, received: int) -> None:
        while self._outbox and self._outbox[0]["number"] <= received:
            self._outbox.popleft()
