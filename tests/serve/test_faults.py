"""Faults of the service, each with what must hold; workers are simulated, see `test_acceptance` for real ones."""

from __future__ import annotations

import errno
import math
import os
import shutil
import socket
import sqlite3
import threading
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from simulated_service import Service, wait_for
from simulated_worker import SimulatedLauncher, SimulatedProcess
from sqlalchemy import event, select
from sqlalchemy.exc import DatabaseError, OperationalError

from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.serve.client import ServiceError
from lorafusion_jax.serve.control import session
from lorafusion_jax.serve.store import database
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.database import Database, StoreError
from lorafusion_jax.serve.wire import connect
from scheduling.online.policies.baselines import Packing


@pytest.fixture
def serve(tmp_path, tiny_base):
    made: list[Service] = []

    def start(policy: object = Packing, **options) -> Service:
        made.append(Service(tmp_path / f"home-{len(made)}", tiny_base, policy, **options))
        return made[-1]

    yield start
    for service in made:
        service.close()


def first_process():
    return next(iter(SimulatedLauncher.made.values()))[0]


def test_a_frozen_worker_is_replaced(serve, monkeypatch):
    """SIGSTOP: no sign for a lease; it is ended, and its job goes on in another worker. See also `test_fences`."""
    monkeypatch.setattr(SimulatedProcess, "most_steps", 3)  # it is frozen before it ends, however late
    service = serve(lease_s=2.0)
    job = service.submit("one", "red")
    wait_for(lambda: service.show(job)["step"] == 3)
    frozen = first_process()
    frozen.freeze()
    monkeypatch.setattr(SimulatedProcess, "most_steps", math.inf)
    wait_for(lambda: len(service.placed(job)) >= 2 and service.show(job)["state"] in ("running", "done"))
    service.wait(job)
    assert frozen.ended.is_set()
    assert service.show(job)["tries"] >= 1


@pytest.mark.parametrize("frozen", [True, False])
def test_a_worker_that_hangs_does_not_outlive_a_server_that_ends(tmp_path, tiny_base, monkeypatch, frozen):
    """Neither worker ends when it is asked to. One still saves and gives signs of it."""
    monkeypatch.setattr(SimulatedProcess, "terminate", lambda process: None)
    monkeypatch.setattr("lorafusion_jax.serve.control.controller.CLOSE_S", 2.0)
    service = Service(tmp_path / "home", tiny_base, None, lease_s=3.0)
    job = service.submit("one", "red", steps=10_000)
    wait_for(lambda: service.show(job)["step"] >= 1)
    process = first_process()
    if frozen:
        process.freeze()
    service.close()
    assert process.ended.is_set() == frozen
    process.kill()


class Network:
    """What is between a worker and the server. While it is cut nothing arrives, and no side learns that."""

    def __init__(self, server: str):
        self.is_whole, self._server = threading.Event(), server
        self.is_whole.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp:127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                worker, _ = self._listener.accept()
                self.is_whole.wait()
                ends = worker, connect(self._server)
                for pair in (ends, ends[::-1]):
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with source, target, suppress(OSError):
            part = b" "
            while part:
                part = source.recv(1 << 16)
                self.is_whole.wait()
                target.sendall(part)
            target.shutdown(socket.SHUT_RDWR)


def test_a_cut_network_leaves_one_writer(serve, monkeypatch):
    """A worker that nobody reaches trains on: its job goes on in another one, and it is told to end when it is back."""
    networks: list[Network] = []
    start = SimulatedLauncher.start

    def start_behind(self, arguments, log):
        networks.append(Network(arguments["server"]))
        return start(self, arguments | {"server": networks[-1].address}, log)

    monkeypatch.setattr(SimulatedLauncher, "start", start_behind)
    monkeypatch.setattr(SimulatedProcess, "kill", lambda self: None)
    monkeypatch.setattr(SimulatedProcess, "most_steps", 3)  # it is cut off before it ends, however late
    service = serve(lease_s=1.0, gpus=1, workers_at=("127.0.0.1", 0))
    job = service.submit("one", "red", steps=120)
    wait_for(lambda: service.show(job)["step"] == 3)
    networks[0].is_whole.clear()
    monkeypatch.setattr(SimulatedProcess, "most_steps", math.inf)
    lost = first_process()
    service.wait(job, service.submit("two", "red", steps=5))
    assert [placement["epoch"] for placement in service.placed(job)] == [1, 2]
    assert lost.link.untaken > 0
    assert not lost.link.refused
    done = service.show(job)
    networks[0].is_whole.set()
    wait_for(lambda: lost.link.refused)
    service.wait(job)
    assert service.show(job) == done
    lost.crash()


def test_a_poison_job_fails_alone(serve):
    """It ends its worker whenever it starts."""
    service = serve(places={4: 1})
    good = service.submit("good", "blue", steps=40)
    bad = service.submit("bad", "red", steps=40)
    SimulatedLauncher.poison = bad
    try:
        wait_for(lambda: service.show(bad)["state"] == "failed")
    finally:
        SimulatedLauncher.poison = ""
    assert "worker was lost 4 times" in service.show(bad)["reason"]
    service.wait(good)


def test_a_poison_job_takes_no_company_with_it(serve):
    """All share one worker. From the second loss on each is tried alone until it has made progress."""
    service = serve(gpus=1, places={4: 4})
    good = [service.submit(f"good-{number}", "blue", steps=60) for number in range(2)]
    wait_for(lambda: all(service.show(job)["state"] == "running" for job in good))
    bad = SimulatedLauncher.poison = service.submit("bad", "blue", steps=60)
    for process in (process for made in SimulatedLauncher.made.values() for process in made):
        process._poison = bad
    try:
        wait_for(lambda: service.show(bad)["state"] == "failed")
    finally:
        SimulatedLauncher.poison = ""
    service.wait(*good)
    assert all(service.show(job)["tries"] <= 2 for job in good)
    assert service.show(bad)["tries"] == 4


@pytest.fixture
def slow_writes():
    SimulatedProcess.writes.clear()
    yield SimulatedProcess.writes
    SimulatedProcess.writes.set()


@pytest.mark.parametrize("lost", [False, True], ids=["written", "killed before"])
def test_the_next_job_trains_while_an_adapter_is_written(serve, slow_writes, lost):
    """Its place is free once it is read. A worker that is killed before it is written costs steps, and no job."""
    service = serve(None, gpus=1, places={4: 1})
    first, second = (service.submit(name, "red", steps=60) for name in ("one", "two"))
    wait_for(lambda: service.show(second)["step"] >= 3)
    shown = service.show(first)
    assert (shown["state"], shown["step"], shown["place"]) == ("running", 60, None)
    with service.db.read() as connection:
        assert connection.execute(select(t.artifacts)).all() == []
    if lost:
        first_process().crash()
    slow_writes.set()
    service.wait(first, second)
    with service.db.read() as connection:
        artifacts = connection.execute(select(t.artifacts.c.job, t.artifacts.c.path)).all()
    assert sorted(job for job, _ in artifacts) == sorted([first, second])
    assert all(Path(path).name == f"step-60-e{1 + lost}" for _, path in artifacts)
    assert [placement["epoch"] for placement in service.placed(first)] == list(range(1, 2 + lost))


def test_a_job_that_is_being_written_is_done_whatever_is_asked_of_it(serve, slow_writes):
    service = serve(None, gpus=1, places={4: 1})
    jobs = [service.submit(str(number), "red", steps=5) for number in range(2)]
    wait_for(lambda: [service.show(job)["step"] for job in jobs] == [5, 5])
    for job, asked in zip(jobs, ("pause", "cancel"), strict=True):
        with service.db.write() as connection:
            service.jobs.ask(connection, job, asked, actor="ana")
    slow_writes.set()
    service.wait(*jobs)


def test_a_service_with_fewer_bases_runs_what_it_can(serve):
    """Jobs of a base that is not served now wait for it; they hold up no others."""
    service = serve()
    with service.db.write() as connection:
        spec = {"name": "law", "base": "green", "data": {"train": "-"}, "lora": {}, "batch": {"global_samples": 4}}
        rows = [service.jobs.submit(connection, "ana", spec)["id"] for _ in range(2)]
        service.jobs.change(connection, rows[1], "accept", actor="test", rank=4, steps=9, lengths=[9])
    service.wait(service.submit("one", "red"))
    assert [service.show(job)["state"] for job in rows] == ["checking", "queued"]


def test_a_cluster_that_is_gone_leaves_jobs_in_the_queue(serve, monkeypatch):
    """Its head cannot be reached: nothing starts, and nothing can be said of workers. Jobs are accepted and wait."""
    monkeypatch.setattr(session, "MOST_BACKOFF_S", 0.3)
    service, gone = serve(), threading.Event()

    def away(*_):
        if gone.is_set():
            raise ConnectionError("the head of the cluster does not answer")

    start, has_ended, starts = SimulatedLauncher.start, SimulatedProcess.has_ended, []

    def start_later(self, *given):
        starts.append(time.monotonic())
        away()
        return start(self, *given)

    monkeypatch.setattr(SimulatedLauncher, "start", start_later)
    monkeypatch.setattr(SimulatedProcess, "has_ended", lambda self: bool(away() or has_ended(self)))
    monkeypatch.setattr(SimulatedProcess, "most_steps", 3)  # it runs when the cluster goes, however late
    running = service.submit("one", "red")
    wait_for(lambda: service.show(running)["step"] == 3)
    gone.set()
    waiting, tried = service.submit("two", "blue", steps=5), len(starts)
    monkeypatch.setattr(SimulatedProcess, "most_steps", math.inf)
    wait_for(lambda: service.show(running)["step"] > 20)  # what runs goes on
    wait_for(lambda: len(starts) > tried + 2)
    assert all(later - sooner > 0.25 for sooner, later in pairwise(starts[tried:]))  # not in every round
    assert service.show(waiting)["state"] == "queued"
    gone.clear()
    service.wait(running, waiting)
    assert service.show(running)["tries"] == 0


def test_a_cluster_without_its_head_is_tried_again_once_it_is_back(serve, monkeypatch):
    """Workers are lost with it. Jobs are accepted and wait; what is away, and since when, is among the decisions."""
    monkeypatch.setattr(session, "MOST_BACKOFF_S", 0.1)
    service, starts, rounds = serve(), [], []
    start, decide = SimulatedLauncher.start, service.scheduler.decide

    def start_if_there(self, *given):
        starts.append(len(rounds))
        if SimulatedLauncher.problem:
            raise ConnectionError(SimulatedLauncher.problem)
        return start(self, *given)

    monkeypatch.setattr(SimulatedProcess, "most_steps", 3)
    running = service.submit("one", "red")
    wait_for(lambda: service.show(running)["step"] == 3)
    monkeypatch.setattr(SimulatedLauncher, "start", start_if_there)
    monkeypatch.setattr(service.scheduler, "decide", lambda *given: (rounds.append(None), decide(*given))[1])
    monkeypatch.setattr(SimulatedLauncher, "problem", "its head is gone.")
    first_process().crash()
    wait_for(lambda: service.show(running)["state"] == "queued")
    assert service.controller.problem == "its head is gone."
    before = len(rounds)
    wait_for(lambda: len(rounds) > before + 15)
    assert len(starts) == 1
    monkeypatch.setattr(SimulatedProcess, "most_steps", math.inf)
    monkeypatch.setattr(SimulatedLauncher, "problem", "")
    service.wait(running)
    assert service.show(running)["tries"] == 1
    texts = [row["text"] for row in service.decisions()]
    assert texts.index("jobs wait: its head is gone.") < texts.index("the cluster is back")


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
def test_steps_of_the_clock_move_no_lease(serve, monkeypatch, step_s):
    service = serve(lease_s=20.0)
    job = service.submit("one", "red", steps=80)
    wait_for(lambda: service.show(job)["step"] >= 3)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + step_s)
    service.wait(job)
    assert service.show(job)["tries"] == 0
    assert sum(map(len, SimulatedLauncher.made.values())) == 1


def test_a_locked_database_is_busy_for_a_while(tmp_path, monkeypatch):
    """Another process holds the write lock: nothing is half written, and later it works."""
    monkeypatch.setattr(database, "BUSY_S", 0.2)
    db = Database(tmp_path / "service.db")
    holder = sqlite3.connect(tmp_path / "service.db", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError) as problem, db.write() as connection:
        db.add_event(connection, "lost", "ana", None, {})
    assert problem.value.code == "store.busy"
    holder.execute("ROLLBACK")
    with db.write() as connection:
        db.add_event(connection, "kept", "ana", None, {})
    with db.read() as connection:
        assert connection.execute(select(t.events.c.kind)).scalars().all() == ["kept"]
    db.close()


def test_a_database_opens_while_another_process_writes(tmp_path, monkeypatch):
    """Nothing is written into one of this version; one that has to be migrated is busy, not damaged."""
    monkeypatch.setattr(database, "BUSY_S", 0.2)
    make_version(tmp_path / "old.db", 2)
    Database(tmp_path / "new.db").close()
    holders = [sqlite3.connect(tmp_path / name, isolation_level=None) for name in ("old.db", "new.db")]
    for holder in holders:
        holder.execute("BEGIN IMMEDIATE")
        holder.execute("UPDATE version SET number = number")
    Database(tmp_path / "new.db").close()
    with pytest.raises(StoreError) as problem:
        Database(tmp_path / "old.db")
    assert problem.value.code == "store.busy"
    for holder in holders:
        holder.close()
    Database(tmp_path / "old.db").close()


def test_a_lost_log_of_the_database_loses_its_last_changes_only(tmp_path):
    """The file beside it is gone, or was cut: what was written into the database itself is there, whole."""
    for cut in (0, 5000):
        file = tmp_path / f"{cut}.db"
        db = Database(file)
        with db.write() as connection:
            db.add_event(connection, "before", "ana", None, {})
        with db._engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        with db.write() as connection:
            db.add_event(connection, "after", "ana", None, {"text": "x" * 20_000})
        log = file.with_name(file.name + "-wal").read_bytes()
        copy = tmp_path / f"copy-{cut}.db"
        copy.write_bytes(file.read_bytes())
        copy.with_name(copy.name + "-wal").write_bytes(log[:cut])
        db.close()
        again = Database(copy)
        with again.write() as connection:
            assert connection.execute(select(t.events.c.kind)).scalars().all() == ["before"]
        again.close()


def test_a_service_goes_on_after_its_database_was_locked(serve, monkeypatch):
    monkeypatch.setattr(database, "BUSY_S", 0.2)
    service = serve()
    job = service.submit("one", "red", steps=60)
    wait_for(lambda: service.show(job)["step"] >= 3)
    holder = sqlite3.connect(service.settings.database, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    time.sleep(1.0)
    holder.execute("ROLLBACK")
    holder.close()
    service.wait(job)


def make_version(file, version: int) -> None:
    """Makes a database of an earlier version: in version 2 a group did not say what it opened."""
    db = Database(file)
    with db.write() as connection:
        db.add_event(connection, "kept", "ana", None, {})
        connection.execute(t.groups.insert().values(id="g0", base="tiny", state="ready", places={"4": 1}))
        newer = [
            ("groups", "opens"),
            ("groups", "host"),
            ("artifacts", "url"),
            ("artifacts", "problem"),
            ("keys", "limits"),
            ("jobs", "eval_tokens"),
            ("api_samplers", "used"),
        ]
        for table, column in newer:
            connection.exec_driver_sql(f"ALTER TABLE {table} DROP COLUMN {column}")
        connection.exec_driver_sql(f"UPDATE version SET number = {version}")
    db.close()


def test_an_older_database_is_migrated(tmp_path):
    make_version(tmp_path / "service.db", 2)
    for _ in range(2):
        db = Database(tmp_path / "service.db")
        with db.read() as connection:
            assert connection.exec_driver_sql("SELECT number FROM version").scalar() == t.VERSION
            assert connection.execute(select(t.groups.c.opens)).scalars().all() == [""]
            assert connection.execute(select(t.events.c.kind)).scalars().all() == ["kept"]
        db.close()


@pytest.mark.parametrize("version", [1, t.VERSION + 1])
def test_a_database_of_an_unknown_version_is_refused_and_left_alone(tmp_path, version):
    make_version(tmp_path / "service.db", version)
    for _ in range(2):
        with pytest.raises(LoraFusionError, match=f"(?s)has version {version}.*start the version") as problem:
            Database(tmp_path / "service.db")
        assert problem.value.code == "store.version"


def test_a_page_that_is_damaged_while_it_serves_is_named(tmp_path):
    db = Database(tmp_path / "service.db")
    with pytest.raises(StoreError) as problem, db.read():
        raise DatabaseError("SELECT 1", {}, sqlite3.DatabaseError("database disk image is malformed"))
    assert problem.value.code == "store.damaged"
    db.close()


@pytest.mark.parametrize("what", ["attempt to write a readonly database", "unable to open database file"])
def test_a_home_that_cannot_be_written_is_not_damaged(tmp_path, what):
    (tmp_path / "folder.db").mkdir()
    with pytest.raises(StoreError) as opened:
        Database(tmp_path / "folder.db")
    db = Database(tmp_path / "service.db")
    with pytest.raises(StoreError) as used, db.write():
        raise OperationalError("UPDATE version", {}, sqlite3.OperationalError(what))
    assert {(problem.value.code, problem.value.fix) for problem in (opened, used)} == {
        ("store.not-writable", "make the folder of the home and the files in it writable for this user")
    }
    db.close()


@pytest.mark.parametrize("what", ["disk I/O error", "database or disk is full"])
def test_a_home_on_a_full_disk_is_not_damaged(tmp_path, monkeypatch, what):
    """Its fix was to replace the database by an older copy."""

    def fails(_):
        raise OperationalError("PRAGMA quick_check", {}, sqlite3.OperationalError(what))

    monkeypatch.setattr(Database, "_version", fails)
    with pytest.raises(StoreError) as opened:
        Database(tmp_path / "service.db")
    assert (opened.value.code, opened.value.where) == ("store.no-space", str(tmp_path / "service.db"))
    assert opened.value.fix.startswith("free some space")


@pytest.mark.parametrize("where", [0, 100, 4096])
def test_a_damaged_database_is_refused_with_its_fix(tmp_path, where):
    file = tmp_path / "service.db"
    db = Database(file)
    with db.write() as connection:
        for number in range(200):
            db.add_event(connection, "any", "ana", None, {"number": number})
    db.close()
    content = bytearray(file.read_bytes())
    content[where : where + 64] = os.urandom(64)
    file.write_bytes(content)
    with pytest.raises(LoraFusionError, match=r"store\.damaged"):
        Database(file).close()


def test_a_data_set_that_is_uploaded_while_it_is_deleted_is_there(running, tmp_path, monkeypatch):
    """Its row and its files change together."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "now here, now gone"}\n')
    client, remove = running.client("ana"), shutil.rmtree
    name = client.upload(file)["id"]
    uploads: list[threading.Thread] = []

    def slow(path, **options):
        if Path(path).name == name:  # the row is gone, the files are not
            uploads.append(threading.Thread(target=client.upload, args=(file,)))
            uploads[0].start()
            uploads[0].join(0.5)
        remove(path, **options)

    monkeypatch.setattr("lorafusion_jax.serve.api.datasets.shutil.rmtree", slow)
    client.request("DELETE", f"/v1/datasets/{name}")
    uploads[0].join()
    assert client.request("GET", f"/v1/datasets/{name}")["id"] == name
    assert (running.settings.datasets / name / "data.jsonl").exists()


def test_a_full_disk_refuses_uploads_and_leaves_nothing(running, tmp_path, monkeypatch):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "never seen before"}\n')

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("lorafusion_jax.serve.api.datasets.os.fsync", full)
    with pytest.raises(ServiceError) as problem:
        running.client("ana").upload(file)
    assert (problem.value.status, problem.value.problems[0]["code"]) == (507, "store.no-space")
    assert [path for path in running.settings.datasets.iterdir() if path.name.startswith(".upload")] == []
    monkeypatch.undo()
    assert running.client("ana").upload(file)["rows"] == 1


@pytest.mark.parametrize(
    ("refused", "taken", "answer"),
    [
        ("max_page_count = 1", "max_page_count = 1000000", (507, "store.no-space")),
        ("query_only = ON", "query_only = OFF", (503, "store.not-writable")),
    ],
    ids=["full", "read-only"],
)
def test_a_database_that_takes_nothing_leaves_nothing(running, job, monkeypatch, refused, taken, answer):
    """Its disk is full or read-only: a job is there or refused, and later it is accepted."""
    client, engine, pragma = running.client("ana"), running.db._engine, [refused]
    monkeypatch.setattr("lorafusion_jax.serve.client.TRIES", 1)

    def limit(connection, *_):
        connection.execute(f"PRAGMA {pragma[0]}")

    event.listen(engine, "checkout", limit)
    try:
        there, problem = [], None
        while problem is None:
            try:
                there.append(client.submit(job).id)
            except ServiceError as error:
                problem = error
        assert (problem.status, problem.problems[0]["code"]) == answer
        listed = {row["id"] for row in client.request("GET", "/v1/jobs?limit=200")["items"]}
        assert listed >= set(there)
        pragma[0] = taken
        assert client.submit(job).id not in listed
        assert len(client.request("GET", "/v1/jobs?limit=200")["items"]) == len(listed) + 1
    finally:
        pragma[0] = taken
        with running.db.read():
            event.remove(engine, "checkout", limit)
