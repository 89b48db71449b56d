"""Messages between server and worker: JSON with its length before it, over a local socket."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Any

LARGEST = 16 << 20
Message = dict[str, Any]


class Closed(Exception):
    """The other side is gone."""


def connect(address: str) -> socket.socket:
    """Connects to "unix:PATH" or "tcp:HOST:PORT".

    Raises:
        OSError: nobody listens there.
    """
    family, _, target = address.partition(":")
    if family == "tcp":
        host, _, port = target.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=None)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(target)
    except OSError:
        connection.close()
        raise
    return connection


class Wire:
    """One connection. `send` may be called from several threads, `receive` from one."""

    def __init__(self, connection: socket.socket):
        self._socket, self._sending = connection, threading.Lock()

    def send(self, message: Message) -> None:
        """Sends a message.

        Raises:
            Closed: the other side is gone.
        """
        text = json.dumps(message, separators=(",", ":")).encode()
        try:
            with self._sending:
                self._socket.sendall(struct.pack(">I", len(text)) + text)
        except OSError as problem:
            raise Closed from problem

    def receive(self, largest: int = LARGEST, timeout_s: float | None = None) -> Message:
        """Waits for a message.

        Args:
            largest: bytes of a message.
            timeout_s: seconds for the whole message, after which the other side counts as gone.

        Raises:
            Closed: the other side is gone, or sends something else.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        (size,) = struct.unpack(">I", self._exactly(4, until))
        if size > largest:
            raise Closed
        try:
            return json.loads(self._exactly(size, until))
        except ValueError as problem:
            raise Closed from problem

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, size: int, until: float | None) -> bytes:
        parts: list[bytes] = []
        while size:
            try:
                self._socket.settimeout(None if until is None else max(0.001, until - time.monotonic()))
                part = self._socket.recv(min(size, 1 << 16))
            except OSError as problem:
                raise Closed from problem
            if not part:
                raise Closed
            parts.append(part)
            size -= len(part)
        return b"".join(parts)
