"""The server's side of the connections to workers."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lorafusion_serve.store.database import StoreError
from lorafusion_serve.wire import Closed, Message, Wire

log = logging.getLogger("lorafusion.control")


@dataclass(slots=True, kw_only=True)
class Connection:
    """A connected worker."""

    group: str
    epoch: int
    pid: int
    wire: Wire
    holds: list[Message]
    contact: float = field(default_factory=time.monotonic)


class Hub:
    """Listens for workers.

    Args:
        admit: (hello) → number of the last event taken from this worker, or why it is refused.
        take: (connection, message) takes an event.
    """

    def __init__(self, path: Path, admit: Callable[[Message], int | str], take: Callable[[Connection, Message], None]):
        self._admit, self._take = admit, take
        self.connections: dict[str, Connection] = {}
        with suppress(FileNotFoundError):
            path.unlink()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        os.chmod(path, 0o600)
        self._listener.listen()
        threading.Thread(target=self._accept, name="hub", daemon=True).start()

    def send(self, group: str, message: Message) -> bool:
        """Sends to a worker. Returns whether it is connected."""
        connection = self.connections.get(group)
        if connection is None:
            return False
        try:
            connection.wire.send(message)
        except Closed:
            return False
        return True

    def drop(self, group: str) -> None:
        connection = self.connections.pop(group, None)
        if connection is not None:
            connection.wire.close()

    def close(self) -> None:
        self._listener.close()
        for group in list(self.connections):
            self.drop(group)

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(Wire(accepted),), name="worker", daemon=True).start()

    def _serve(self, wire: Wire) -> None:
        connection: Connection | None = None
        try:
            hello = wire.receive()
            admitted = self._admit(hello)
            if isinstance(admitted, str):
                wire.send({"refused": admitted})
                return
            connection = Connection(
                group=hello["hello"], epoch=hello["epoch"], pid=hello["pid"], wire=wire, holds=hello["jobs"]
            )
            wire.send({"received": admitted})
            self.connections[connection.group] = connection
            while True:
                message = wire.receive()
                connection.contact = time.monotonic()
                if "event" in message:
                    self._take(connection, message)
                wire.send({"received": message.get("number", 0)})
        except (Closed, KeyError, TypeError):
            pass
        except StoreError as problem:  # the worker connects again and sends what was not taken
            log.warning("%s", problem)
        finally:
            wire.close()
            if connection is not None and self.connections.get(connection.group) is connection:
                del self.connections[connection.group]
