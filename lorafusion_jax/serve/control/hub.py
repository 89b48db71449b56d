"""The server's side of the connections to workers."""

from __future__ import annotations

import hmac
import itertools
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lorafusion_jax.files import replace_text
from lorafusion_jax.serve.store.database import StoreError
from lorafusion_jax.serve.watched import start_watched
from lorafusion_jax.serve.wire import Closed, Message, Wire

LARGEST_HELLO, HELLO_S = 1 << 20, 10.0  # bytes, and seconds for all of them
MOST_GREETING, PAUSE_S = 64, 0.1  # connections without a hello; pause while descriptors or threads are exhausted
log = logging.getLogger("lorafusion.control")


@dataclass(slots=True, kw_only=True)
class Connection:
    """A connected worker.

    Attributes:
        number: connections are counted as they come; a newer one of the same worker replaces an older one.
        holds: jobs that it had when it connected.
        last: number of its last event by then.
        taken: number of the last event that was taken.
    """

    number: int
    group: str
    epoch: int
    pid: int
    wire: Wire
    holds: list[Message]
    last: int
    taken: int
    contact: float = field(default_factory=time.monotonic)

    @property
    def is_settled(self) -> bool:
        """Whether all is known that happened before it connected. Until then `holds` may lack jobs that have ended."""
        return self.taken >= self.last


class Hub:
    """Listens for workers, from `start` on; those that connect before wait.

    Args:
        admit: (hello) → number of the last event taken from this worker, or why it is refused.
        take: (connection, message) takes an event.
        tcp: host and port to listen on for workers of other machines (None: the socket of this machine).

    Attributes:
        address: where workers connect.
        secret: what workers say first. It stays the same over restarts.
    """

    def __init__(
        self,
        path: Path,
        admit: Callable[[Message], int | str],
        take: Callable[[Connection, Message], None],
        *,
        tcp: tuple[str, int] | None = None,
    ):
        self._admit, self._take = admit, take
        self.connections: dict[str, Connection] = {}
        self._changing = threading.Lock()  # the connections
        self._ended, self._numbers = threading.Event(), itertools.count()
        self._greeting: dict[int, Wire] = {}  # those that have not said hello, the oldest first
        self.secret = "" if tcp is None else _kept_secret(path.with_name("workers.secret"))
        self._listener = _listen_unix(path) if tcp is None else socket.create_server(tcp)
        host, port = (tcp[0], self._listener.getsockname()[1]) if tcp is not None else ("", 0)
        self.address = f"unix:{path}" if tcp is None else f"tcp:{host}:{port}"

    def start(self) -> None:
        start_watched("hub", self._accept, self._ended)

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
        with self._changing:
            connection = self.connections.pop(group, None)
        if connection is not None:
            connection.wire.close()

    def close(self) -> None:
        self._ended.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts, so that the port is free
        self._listener.close()
        for group in list(self.connections):
            self.drop(group)

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                peer, _ = self._listener.accept()
            except OSError as problem:  # no descriptors are left; a connection ended before it was accepted
                self._pause(problem)
                continue
            number, wire = next(self._numbers), Wire(peer)
            self._greeting[number] = wire
            for oldest in list(self._greeting)[:-MOST_GREETING]:  # a worker says hello at once; these have not
                if (silent := self._greeting.pop(oldest, None)) is not None:
                    silent.close()
            try:
                threading.Thread(target=self._serve, args=(wire, number), name="worker", daemon=True).start()
            except RuntimeError as problem:  # no threads are left
                self._greeting.pop(number, None)
                wire.close()
                self._pause(problem)

    def _pause(self, problem: Exception) -> None:
        if not self._ended.is_set():
            log.warning("no worker can connect now: %s", problem)
            self._ended.wait(PAUSE_S)

    def _serve(self, wire: Wire, number: int) -> None:
        connection: Connection | None = None
        try:
            try:
                connection = self._greet(wire, number)
            finally:
                self._greeting.pop(number, None)
            while connection is not None:
                message = wire.receive()
                connection.contact = time.monotonic()
                if "event" in message:
                    self._take(connection, message)
                    connection.taken = message["number"]
                wire.send({"received": message.get("number", 0)})
        except (Closed, KeyError, TypeError, AttributeError):
            pass
        except StoreError as problem:  # the worker connects again and sends what was not taken
            log.warning("%s", problem)
        except Exception:
            log.exception("an event of a worker could not be taken")
        finally:
            wire.close()
            with self._changing:
                if connection is not None and self.connections.get(connection.group) is connection:
                    del self.connections[connection.group]

    def _greet(self, wire: Wire, number: int) -> Connection | None:
        """Returns the connection of a worker; None if it is refused."""
        hello = wire.receive(LARGEST_HELLO, HELLO_S)
        if not hmac.compare_digest(str(hello.get("secret", "")).encode(), self.secret.encode()):
            wire.send({"refused": "another secret than that of the service"})
            return None
        answer = self._admit(hello)
        if isinstance(answer, str):
            wire.send({"refused": answer})
            return None
        connection = Connection(
            number=number,
            group=hello["hello"],
            epoch=hello["epoch"],
            pid=hello["pid"],
            wire=wire,
            holds=hello["jobs"],
            last=hello["last"],
            taken=answer,
        )
        wire.send({"received": answer})
        with self._changing:
            predecessor = self.connections.get(connection.group)
            if predecessor is not None and predecessor.number > number:
                return None  # the worker has given this one up
            self.connections[connection.group] = connection
        return connection


def _listen_unix(path: Path) -> socket.socket:
    with suppress(FileNotFoundError):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    os.chmod(path, 0o600)
    listener.listen()
    return listener


def _kept_secret(file: Path) -> str:
    """Returns the secret of a file that only its owner reads; makes it if it is not there."""
    if not file.exists():
        replace_text(file, secrets.token_hex(32))
        file.chmod(0o600)
    return file.read_text(encoding="utf-8")
