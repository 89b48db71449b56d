"""Messages of old workers and old placements change nothing; what is asked again is answered once."""

from __future__ import annotations

import threading

import pytest
from campaigns.service_process import wait_for
from sqlalchemy import select

from lorafusion_jax.digests import write_digests
from lorafusion_jax.serve.control.controller import GROUP, Controller
from lorafusion_jax.serve.control.hub import Hub
from lorafusion_jax.serve.server import open_database
from lorafusion_jax.serve.settings import Settings
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.jobs import Jobs
from lorafusion_jax.serve.wire import Wire
from lorafusion_jax.serve.worker.link import Link

EPOCH = 7


@pytest.fixture
def service(tmp_path):
    settings = Settings(home=tmp_path, bases={"tiny": tmp_path}, places={4: 2})
    db = open_database(settings)
    controller = Controller(settings, db, with_worker=False)
    with db.write() as connection:
        row = {"id": GROUP, "base": "tiny", "epoch": EPOCH, "state": "ready", "places": {"4": 2}}
        connection.execute(t.groups.insert().values(row))
    links: list[Link] = []

    def connect(epoch: int = EPOCH) -> Link:
        links.append(Link(f"unix:{settings.socket}", GROUP, epoch, 60.0, list))
        return links[-1]

    yield db, Jobs(db), controller, connect
    for link in links:
        link.close(0.0)
    controller.start()
    controller.close()
    db.close()


def running_job(db, jobs: Jobs) -> str:
    with db.write() as connection:
        job = jobs.submit(connection, "ana", {"name": "law", "base": "tiny", "data": {}})["id"]
        jobs.change(connection, job, "accept", actor="test", rank=4, steps=9)
        jobs.place(connection, job, group=GROUP, place=0)
        jobs.change(connection, job, "started", actor="test")
    return job


def state_of(db, jobs: Jobs, job: str) -> dict:
    with db.read() as connection:
        return jobs.get(connection, job)


def test_a_worker_of_an_earlier_epoch_is_told_to_end(service):
    db, jobs, controller, connect = service
    job = running_job(db, jobs)
    old = connect(EPOCH - 1)
    old.emit("finished", job=job, epoch=1, step=9, path="/nowhere")
    wait_for(lambda: old.refused)
    assert controller.refused_events == 1
    assert state_of(db, jobs, job)["state"] == "running"


def test_a_writer_of_an_earlier_placement_changes_nothing(service):
    db, jobs, controller, connect = service
    job = running_job(db, jobs)
    with db.write() as connection:
        jobs.lost(connection, job, why="slow")
        jobs.place(connection, job, group=GROUP, place=1)
    worker = connect()
    for kind, more in (
        ("saved", {"step": 5, "path": "/old"}),
        ("stopped", {"step": 5, "path": "/old"}),
        ("failed", {"step": 5, "reason": "old"}),
        ("finished", {"step": 5, "path": "/old"}),
        ("stepped", {"rows": [{"kind": "step", "step": 5, "loss": 1.0}]}),
    ):
        worker.emit(kind, job=job, epoch=1, **more)
    wait_for(lambda: controller.refused_events == 5)
    state = state_of(db, jobs, job)
    assert (state["state"], state["state_path"], state["step"]) == ("starting", None, 0)
    worker.emit("started", job=job, epoch=2, steps=9)
    wait_for(lambda: state_of(db, jobs, job)["state"] == "running")


def test_an_event_counts_once_whatever_the_connection_does(service):
    db, jobs, controller, connect = service
    job = running_job(db, jobs)
    worker = connect()
    wait_for(lambda: controller.connected)
    for step in range(1, 4):
        worker.emit("stepped", job=job, epoch=1, rows=[{"kind": "step", "step": step, "loss": float(step)}])
        controller._hub.drop(GROUP)  # the answer may be lost, so the event is sent again
    wait_for(lambda: state_of(db, jobs, job)["step"] == 3)
    wait_for(lambda: not worker.untaken)
    with db.read() as connection:
        kinds = connection.execute(select(t.events.c.kind).where(t.events.c.job == job)).scalars().all()
    assert kinds.count("step") == 3


def test_events_of_two_threads_arrive_in_the_order_of_their_numbers(service, monkeypatch):
    """The server takes an event of a lower number for one that it has, so an event that another overtakes is lost."""
    db, jobs, controller, connect = service
    job = running_job(db, jobs)
    worker = connect()
    wait_for(lambda: controller.connected and worker._wire is not None)
    second_emitted, send = threading.Event(), Wire.send

    def slow_first(wire, message):
        if message.get("number") == 1:
            second_emitted.wait(60)
        send(wire, message)

    monkeypatch.setattr(Wire, "send", slow_first)
    rows = {1: [{"kind": "step", "step": 1, "loss": 1.0}], 2: [{"kind": "step", "step": 2, "loss": 2.0}]}
    worker.emit("stepped", job=job, epoch=1, rows=rows[1])
    second = threading.Thread(target=lambda: worker.emit("stepped", job=job, epoch=1, rows=rows[2]))
    second.start()
    second.join()
    second_emitted.set()
    wait_for(lambda: state_of(db, jobs, job)["step"] == 2)
    with db.read() as connection:
        assert [row["step"] for row in jobs.metrics(connection, job, 0, 1)] == [1, 2]


def test_the_last_event_sent_again_counts_once(service):
    """The server took it, and the connection broke before the worker knew."""
    db, jobs, controller, connect = service
    job = running_job(db, jobs)
    worker = connect()
    wait_for(lambda: controller.connected)
    worker.emit("stepped", job=job, epoch=1, rows=[{"kind": "step", "step": 1, "loss": 1.0}])
    wait_for(lambda: not worker.untaken)
    again = {"number": 1, "event": "stepped", "job": job, "epoch": 1}
    worker._wire.send(again | {"rows": [{"kind": "step", "step": 1, "loss": 1.0}]})
    worker.emit("stepped", job=job, epoch=1, rows=[{"kind": "step", "step": 2, "loss": 2.0}])
    wait_for(lambda: state_of(db, jobs, job)["step"] == 2)
    with db.read() as connection:
        kinds = connection.execute(select(t.events.c.kind).where(t.events.c.job == job)).scalars().all()
    assert kinds.count("step") == 2


def test_a_worker_of_another_machine_needs_the_secret(tmp_path):
    """Over TCP anybody may connect; who does not know the secret is refused before anything is read of the message."""
    hub = Hub(tmp_path / "sock", lambda hello: 0, lambda connection, event: None, tcp=("127.0.0.1", 0))
    hub.start()
    stranger, friend = (Link(hub.address, "north", 1, 60.0, list, secret) for secret in ("guess", hub.secret))
    wait_for(lambda: stranger.refused and "north" in hub.connections)
    assert not friend.refused
    friend.close(0.0)
    hub.close()
    file = tmp_path / "workers.secret"
    assert (file.read_text(), file.stat().st_mode & 0o077) == (hub.secret, 0)
    port = int(hub.address.rpartition(":")[2])  # it is free again at once
    again = Hub(tmp_path / "sock", lambda hello: 0, lambda connection, event: None, tcp=("127.0.0.1", port))
    assert again.secret == hub.secret  # workers connect again after a restart
    again.close()


@pytest.mark.parametrize("what", ["missing", "damaged"])
def test_an_adapter_that_is_not_intact_fails_its_job(service, tmp_path, what):
    db, jobs, _, connect = service
    job, folder = running_job(db, jobs), tmp_path / "adapter"
    if what == "damaged":
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(b"good")
        write_digests(folder)
        (folder / "adapter_model.safetensors").write_bytes(b"evil")
    connect().emit("finished", job=job, epoch=1, step=9, path=str(folder))
    wait_for(lambda: state_of(db, jobs, job)["state"] == "failed")
    with db.read() as connection:
        assert connection.execute(select(t.artifacts)).first() is None


def test_an_older_state_takes_the_place_of_no_newer_one(service, tmp_path):
    db, jobs, controller, connect = service
    job = running_job(db, jobs)
    worker = connect()
    for step in (5, 3):
        worker.emit("saved", job=job, epoch=1, step=step, path=str(tmp_path / f"e1-s{step}"))
    worker.emit("stepped", job=job, epoch=1, rows=[{"kind": "step", "step": 6, "loss": 1.0}])
    wait_for(lambda: state_of(db, jobs, job)["step"] == 6)
    assert (state_of(db, jobs, job)["state_step"], controller.refused_events) == (5, 0)
