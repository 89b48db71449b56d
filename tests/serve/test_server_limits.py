"""What one owner or a stranger may take of a server: turns in the child, memory and time of it, bodies, threads."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from contextlib import ExitStack, suppress

import local_service
import psutil
import pyarrow as pa
import pytest
from campaigns.service_process import PATIENCE_S, wait_for
from pyarrow import parquet
from sqlalchemy import select
from test_api import raw, refused
from test_rude_clients import address

from lorafusion_jax.data.sources import open_source, row_blocks
from lorafusion_jax.serve.api import access, app, connections
from lorafusion_jax.serve.control import child
from lorafusion_jax.serve.control import hub as hub_module
from lorafusion_jax.serve.control.child import Child, TooManyWaiting
from lorafusion_jax.serve.control.child_process import _row, count
from lorafusion_jax.serve.control.hub import Hub
from lorafusion_jax.serve.control.spec import JobSpec
from lorafusion_jax.serve.store import database
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.jobs import Jobs
from lorafusion_jax.serve.watched import start_watched
from lorafusion_jax.serve.worker.link import Link


class FakeProcess:
    """Answers when it is told to, and notes who asked."""

    asked: list[str]
    go: threading.Semaphore
    busy: threading.Event

    def __init__(self, command):
        del command

    def ask(self, request, limit_s):
        assert limit_s > 0
        type(self).busy.set()
        type(self).go.acquire()
        type(self).asked.append(request.get("file"))
        return {"problems": [], "rows": 1}

    def kill(self):
        type(self).go.release(100)

    def end(self):
        pass


@pytest.fixture
def fake(monkeypatch):
    FakeProcess.asked, FakeProcess.go, FakeProcess.busy = [], threading.Semaphore(0), threading.Event()
    monkeypatch.setattr(child, "AnsweringProcess", FakeProcess)
    asking = Child()
    yield asking
    asking.close()


def test_owners_take_turns_and_wait_without_threads(fake):
    """Who asks for much waits for himself: others come after one of his, in a lane of its own kind at once."""
    before = threading.active_count()
    first = fake.submit("ana", "count", {"file": "ana"})
    while not first.running():
        time.sleep(0.01)
    ana = [fake.submit("ana", "count", {"file": f"ana {n}"}) for n in range(child.MOST_WAITING)]
    with pytest.raises(TooManyWaiting):
        fake.submit("ana", "count", {"file": "too many"})
    ben = fake.submit("ben", "count", {"file": "ben"})
    assert threading.active_count() <= before + 1
    for _ in range(4):
        FakeProcess.go.release()
    assert ana[1].result(10) == ben.result(10) == {"problems": [], "rows": 1}
    assert FakeProcess.asked == ["ana", "ana 0", "ben", "ana 1"]
    other = fake.submit("ana", "preview", {"file": "preview"})
    FakeProcess.go.release(20)
    assert other.result(10)["rows"] == 1


def test_what_waits_is_cancelled_when_the_service_ends(fake):
    answers = [fake.submit("ana", "check", {"file": str(n)}) for n in range(4)]
    time.sleep(0.05)
    began = time.monotonic()
    fake.close()
    assert time.monotonic() - began < 5
    for answer in answers[1:]:
        with pytest.raises(CancelledError):
            answer.result(5)


def test_a_child_hears_no_signal_to_the_others(tmp_path):
    """Ctrl-C reaches all processes of a terminal, and a service manager ends all of a service: a check goes on."""
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n')
    asking = Child()
    question = {"file": str(tmp_path / "rows.jsonl"), "most_bytes": 1 << 30}
    try:
        assert asking.submit("ana", "count", question).result(60)["rows"] == 1
        pid = asking._lanes["count"]._process._process.pid
        assert os.getpgid(pid) != os.getpgid(0)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
        assert asking.submit("ana", "count", question).result(60)["rows"] == 1
        assert asking._lanes["count"]._process._process.pid == pid
    finally:
        asking.close()


def test_a_request_whose_child_ends_with_the_service_has_no_answer(monkeypatch):
    """Not that its data was too large."""

    class Killed(FakeProcess):
        def ask(self, request, limit_s):
            super().ask(request, limit_s)
            return json.loads("")  # what is read of a process that was killed

    Killed.asked, Killed.go, Killed.busy = [], threading.Semaphore(0), threading.Event()
    monkeypatch.setattr(child, "AnsweringProcess", Killed)
    asking = Child()
    answer = asking.submit("ana", "check", {"file": "one"})
    assert Killed.busy.wait(10)
    asking.close()
    with pytest.raises(child.ServerEnds):
        answer.result(10)


def test_a_preview_beyond_the_places_of_an_owner_is_told_to_wait(running, dataset, monkeypatch):
    def full(*_, **__):
        raise TooManyWaiting

    monkeypatch.setattr(running.service.controller.child, "submit", full)
    problem = refused(lambda: running.client("ana").request("GET", f"/v1/datasets/{dataset}/preview"))
    assert (problem.status, problem.problems[0]["code"]) == (429, "api.turns")
    assert running.client("ana").request("GET", "/v1/me")["owner"] == "ana"


def test_a_flood_of_previews_is_refused_without_a_thread(running, dataset, job, monkeypatch):
    monkeypatch.setattr(running.service.controller.child, "is_full", lambda owner, question: owner == "ana")
    asked: list[str] = []
    run = access.Turns.run
    monkeypatch.setattr(
        access.Turns, "run", lambda turns, owner, *work: asked.append(owner) or run(turns, owner, *work)
    )
    problem = refused(lambda: running.client("ana").request("GET", f"/v1/datasets/{dataset}/preview"))
    assert (problem.status, asked) == (429, [])
    monkeypatch.undo()
    monkeypatch.setattr(running.service.controller.child, "is_full", lambda owner, question: question == "check")
    problem = refused(lambda: running.client("ana").request("POST", "/v1/jobs?dry_run=1", job))
    assert problem.status == 429


def test_requests_under_way_end_quietly_with_the_service(fake, tmp_path, tiny_base, monkeypatch, capfd):
    """A body that still comes, a preview that still waits and a stream of events: 503, 503 and an end, no trace."""
    monkeypatch.setattr("lorafusion_jax.serve.control.controller.Child", lambda *_: fake)
    running, end = local_service.start_service(tmp_path / "home", tiny_base, owners=("ana",))
    with running.db.write() as connection:
        row = {"id": "d", "owner": "ana", "name": "d.jsonl", "sha256": "", "format": "jsonl", "rows": 1, "bytes": 1}
        connection.execute(t.datasets.insert().values(row | {"columns": [], "created": 0.0}))
    lines = ("POST /v1/jobs", "GET /v1/datasets/d/preview", "GET /v1/events")
    more = f" HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {running.keys['ana']}\r\n"
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(address(running), 20)) for _ in lines]
        for client, line in zip(clients, lines, strict=True):
            client.sendall(f"{line}{more}{'Content-Length: 99' if 'POST' in line else 'A: b'}\r\n\r\n".encode())
        assert clients[2].recv(4000).startswith(b"HTTP/1.1 200")
        assert FakeProcess.busy.wait(10)
        end()
        answers = [b"".join(iter(lambda client=client: client.recv(4000), b"")) for client in clients]
    assert [answer[9:12] for answer in answers[:2]] == [b"503", b"503"]
    assert answers[2].endswith(b"0\r\n\r\n")
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert "ERROR" not in said


def write_bomb(file, rows: int, text: str) -> None:
    table = pa.table({"text": pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), [text])})
    parquet.write_table(table, file, compression="zstd")


def test_a_parquet_bomb_is_refused_and_an_ordinary_file_is_not(tmp_path):
    """Repeated values of a dictionary, and rows without any bytes."""
    repeated, empty, honest = (tmp_path / f"{name}.parquet" for name in ("repeated", "empty", "honest"))
    write_bomb(repeated, 200_000, "x" * 1000)
    listed = tmp_path / "listed.parquet"
    words = pa.DictionaryArray.from_arrays(pa.array([0] * 200_000, pa.int32()), ["x" * 1000])
    lists = pa.ListArray.from_arrays(pa.array(range(0, 200_001, 10), pa.int32()), words)
    parquet.write_table(pa.table({"text": lists}), listed, compression="zstd")
    parquet.write_table(pa.table({"text": pa.nulls(3_000_000, pa.string())}), empty, compression="zstd")
    parquet.write_table(pa.table({"text": [f"{n} and more" for n in range(20_000)]}), honest, compression="zstd")
    for bomb in (repeated, listed, empty):
        assert bomb.stat().st_size < 1 << 20
        (problem,) = count(bomb, 2 << 30)["problems"]
        assert problem["code"] == "data.unpacked"
    assert count(honest, 2 << 30) == {"problems": [], "rows": 20_000, "columns": ["text"]}
    (problem,) = count(honest, 1000)["problems"]
    assert problem["code"] == "data.unpacked"


def test_a_small_file_of_many_rows_is_read_in_blocks(tmp_path):
    """A run reads what an upload has not looked at; it unpacks a part at a time."""
    file = tmp_path / "repeated.parquet"
    write_bomb(file, 80_000, "y" * 1000)
    sizes = [len(block.values) for block in row_blocks(open_source(str(file), tmp_path))]
    assert sum(sizes) == 80_000
    assert max(sizes) < 16_000


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_a_preview_reads_no_further_than_its_row(tmp_path, monkeypatch, kind):
    """What comes after the first block of a file is not looked at."""
    monkeypatch.setattr("lorafusion_jax.data.row_blocks.BLOCK_BYTES", 1 << 10)
    rows = [{"text": f"row {n} " + "x" * 100} for n in range(400)]
    file = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), file, row_group_size=64)
        content = bytearray(file.read_bytes())
        content[len(content) // 2 : len(content) // 2 + 64] = bytes(64)
        file.write_bytes(content)
    else:
        lines = [json.dumps(row) for row in rows]
        text = {"jsonl": "\n".join(lines), "json": f"[{','.join(lines)}]"}.get(kind)
        text = text or "text\n" + "\n".join(row["text"] for row in rows)
        file.write_text(text + "\n")
        with file.open("ab") as broken:
            broken.write(b"\xff\xfe")  # what reads it to its end says that it is no text
    assert _row(file, 0) == rows[0]
    assert _row(file, 3) == rows[3]


def test_a_preview_names_the_row_that_was_asked_for(running, tmp_path):
    ana = running.client("ana")
    file = tmp_path / "mixed.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"word {n}", "completion": f" other {n}"}) + "\n" for n in range(8)))
    shown = ana.request("GET", f"/v1/datasets/{ana.upload(file)['id']}/preview?row=6")
    assert "row 6" in shown["text"]
    assert "word" in shown["text"]
    assert shown["tokens"] > shown["learned"] > 0


CHILD = [sys.executable, "-m", "lorafusion_jax.serve.control.child_process"]


def test_a_child_has_limits_and_dies_with_its_parent(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "one"}\n')
    request = {"what": "count", "file": str(file), "most_bytes": 1 << 30, "limits": {"seconds": 7, "bytes": 256 << 20}}
    program = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen({CHILD!r}, stdin=subprocess.PIPE, text=True)\n"
        f"child.stdin.write({json.dumps(request)!r} + '\\n'); child.stdin.flush()\n"
        "print(child.pid, flush=True); time.sleep(100)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent:
        pid = int(parent.stdout.readline())
        assert json.loads(parent.stdout.readline())["rows"] == 1
        process = psutil.Process(pid)
        limits = {kind: process.rlimit(kind)[0] for kind in (psutil.RLIMIT_AS, psutil.RLIMIT_DATA, psutil.RLIMIT_CPU)}
        assert 256 << 20 < limits[psutil.RLIMIT_DATA] < 3 << 30
        assert limits[psutil.RLIMIT_AS] < 8 << 30
        assert limits[psutil.RLIMIT_CPU] < 60
        with open(f"/proc/{pid}/oom_score_adj") as score:
            assert score.read().strip() == "1000"
        parent.kill()
        parent.wait()
        wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_data_that_takes_too_much_memory_ends_its_request_alone(tmp_path):
    """The limit is small here; the next request has a new child."""
    wide, small = tmp_path / "wide.json", tmp_path / "small.jsonl"
    wide.write_text("[" + ",".join('{"text": {"a": [1, 2, 3]}}' for _ in range(250_000)) + "]")
    small.write_text('{"text": "one"}\n')
    asking = Child(memory_bytes=160 << 20)
    try:
        answers = [
            asking.submit("ana", "count", {"file": str(file), "most_bytes": 1 << 30}).result(120)
            for file in (wide, small)
        ]
    finally:
        asking.close()
    assert answers[0]["problems"][0]["code"] == "data.check"
    assert answers[1]["rows"] == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"lora": {"targets": ["q_proj"] * 500}},
        {"lora": {"targets": [f"layer{number}" for number in range(500)]}},
        {"lora": {"targets": ["q_proj"] * 9000}},
        {"lora": {"layers_to_transform": [0] * 2000}},
        {"data": {"format": "x" * 900_000}},
        {"data": {"columns": {str(number): "text" for number in range(5000)}}},
    ],
    ids=lambda changed: str(changed)[:24],
)
def test_the_server_takes_little_to_refuse_a_job(running, job, changed):
    """The largest lists and texts that a body may have."""
    for section, values in changed.items():
        job = job | {section: job[section] | values}
    began = time.process_time()
    assert refused(lambda: running.client("ana").submit(job)).status == 422
    assert time.process_time() - began < 2


def test_bodies_of_brackets_are_refused_before_they_are_parsed(running):
    headers = {"x_api_key": running.keys["ana"], "content_type": "application/json"}
    for body in (b"[]" * (1 << 19), b"[" + b"1," * 300_000 + b"1]", b"{}" * 20_000):
        began = time.process_time()
        status, answer = raw(running.url, "POST", "/v1/jobs", body, **headers)
        assert (status, json.loads(answer)["error"]["code"]) == (422, "api.values")
        assert time.process_time() - began < 0.5


def test_strangers_bodies_are_not_read(running, monkeypatch):
    """Connections that announce a body and hold it back get 401 at once; nothing of them stays in memory."""
    with ExitStack() as stack:
        for _ in range(40):
            client = stack.enter_context(socket.create_connection(address(running), 20))
            client.sendall(b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n{")
            assert client.recv(100).startswith(b"HTTP/1.1 401")
    monkeypatch.setattr(connections, "MOST_RESTS", 0)  # so many refused bodies are under way that no more is read
    with socket.create_connection(address(running), 20) as client:
        client.sendall(b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n{")
        answer = b""
        while part := client.recv(4096):
            answer += part
        assert answer.startswith(b"HTTP/1.1 401")
    connection = socket.create_connection(address(running), 20)
    connection.sendall(b"POST /v1/login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n{")
    assert connection.recv(100).startswith(b"HTTP/1.1 413")
    connection.close()


def test_bodies_have_one_budget_and_every_owner_a_share(running, monkeypatch):
    monkeypatch.setattr(app, "BODIES_OF_OWNER", 100_000)
    monkeypatch.setattr(app, "BODIES", 150_000)
    head = "POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {}\r\nContent-Length: 90000\r\n\r\n"
    with ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(address(running), 20)) for _ in range(2)]
        slow[0].sendall(head.format(running.keys["ana"]).encode() + b" " * 60_000)
        time.sleep(0.3)
        answers = [
            raw(running.url, "POST", "/v1/jobs", b" " * 50_000, x_api_key=running.keys[owner])[0]
            for owner in ("ana", "ben")
        ]
        assert answers == [429, 422]
        slow[1].sendall(head.format(running.keys["ben"]).encode() + b" " * 60_000)
        time.sleep(0.3)
        assert raw(running.url, "POST", "/v1/jobs", b" " * 50_000, x_api_key=running.keys["admin"])[0] == 429
        with socket.create_connection(address(running), 20) as client:  # refused before any byte of the body has come
            client.sendall(head.format(running.keys["ana"]).encode())
            assert client.recv(100).startswith(b"HTTP/1.1 429")
        answers = running.service.answers.statuses.total()
    time.sleep(0.3)  # the slow ones are gone, and their bytes with them
    assert running.service.answers.statuses.total() == answers  # nobody answers who has left
    assert raw(running.url, "POST", "/v1/jobs", b" " * 50_000, x_api_key=running.keys["ana"])[0] == 422


def test_health_and_keys_wait_for_no_thread(start_service, tmp_path, tiny_base, monkeypatch):
    """All threads of the server and the lock of its database are taken."""
    monkeypatch.setattr(database, "BUSY_S", 600)
    running = start_service(tmp_path / "home", tiny_base)
    threads = []
    running.db._writing.acquire()
    try:
        for _ in range(45):
            asked = (running.url, "POST", "/v1/jobs/x/cancel", b"")
            ask = threading.Thread(target=raw, args=asked, kwargs={"x_api_key": running.keys["ben"]})
            ask.start()
            threads.append(ask)
        time.sleep(1)
        assert raw(running.url, "GET", "/healthz")[0] == 200
        assert raw(running.url, "GET", "/readyz")[0] == 503
        assert raw(running.url, "GET", "/v1/jobs")[0] == 401
        assert raw(running.url, "POST", "/v1/jobs", b"{}", x_api_key="tml-lf_x")[0] == 401
        assert all(thread.is_alive() for thread in threads)  # all four were answered while these waited
    finally:
        running.db._writing.release()
        for thread in threads:
            thread.join()


def test_an_owner_who_reads_much_leaves_threads_to_others(running, monkeypatch):
    """Each of ana's reads waits until it is let go. Ben and a login are answered."""
    go, busy, page = threading.Event(), [], Jobs.page

    def slow(jobs, connection, *, owner, **more):
        if owner == "ana":
            busy.append(owner)
            go.wait(60)
        return page(jobs, connection, owner=owner, **more)

    monkeypatch.setattr(Jobs, "page", slow)
    asked = [
        threading.Thread(target=raw, args=(running.url, "GET", "/v1/jobs"), kwargs={"x_api_key": running.keys["ana"]})
        for _ in range(60)
    ]
    try:
        for thread in asked:
            thread.start()
        while len(busy) < access.THREADS:
            time.sleep(0.01)
        assert running.client("ben").request("GET", "/v1/jobs?limit=1")["items"] == []
        assert raw(running.url, "POST", "/v1/login", b'{"key": "no"}', content_type="application/json")[0] == 401
        assert len(busy) == access.THREADS
    finally:
        go.set()
        for thread in asked:
            thread.join()
    assert len(busy) == len(asked)
    assert not running.service.turns._of_owners


def test_writers_in_a_line_are_busy_together(tmp_path, monkeypatch):
    """Another process holds the database: each is told after its own wait, not after those before it."""
    monkeypatch.setattr(database, "BUSY_S", 0.5)
    db = database.Database(tmp_path / "service.db")
    lock = subprocess.Popen(
        [sys.executable, "-c", "import sqlite3, sys, time\n"
         "c = sqlite3.connect(sys.argv[1], isolation_level=None); c.execute('BEGIN IMMEDIATE')\n"
         "print('held', flush=True); time.sleep(60)", str(tmp_path / "service.db")],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert lock.stdout is not None
    lock.stdout.readline()
    waits, codes = [], []

    def write() -> None:
        began = time.monotonic()
        try:
            with db.write():
                pass
        except database.StoreError as problem:
            codes.append(problem.code)
        waits.append(time.monotonic() - began)

    writers = [threading.Thread(target=write) for _ in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    lock.send_signal(signal.SIGKILL)
    lock.wait()
    lock.stdout.close()
    assert codes == ["store.busy"] * 8
    assert max(waits) < 0.5 * 4  # eight in turn would take 4 s
    with db.write():
        pass
    db.close()


def test_a_watched_thread_goes_on_after_an_error():
    ended, calls = threading.Event(), []

    def work() -> None:
        calls.append(len(calls))
        if len(calls) < 3:
            raise RuntimeError("can't start new thread")
        ended.set()

    start_watched("test", work, ended).join(10)
    assert calls == [0, 1, 2]


def test_the_hub_goes_on_when_descriptors_and_threads_are_exhausted(tmp_path, monkeypatch):
    hub = Hub(tmp_path / "sock", lambda hello: 0, lambda connection, event: None)
    accept, failures = hub._listener.accept, [OSError(24, "Too many open files")] * 3

    class Listener:
        def __getattr__(self, name):
            return getattr(listener, name)

        def accept(self):
            if failures:
                raise failures.pop()
            return accept()

    listener, hub._listener = hub._listener, Listener()  # pyright: ignore[reportAttributeAccessIssue]
    start, refusals = threading.Thread.start, [1, 1]

    def start_or_refuse(thread):
        if thread.name == "worker" and refusals:
            refusals.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_refuse)
    hub.start()
    link = Link(hub.address, "g0", 1, 0.2, list)
    wait_for(lambda: "g0" in hub.connections)
    assert not failures
    assert not refusals
    link.close(0)
    hub.close()


def test_strangers_at_the_port_of_the_workers_hold_few_threads_and_no_worker(tmp_path, monkeypatch):
    """They drip a long hello. A worker is greeted meanwhile, and they end after the time of a whole hello."""
    monkeypatch.setattr(hub_module, "MOST_GREETING", 5)
    monkeypatch.setattr(hub_module, "HELLO_S", 1.0)
    hub = Hub(tmp_path / "sock", lambda hello: 0, lambda connection, event: None, tcp=("127.0.0.1", 0))
    hub.start()
    host, port = hub.address.removeprefix("tcp:").split(":")
    before = threading.active_count()
    with ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection((host, int(port)), 20)) for _ in range(40)]
        for stranger in strangers:
            with suppress(OSError):  # closed by now
                stranger.sendall(b"\0\1\0\0{")
        link = Link(hub.address, "g0", 1, 0.2, list, hub.secret)
        until = time.monotonic() + PATIENCE_S
        while "g0" not in hub.connections or threading.active_count() > before + 5:
            assert time.monotonic() < until
            for stranger in strangers:
                with suppress(OSError):
                    stranger.sendall(b" ")
            time.sleep(0.05)
        link.close(0)
    hub.close()


def test_idle_connections_leave_room_for_others(tmp_path, tiny_base, monkeypatch):
    monkeypatch.setattr(connections, "MOST", 40)
    running, end = local_service.start_service(tmp_path / "home", tiny_base)
    with ExitStack() as stack:
        stack.callback(end)
        used = http.client.HTTPConnection(*address(running), timeout=20)
        for number in range(100):
            client = stack.enter_context(socket.create_connection(address(running), 20))
            client.sendall(b"GET /v1/me HT")
            if number % 20 == 0:
                used.request("GET", "/v1/me", headers={"X-API-Key": running.keys["ana"]})
                answer = used.getresponse()
                assert (answer.status, json.loads(answer.read())["owner"]) == (200, "ana")
        used.close()


def test_a_connection_whose_request_has_arrived_is_not_the_idle_one_that_is_closed():
    """A server that lags behind many new connections has not read it yet."""

    class Transport:
        def __init__(self, server_end):
            self.server_end, self.is_closed = server_end, False

        def get_extra_info(self, name):
            return self.server_end

        def close(self):
            self.is_closed = True

    pairs, made = [socket.socketpair() for _ in range(3)], []
    for since, (server_end, _) in enumerate(pairs):
        protocol = connections.PatientProtocol.__new__(connections.PatientProtocol)
        protocol._since, protocol.cycle, protocol.transport = since, None, Transport(server_end)
        made.append(protocol)
    for protocol in made:
        protocol.connections = set(made)
    pairs[0][1].sendall(b"GET /v1/me HTTP/1.1")
    made[-1]._close_idlest()
    assert [protocol.transport.is_closed for protocol in made] == [False, True, False]
    for end in (end for pair in pairs for end in pair):
        end.close()


def test_files_are_kept_for_the_service_itself(monkeypatch):
    monkeypatch.setattr(connections.resource, "getrlimit", lambda kind: (1024, 1024))
    assert connections.most_connections() == 768


def test_answers_for_repeated_requests_are_limited_by_owner_and_found_by_index(running, job, monkeypatch):
    monkeypatch.setattr(access, "MOST_REPEATABLE", 3)
    headers = {"x_api_key": running.keys["ana"]}
    made = running.client("ana").submit(job)
    raw(
        running.url, "POST", f"/v1/jobs/{made.id}/cancel", b"", x_api_key=running.keys["admin"], idempotency_key="other"
    )
    for number in range(8):
        assert (
            raw(running.url, "POST", f"/v1/jobs/{made.id}/cancel", b"", idempotency_key=str(number), **headers)[0]
            == 202
        )
    with running.db.read() as connection:
        rows = connection.execute(select(t.idempotency.c.key).where(t.idempotency.c.owner == "ana")).scalars().all()
        others = connection.execute(select(t.idempotency.c.key).where(t.idempotency.c.owner == "root")).scalars().all()
        plan = connection.exec_driver_sql("EXPLAIN QUERY PLAN DELETE FROM idempotency WHERE at < 5").all()
    assert sorted(rows) == ["5", "6", "7"]
    assert others == ["other"]
    assert "USING INDEX" in str(plan) or "USING COVERING INDEX" in str(plan)


def test_a_page_of_many_jobs_takes_little(start_service, tmp_path, tiny_base):
    """200 of 2 000 jobs here; `campaigns.strangers` has 10 000."""
    running = start_service(tmp_path / "home", tiny_base)
    jobs = Jobs(running.db)
    spec = JobSpec.model_validate({"name": "law", "base": "gone", "data": {"train": "sha256-" + "0" * 64}, "lora": {}})
    with running.db.write() as connection:
        made = jobs.submit(connection, "ana", spec.model_dump(mode="json"))
        row = jobs.get(connection, made["id"]) | {"state": "cancelled", "lengths": [100] * 256}
        rows = [row | {"id": f"job-{number:012x}", "created": float(number)} for number in range(2000)]
        connection.execute(t.jobs.insert(), rows)
    ana = running.client("ana")
    ana.request("GET", "/v1/jobs?limit=200")
    took = []
    for _ in range(3):
        began = time.process_time()
        assert len(ana.request("GET", "/v1/jobs?limit=200")["items"]) == 200
        took.append(time.process_time() - began)
    assert min(took) < 0.2
