"""Connections break and servers start again: no placement is lost, runs twice, or hands its place on too early."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from campaigns.service_process import PATIENCE_S, wait_for
from sqlalchemy import event as sql_event
from sqlalchemy import select

from lorafusion_jax.digests import write_digests
from lorafusion_jax.serve.control.controller import GROUP, Controller
from lorafusion_jax.serve.control.hub import Hub
from lorafusion_jax.serve.control.scheduler import OneSession
from lorafusion_jax.serve.control.session import Session
from lorafusion_jax.serve.control.worker_events import WorkerEvents
from lorafusion_jax.serve.server import open_database
from lorafusion_jax.serve.settings import Settings
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.database import StoreError
from lorafusion_jax.serve.store.jobs import Jobs
from lorafusion_jax.serve.worker.link import Link

EPOCH = 3


class Lives:
    """A worker of an earlier server, which does not end by itself."""

    def __init__(self):
        self.told: list[str] = []

    def has_ended(self):
        return "kill" in self.told or "terminate" in self.told

    def terminate(self):
        self.told.append("terminate")

    def wait(self, seconds):
        return True

    def kill(self):
        self.told.append("kill")


class Finds:
    """Finds that worker; another one cannot be started."""

    problem = ""

    def __init__(self, worker: Lives):
        self.worker = worker

    def find(self, group, epoch, pid):
        return None if self.worker.has_ended() else self.worker

    def hosts(self, gpus):
        return None

    def start(self, arguments, log):
        return Lives()

    def close(self): ...


class Bench:
    """A home that a server has left with a worker of group g0, and what starts the next server."""

    def __init__(self, home: Path, monkeypatch):
        self.settings = Settings(home=home, bases={"tiny": home}, places={4: 2})
        self.db, self.worker, self.ends = open_database(self.settings), Lives(), []
        self.jobs = Jobs(self.db)
        monkeypatch.setattr(Controller, "values", lambda self, job: {})
        with self.db.write() as connection:
            row = {"id": GROUP, "base": "tiny", "epoch": EPOCH, "state": "ready", "places": {"4": 2}}
            opens = self.session()._opens_digest()
            connection.execute(t.groups.insert().values(row | {"opens": opens}))

    def session(self) -> Session:
        (plan,) = OneSession(self.settings).decide([], {}).sessions.values()
        return Session(self.settings, self.db, self.jobs, None, GROUP, plan, dict, None)

    def serve(self, **options) -> Controller:
        controller = Controller(self.settings, self.db, launcher=Finds(self.worker), **options)
        self.ends.append(lambda: controller.close(stop_worker=False))
        return controller

    def connect(self, holds=list) -> Link:
        link = Link(f"unix:{self.settings.socket}", GROUP, EPOCH, 60.0, holds)
        self.ends.append(lambda: link.close(0.0))
        return link

    def job(self, state: str, *, place: int = 0, group: str = GROUP, priority: int = 0) -> str:
        with self.db.write() as connection:
            spec = {"name": "law", "base": "tiny", "data": {}, "priority": priority}
            job = self.jobs.submit(connection, "ana", spec)["id"]
            self.jobs.change(connection, job, "accept", actor="test", rank=4, steps=9)
            if state != "queued":
                self.jobs.place(connection, job, group=group, place=place)
            if state == "running":
                self.jobs.change(connection, job, "started", actor="test")
        return job

    def show(self, job: str) -> dict:
        with self.db.read() as connection:
            return self.jobs.get(connection, job)


@pytest.fixture
def bench(tmp_path, monkeypatch):
    made = Bench(tmp_path, monkeypatch)
    yield made
    for end in reversed(made.ends):
        end()
    made.db.close()


def adapter(folder: Path) -> str:
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    write_digests(folder)
    return str(folder)


def test_thousands_of_events_are_taken_at_once(tmp_path):
    """A worker that sends without reading and a server that answers each event would wait for each other."""
    link, taken = Link(f"unix:{tmp_path}/sock", "north", 1, 60.0, list), []
    for number in range(5000):
        link.emit("stepped", rows=[{"step": number, "loss": 1.0, "text": "x" * 200}])
    hub = Hub(tmp_path / "sock", lambda hello: 0, lambda connection, event: taken.append(event["number"]))
    hub.start()
    wait_for(lambda: not link.untaken)
    assert taken == list(range(1, 5001))
    link.close(0.0)
    hub.close()


def test_who_emits_does_not_wait_for_a_slow_server(tmp_path):
    """A database on a slow disk: the worker trains on."""
    link, go = Link(f"unix:{tmp_path}/sock", "north", 1, 60.0, list), threading.Event()
    hub = Hub(tmp_path / "sock", lambda hello: 0, lambda connection, event: go.wait(60))
    hub.start()
    for _ in range(200):
        link.emit("stepped", text="x" * 10_000)  # more than a socket takes
    assert link.untaken == 200
    go.set()
    wait_for(lambda: not link.untaken)
    link.close(0.0)
    hub.close()


def test_the_newer_of_two_connections_of_a_worker_counts(tmp_path):
    """The older one was given up, but its greeting took longer."""
    second, greeted = threading.Event(), []

    def admit(hello):
        greeted.append(hello)
        if len(greeted) == 1:
            second.wait(60)
        return 0

    hub = Hub(tmp_path / "sock", admit, lambda connection, event: None)
    hub.start()
    old = Link(hub.address, "north", 1, 60.0, list)
    wait_for(lambda: greeted)
    new = Link(hub.address, "north", 1, 60.0, lambda: [{"job": "newer", "epoch": 1}])
    wait_for(lambda: "north" in hub.connections)
    began, old._address = time.monotonic(), "unix:/nowhere"  # it does not come again
    second.set()
    wait_for(lambda: old._contact > began)  # its greeting was answered
    new.emit("idle")
    wait_for(lambda: not new.untaken)
    assert hub.connections["north"].holds == [{"job": "newer", "epoch": 1}]
    old.close(0.0)
    new.close(0.0)
    hub.close()


def test_a_worker_that_connects_while_a_server_starts_gets_jobs(bench, monkeypatch):
    """Its session has to be there before it is admitted; `ready` is said only once."""
    admitted = threading.Event()
    admit, decide = Controller._admit, OneSession.decide
    monkeypatch.setattr(Controller, "_admit", lambda self, hello: (admit(self, hello), admitted.set())[0])

    def slow(self, rows, ready, *limits):
        if not ready:  # at the start of the server
            admitted.wait(0.3)
        return decide(self, rows, ready, *limits)

    monkeypatch.setattr(OneSession, "decide", slow)
    job, link = bench.job("queued"), bench.connect()
    bench.serve().start()
    wait_for(lambda: bench.show(job)["state"] == "starting")
    assert link.commands.get(timeout=PATIENCE_S)["command"] == "start"


@pytest.mark.parametrize("state", ["running", "starting"])
def test_a_job_that_ended_while_the_server_was_away_has_ended(bench, monkeypatch, state):
    """The worker does not hold it any more, and the event that says why comes after its greeting."""
    job, rounds, go = bench.job(state), [], threading.Event()
    link = bench.connect()
    if state == "starting":
        link.emit("started", job=job, epoch=1, steps=9)
    link.emit("finished", job=job, epoch=1, step=9, path=adapter(bench.settings.job(job) / "adapter" / "step-9-e1"))
    take, send = Controller._take, Session.send
    monkeypatch.setattr(Controller, "_take", lambda self, *event: (go.wait(60), take(self, *event)))
    monkeypatch.setattr(Session, "send", lambda self: (rounds.append(self._seen), send(self)))
    bench.serve().start()
    wait_for(lambda: sum(seen is not None for seen in rounds) > 3)
    assert bench.show(job)["state"] == state  # neither lost nor started again
    go.set()
    wait_for(lambda: bench.show(job)["state"] == "done")
    assert (bench.show(job)["tries"], bench.show(job)["epoch"], link.commands.qsize()) == (0, 1, 0)


def test_a_place_is_free_once_its_job_has_left(bench):
    """Also if that was asked for by its user, and a job of higher priority waits."""
    leaving = bench.job("running", place=0)
    with bench.db.write() as connection:
        bench.jobs.ask(connection, leaving, "pause", actor="ana")
    stays = bench.job("running", place=1)
    held = [{"job": job, "epoch": 1} for job in (leaving, stays)]
    link = bench.connect(lambda: held)
    other = bench.job("queued", priority=9)
    bench.serve().start()
    assert link.commands.get(timeout=PATIENCE_S)["command"] == "stop"
    assert bench.show(other)["place"] is None
    link.emit("stopped", job=leaving, epoch=1, step=0, path=None)
    wait_for(lambda: bench.show(other)["place"] == 0)
    assert bench.show(leaving)["state"] == "paused"


def test_jobs_of_a_session_that_the_next_server_does_not_have_return_to_the_queue(bench):
    job = bench.job("running", group="west")
    with bench.db.write() as connection:
        row = {"id": "west", "base": "tiny", "epoch": 1, "state": "ready", "places": {"4": 1}}
        connection.execute(t.groups.insert().values(row))
    bench.serve()
    assert (bench.show(job)["state"], bench.show(job)["group"]) == ("queued", None)
    with bench.db.read() as connection:
        assert "west" not in connection.execute(select(t.groups.c.id)).scalars().all()
    assert bench.worker.told == ["kill"]


def test_a_worker_that_was_opened_with_other_settings_is_replaced(bench):
    job = bench.job("running")
    bench.settings = Settings(home=bench.settings.home, bases=bench.settings.bases, places={8: 1})
    bench.serve()
    assert (bench.worker.told, bench.show(job)["state"]) == (["kill"], "queued")


def test_a_session_is_removed_with_its_jobs_in_the_queue(bench):
    """Its worker is away just then, so the jobs cannot leave it."""
    job = bench.job("running")
    controller = bench.serve()
    controller._sessions[GROUP].remove()
    assert bench.show(job)["state"] == "queued"


def test_the_worker_of_an_earlier_server_ends_with_this_one(bench):
    controller = bench.serve()
    bench.ends.clear()
    controller.start()
    controller.close()
    assert bench.worker.told == ["terminate"]


def test_files_are_removed_after_what_makes_them_unneeded_is_on_the_disk(bench):
    """The transaction fails at its very end; a worker that is killed now leaves the job with its state."""
    job = bench.job("running")
    state = bench.settings.job(job) / "state" / "e1-s8"
    state.mkdir(parents=True)
    with bench.db.write() as connection:
        bench.jobs.restart(connection, job, step=8, path=str(state))
    link, fails = bench.connect(lambda: [{"job": job, "epoch": 1}]), [3]

    def fail(connection):
        if fails[0] and bench.settings.job(job).joinpath("adapter").exists():
            fails[0] -= 1
            assert state.exists()
            raise StoreError("store.no-space", "the disk is full.")

    bench.serve()
    sql_event.listen(bench.db._engine, "commit", fail)
    path = adapter(bench.settings.job(job) / "adapter" / "step-9-e1")
    link.emit("finished", job=job, epoch=1, step=9, path=path)
    wait_for(lambda: not fails[0])
    wait_for(lambda: bench.show(job)["state"] == "done" and not state.exists())


def test_an_event_that_cannot_be_taken_fails_its_job_and_holds_up_no_other(bench, monkeypatch):
    good, bad = bench.job("running", place=0), bench.job("running", place=1)
    holds = [{"job": job, "epoch": 1} for job in (good, bad)]
    link, take_rows = bench.connect(lambda: holds), WorkerEvents._take_rows

    def broken(self, connection, job, rows):
        if job["id"] == bad:
            raise ZeroDivisionError("a defect")
        take_rows(self, connection, job, rows)

    monkeypatch.setattr(WorkerEvents, "_take_rows", broken)
    bench.serve().start()
    for job in (bad, good):
        link.emit("stepped", job=job, epoch=1, rows=[{"kind": "step", "step": 1, "loss": 1.0}])
    wait_for(lambda: bench.show(good)["step"] == 1)
    assert bench.show(bad)["state"] == "failed"
    assert "a defect" in bench.show(bad)["reason"]
    wait_for(lambda: any((c["command"], c["job"]) == ("stop", bad) for c in list(link.commands.queue)))


def test_rows_after_the_state_from_which_a_job_goes_on_are_removed(bench):
    """They run again; until then the curve ends where the job is."""
    job = bench.job("running")
    link = bench.connect(lambda: [{"job": job, "epoch": 1}])
    bench.serve()
    rows = [{"kind": "step", "step": step, "loss": 1.0} for step in range(1, 7)]
    link.emit("stepped", job=job, epoch=1, rows=rows)
    link.emit("saved", job=job, epoch=1, step=4, path=str(bench.settings.job(job) / "state" / "e1-s4"))
    wait_for(lambda: not link.untaken)
    assert bench.show(job)["step"] == 6
    earlier = str(bench.settings.job(job) / "state" / "e1-s2")
    link.emit("damaged", job=job, epoch=1, step=2, path=earlier, reason="a byte differs")
    wait_for(lambda: not link.untaken)
    shown = bench.show(job)
    assert (shown["step"], shown["state_step"], shown["state_path"]) == (2, 2, f"jobs/{job}/state/e1-s2")
    with bench.db.read() as connection:
        assert [row["step"] for row in bench.jobs.metrics(connection, job, 0, 1)] == [1, 2]
