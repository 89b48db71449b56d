"""Clients that send too much, too slowly, or hold too many streams: bounded memory, and others are answered.

Small cases here; `make test-nightly` has bodies of two gigabytes and a thousand streams.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from local_service import start_service
from more_cases import nightly

from lorafusion_jax.serve.api import access, app, connections, datasets
from lorafusion_jax.serve.client import _parse_events

GB = 2**30
PART = b"x" * (1 << 20)


def resident_mb() -> float:
    """Memory of this process, in which the service runs, too."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def address(running) -> tuple[str, int]:
    host, port = running.url.removeprefix("http://").split(":")
    return host, int(port)


def answer_to(running, method: str, path: str, body, **headers: str) -> tuple[int, bytes, int]:
    """Sends a body until the service answers. Returns the status, the answer, and the bytes that were sent."""
    connection, sent = http.client.HTTPConnection(*address(running), timeout=60), 0
    connection.putrequest(method, path)
    for name, value in ({"X-API-Key": running.keys["ana"]} | headers).items():
        connection.putheader(name, value)
    connection.endheaders()
    try:
        for part in body:
            connection.send(b"%x\r\n%s\r\n" % (len(part), part) if "Transfer-Encoding" in headers else part)
            sent += len(part)
    except (BrokenPipeError, ConnectionResetError):
        pass  # it has answered and closed
    try:
        with connection.getresponse() as answer:
            return answer.status, answer.read(), sent
    except ConnectionResetError:  # closed while more was on its way: the answer may be lost
        return 0, b"", sent
    finally:
        connection.close()


def parts(size: int) -> Iterator[bytes]:
    for _ in range(size // len(PART)):
        yield PART


@pytest.mark.parametrize("size", [GB // 16, nightly(2 * GB + (1 << 20))])
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/datasets?name=a.jsonl"])
def test_a_large_body_is_refused_early(start_service, running, tmp_path, tiny_base, size, path):
    """By its length before a byte is read; without one, where the limit is. Neither is ever held in memory."""
    small = start_service(tmp_path / "home", tiny_base, most_upload=size // 2)
    before, limit = resident_mb(), size // 2 if "datasets" in path else app.LARGEST_BODY
    status, answer, sent = answer_to(small, "POST", path, parts(size), **{"Content-Length": str(size)})
    assert status in (0, 413), answer
    assert sent < limit + 16 * len(PART)
    status, answer, sent = answer_to(small, "POST", path, parts(size), **{"Transfer-Encoding": "chunked"})
    assert status in (0, 413), answer
    assert sent < limit + 16 * len(PART)
    assert resident_mb() - before < 64
    assert list(small.settings.datasets.glob(".upload-*")) == []
    assert small.client("ben").request("GET", "/v1/me")["owner"] == "ben"


def test_slow_clients_are_sent_away(running, monkeypatch):
    """A head that never ends, a body that never comes, an upload of a byte a second: each connection ends."""
    monkeypatch.setattr(connections, "HEAD_S", 0.5)
    monkeypatch.setattr(app, "BODY_S", 0.5)
    monkeypatch.setattr(datasets, "SILENT_S", 0.5)
    rest = f"HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {running.keys['ana']}\r\nContent-Length: 50\r\n\r\n{{"
    begun = {
        "nothing": b"",
        "head": b"GET /v1/me HTTP/1.1\r\nHost: localhost\r\nX-A: ",
        "body": f"POST /v1/jobs {rest}".encode(),
        "upload": f"POST /v1/datasets?name=a.csv {rest}".encode(),
    }
    with ExitStack() as stack:
        sockets = {name: stack.enter_context(socket.create_connection(address(running), 60)) for name in begun}
        for name, text in begun.items():
            sockets[name].sendall(text)
        assert running.client("ana").request("GET", "/v1/me")["owner"] == "ana"
        answers = {name: read_all(client) for name, client in sockets.items()}
    assert answers["nothing"] == answers["head"] == b""
    assert b" 408 " in answers["body"].split(b"\r\n")[0]
    assert b"api.slow" in answers["body"]
    assert b"data.slow" in answers["upload"]
    assert list(running.settings.datasets.glob(".upload-*")) == []


def read_all(client: socket.socket) -> bytes:
    received = b""
    while part := client.recv(4096):
        received += part
    return received


@pytest.mark.parametrize("count", [60, nightly(1000)])
def test_many_streams_are_bounded_and_others_are_answered(tmp_path, tiny_base, count):
    """Of 50 streams a key; an event reaches those of its owner, and who comes beyond the limit is told to wait."""
    connections.allow_files()
    owners = tuple(f"user-{number}" for number in range(-(-count // access.MOST_STREAMS)))
    running, end = start_service(tmp_path / "home", tiny_base, owners=owners)
    with ExitStack() as stack:
        stack.callback(end)
        before, streams = resident_mb(), []
        for number in range(count):
            owner = owners[number // access.MOST_STREAMS]
            stream = stack.enter_context(running.client(owner).stream("/v1/events"))
            assert stream.readline() == b": connected\n"  # it counts now
            streams.append((owner, stream))
        full = owners[0]
        refused = http.client.HTTPConnection(*address(running), timeout=60)
        refused.request("GET", "/v1/events", headers={"X-API-Key": running.keys[full]})
        answer = refused.getresponse()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (429, "api.streams")
        assert answer.headers["Retry-After"]
        refused.close()
        began = time.monotonic()
        assert running.client(full).request("GET", "/v1/me")["owner"] == full
        answered_s = time.monotonic() - began
        with running.db.write() as connection:
            running.db.add_event(connection, "news", owners[-1], None, {"text": "first"})
        mine = [stream for owner, stream in streams if owner == owners[-1]]
        assert all(next(_parse_events(stream))["text"] == "first" for stream in mine)
        with running.db.write() as connection:
            running.db.add_event(connection, "news", full, None, {"text": "second"})
        others = [stream for owner, stream in streams if owner == full]
        assert all(next(_parse_events(stream))["text"] == "second" for stream in others)
        grown = resident_mb() - before
        print(f"{count} streams: {grown:.0f} MB with their clients, another request in {answered_s:.3f} s")
        assert grown < 30 + 0.2 * count
    assert running.service.streams == {}
    assert threading.active_count() < 100
