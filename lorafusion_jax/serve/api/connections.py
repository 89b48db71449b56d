"""How connections are served: limits of their number and of the time that a client may take."""

from __future__ import annotations

import asyncio
import heapq
import logging
import resource
import select
import threading
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 15  # for the head of a request
MOST, FILES, RESERVED = 4096, 8192, 256  # connections, files that may be open, and files that are none of them
LARGEST_HEAD = 64 << 10
AT_ONCE = 64 << 10  # bytes that are read of a connection before others have their turn
REST, REST_S = 4 << 20, 5  # bytes and seconds of a refused body that are still read, so that the client sees the answer
MOST_SPARED = 32  # connections with an unread request that are looked at before a new one is refused instead
MOST_RESTS = 32  # connections of which that is read at once: each takes a millisecond of the event loop for 256 KiB


def server_config(app: Any, *, host: str = "127.0.0.1", port: int = 0, **more: Any) -> uvicorn.Config:
    """Settings of the HTTP server."""
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        http=PatientProtocol,
        log_level=logging.WARNING,
        access_log=False,
        timeout_keep_alive=15,
        limit_concurrency=most_connections(),
        h11_max_incomplete_event_size=LARGEST_HEAD,
        server_header=False,
        **more,
    )


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line of uvicorn is shown: requests that the end of the service cancels have their answers."""
    return not record.msg.startswith("Cancel %s running task(s)")


def allow_files() -> None:
    """Raises the number of files that this process may open to what so many connections take, if it is allowed to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def most_connections() -> int:
    """Returns how many connections leave files for the database, workers and children."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else max(16, min(MOST, soft - RESERVED))


class _Buffer(threading.local):
    """Where bytes of connections arrive: the loop of a thread copies those of one before it reads of the next."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(AT_ONCE))


class PatientProtocol(H11Protocol, asyncio.BufferedProtocol):
    """Closes connections whose head does not arrive in time, or whose body goes on after the answer.

    uvicorn itself waits forever for a first request and the rest of a head, and reads a refused body to its end. It
    also takes 256 KiB at once, of which most is copied in vain if the request is refused.
    """

    _buffer = _Buffer()

    _with_rest: ClassVar[set[PatientProtocol]] = set()

    _late: asyncio.TimerHandle | None = None  # closes the connection
    _rest = 0  # bytes of the body after the answer
    _since, _is_closing = 0.0, False  # when its last request ended, or it was made

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._since = self.loop.time()
        if self.limit_concurrency is not None and len(self.connections) > self.limit_concurrency * 7 // 8:
            self._close_idlest()
        self._look()

    def _close_idlest(self) -> None:
        """Makes room: closes the connection that has been without a request for longest, before anybody is refused.

        One whose next request has arrived, but was not read yet, is spared.
        """
        idle = [other for other in self.connections if isinstance(other, PatientProtocol) and other.is_idle]
        for idlest in heapq.nsmallest(MOST_SPARED, idle, key=lambda other: other._since):
            if not idlest._has_arrivals():
                idlest._is_closing = True
                idlest.transport.close()
                return

    def _has_arrivals(self) -> bool:
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poll.poll(0))

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a request, or for the rest of a head."""
        return not self._is_closing and (self.cycle is None or self.cycle.response_complete)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer.view

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._buffer.view[:nbytes]))

    def data_received(self, data: bytes) -> None:
        if self._answered_early():
            self._rest += len(data)
            if self._rest > REST:
                self.transport.close()
                return
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._since = self.loop.time()
        if self._answered_early():
            if len(self._with_rest) >= MOST_RESTS:
                self.transport.close()
                return
            self._with_rest.add(self)
            self._rest = 0
            self._close_after(REST_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self._with_rest.discard(self)
        super().connection_lost(exc)

    def _answered_early(self) -> bool:
        return (str(self.conn.their_state), str(self.conn.our_state)) == ("SEND_BODY", "DONE")  # of h11

    def _look(self) -> None:
        if str(self.conn.their_state) == "IDLE":
            self._close_after(HEAD_S)
        elif not self._answered_early():
            self._stop()
        if not self._answered_early():
            self._with_rest.discard(self)

    def _close_after(self, seconds: float) -> None:
        if self._late is None:
            self._late = self.loop.call_later(seconds, self.transport.close)

    def _stop(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
