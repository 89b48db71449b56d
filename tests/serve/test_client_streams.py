"""The client's stream of events goes on when the server that sends it ends."""

from __future__ import annotations

import http.client
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import lorafusion_jax.serve.client as module
from lorafusion_jax.serve.client import Client


class Ends(BaseHTTPRequestHandler):
    """Sends two events and ends the stream, as a server that stops or is killed. The third stream has the last one."""

    protocol_version = "HTTP/1.1"
    asked: list[int] = []  # noqa: RUF012

    def do_GET(self):
        if not self.path.endswith("/events"):
            state = "done" if len(self.asked) == 3 else "running"
            body = json.dumps({"state": state}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        after = int(self.headers["Last-Event-ID"])
        self.asked.append(after)
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for seq in range(after + 1, min(after + 3, 6)):
            part = f'id: {seq}\nevent: step\ndata: {{"step": {seq}}}\n\n'.encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        if len(self.asked) == 1:
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True  # else without an end, as of a server that is killed

    def log_message(self, *_):
        pass


def test_events_go_on_after_their_server_has_ended():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Ends)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        events = list(Client(f"http://127.0.0.1:{server.server_address[1]}").job("job-1").events())
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert [event["step"] for event in events] == [1, 2, 3, 4, 5]
    assert Ends.asked == [0, 2, 4]


def job_that_is_answered(monkeypatch, *answers):
    """A job of a service that answers so, one after another."""
    rest = iter(answers)

    def request(*_):
        answer = next(rest)
        if isinstance(answer, Exception):
            raise answer
        return {"state": answer, "reason": "", "problems": []}

    monkeypatch.setattr(Client, "request", request)
    return Client().job("job-1")


def test_who_waits_for_a_job_also_waits_for_its_service(monkeypatch):
    down, cut = ConnectionRefusedError(111, "refused"), http.client.RemoteDisconnected("cut")
    job = job_that_is_answered(monkeypatch, "running", cut, down, down, "queued", down, "done")
    assert job.wait(every_s=0) is job
    with pytest.raises(ConnectionRefusedError):  # a wrong address, mostly
        job_that_is_answered(monkeypatch, down).wait(every_s=0)
    monkeypatch.setattr(module, "AWAY_S", -1.0)
    with pytest.raises(ConnectionRefusedError):
        job_that_is_answered(monkeypatch, "running", down).wait(every_s=0)


def test_events_of_a_service_that_never_answers_are_an_error():
    with pytest.raises(ConnectionRefusedError):
        next(Client("http://127.0.0.1:9").job("job-1").events())
