"""A home of the version before, with jobs in every state, comes up and goes on; copies of a home are whole."""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
import time

import pytest
from simulated_service import ID, Service, wait_for
from sqlalchemy import select

from lorafusion_jax.cli.main import run
from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.serve.server import open_database
from lorafusion_jax.serve.settings import Settings
from lorafusion_jax.serve.states import STATES
from lorafusion_jax.serve.store import database
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.database import Database
from lorafusion_jax.serve.store.jobs import Jobs
from scheduling.online.policies.baselines import Packing

NEW_COLUMNS = {
    "groups": ("opens", "host"),
    "artifacts": ("url", "problem"),
    "keys": ("limits",),
    "jobs": ("eval_tokens",),
    "api_samplers": ("used",),
}  # that version 2 did not have
PLACED = ("accept", "place", "started")
EVENTS = {
    "checking": (), "queued": ("accept",), "starting": PLACED[:2], "running": PLACED, "draining": (*PLACED, "drain"),
    "paused": ("accept", "pause"), "done": (*PLACED, "finished"), "failed": (*PLACED, "failed"),
    "cancelled": ("cancel",), "rejected": ("reject",), "deleted": ("cancel", "delete"),
}  # fmt: skip
VALUES = {"accept": {"rank": 3, "steps": 12, "lengths": [30, 50], "tokens": 900}, "drain": {"after_drain": "pause"}}
COMES_TO = {"checking": "rejected", "draining": "paused", **dict.fromkeys(("queued", "starting", "running"), "done")}


def write_home(home, base) -> dict[str, str]:
    """Writes a home as version 2 did: state → its job."""
    db = open_database(Settings(home=home, bases={"red": base}, places={4: 2}))
    jobs, made = Jobs(db), {}
    with db.write() as connection:
        group = {"id": "old:1", "base": "red", "pid": 2**22 + 1, "epoch": 5, "state": "ready", "places": {"4": 3}}
        connection.execute(t.groups.insert().values(group | {"gpus": [0], "mesh": {}, "capacity": 512}))
        connection.execute(t.epochs.insert().values(group="old:1", last=5))
        for place, (state, events) in enumerate(EVENTS.items()):
            spec = {
                "name": state, "base": "red", "data": {"train": ID}, "lora": {"rank": 3}, "optim": {},
                "objective": {}, "batch": {"global_samples": 4}, "steps": 12, "epochs": 1, "seed": 0, "weight": 1.0,
            }  # fmt: skip
            job = made[state] = jobs.submit(connection, "ana", spec)["id"]
            for event in events:
                if event == "place":
                    jobs.place(connection, job, group="old:1", place=place)
                    continue
                more = {
                    "accept": {"rank": 3, "steps": 12, "lengths": [30, 50], "tokens": 900},
                    "drain": {"after_drain": "pause"},
                }
                jobs.change(connection, job, event, actor="test", **more.get(event, {}))
        for table, columns in NEW_COLUMNS.items():
            for column in columns:
                connection.exec_driver_sql(f"ALTER TABLE {table} DROP COLUMN {column}")
        connection.exec_driver_sql("UPDATE version SET number = 2")
    db.close()
    return made


def test_a_home_of_the_version_before_goes_on(tmp_path, tiny_base):
    jobs = write_home(tmp_path / "home", tiny_base)
    assert jobs.keys() == set(STATES)
    service = Service(tmp_path / "home", tiny_base, Packing)
    try:
        wanted = {state: COMES_TO.get(state, state) for state in jobs}
        wait_for(lambda: {state: service.show(job)["state"] for state, job in jobs.items()} == wanted)
        for state, name in COMES_TO.items():
            shown = service.show(jobs[state])
            assert name != "done" or shown["step"] == shown["steps"] == 12
        with service.db.read() as connection:
            assert connection.exec_driver_sql("SELECT number FROM version").scalar() == t.VERSION
            epoch = connection.scalar(select(t.epochs.c.last).where(t.epochs.c.group == "old:1"))
            assert (epoch or 0) > 5  # its session goes on with another worker
            kept = service.jobs.transitions(connection, jobs["running"])
        assert [row["event"] for row in kept[:4]] == ["submit", "accept", "place", "started"]
    finally:
        service.close()


def test_a_copy_is_whole_while_others_write(tmp_path, capsys):
    home, copy = tmp_path / "home", tmp_path / "backups" / "service.db"
    db = open_database(Settings(home=home, bases={}, places={}))
    ended = threading.Event()

    def write() -> None:
        while not ended.is_set():
            with db.write() as connection:  # two rows at once, or none
                db.add_event(connection, "one", "ana", None, {})
                db.add_event(connection, "two", "ana", None, {})

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(3):
            time.sleep(0.05)
            assert run(["backup", str(copy), "--home", str(home)]) == 0
            restored = Database(copy)
            with restored.read() as connection:
                kinds = connection.execute(select(t.events.c.kind)).scalars().all()
            restored.close()
            assert kinds.count("one") == kinds.count("two")
            assert copy.stat().st_mode & 0o077 == 0
    finally:
        ended.set()
        writer.join()
        db.close()
    assert "copied to" in capsys.readouterr().out


def test_a_copy_that_fails_leaves_the_older_one(tmp_path, capsys):
    home, copy = tmp_path / "home", tmp_path / "service.db"
    open_database(Settings(home=home, bases={}, places={})).close()
    assert run(["backup", str(copy), "--home", str(home)]) == 0
    before = copy.read_bytes()
    (tmp_path / ".service.db.part").mkdir()  # nothing can be written there
    (tmp_path / ".service.db.part" / "file").touch()
    assert run(["backup", str(copy), "--home", str(home)]) != 0
    assert copy.read_bytes() == before
    assert run(["backup", str(copy), "--home", str(tmp_path / "nowhere")]) == 2
    assert "keys.home" in capsys.readouterr().err
    with sqlite3.connect(copy) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


def test_a_damaged_database_is_replaced_by_the_copy_of_its_day(tmp_path, tiny_base, monkeypatch):
    """Jobs of the copy are there and continue; its fix names the copy, which is made once a day."""
    service = Service(tmp_path / "home", tiny_base, Packing)
    copy = service.db.daily_copy
    job = service.submit("one", "red", steps=20)
    monkeypatch.setattr(database, "LOOK_S", 0.0)
    wait_for(copy.exists)
    made = copy.stat().st_mtime_ns
    service.wait(job)
    assert copy.stat().st_mtime_ns == made
    os.utime(copy, (0, 0))
    wait_for(lambda: copy.stat().st_mtime_ns > made)
    os.utime(copy, ns=(made, made))
    service.close()
    service.db.file.write_bytes(b"no database" * 1000)
    with pytest.raises(LoraFusionError, match=r"store\.damaged") as problem:
        open_database(service.settings)
    assert copy.name in problem.value.fix
    for file in copy.parent.glob("service.db*"):
        file.unlink()
    shutil.copyfile(copy, service.db.file)
    again = Service(tmp_path / "home", tiny_base, Packing)
    try:
        again.wait(job)
    finally:
        again.close()
