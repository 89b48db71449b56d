"""A home under any name keeps what is in it: moved, linked, restored, with an older database or without one."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from local_service import start_service
from simulated_service import Service, wait_for
from simulated_worker import SimulatedProcess
from sqlalchemy import select
from test_api import raw

from lorafusion_jax.cli.main import run
from lorafusion_jax.digests import digest_of, write_digests
from lorafusion_jax.errors import ConfigError, RunError
from lorafusion_jax.serve import server
from lorafusion_jax.serve.client import ServiceError
from lorafusion_jax.serve.control import launch
from lorafusion_jax.serve.control.ray_launcher import RayLauncher
from lorafusion_jax.serve.control.sweep import DAY_S, Sweeper
from lorafusion_jax.serve.server import open_database
from lorafusion_jax.serve.settings import Settings
from lorafusion_jax.serve.state_folders import states_replaced_by
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.jobs import Jobs

DATASET = "sha256-" + "d" * 64
EVENTS = {"done": ("accept", "place", "started", "finished"), "paused": ("accept", "pause")}


@dataclass(frozen=True, slots=True)
class Home:
    """A home with a finished job and a paused one, a data set, and what each downloads."""

    folder: Path
    done: str
    paused: str

    def files(self, folder: Path) -> dict[str, bytes]:
        return {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for parent in ("datasets", "jobs")
            for path in (folder / parent).rglob("*")
            if path.is_file()
        }


def settings_of(home: Path) -> Settings:
    return Settings(home=home, bases={}, places={4: 1})


def add_job(db, settings: Settings, state: str) -> str:
    jobs = Jobs(db)
    with db.write() as connection:
        job = jobs.submit(connection, "ana", {"name": "law", "base": "tiny", "data": {"train": DATASET}})["id"]
        for event in EVENTS[state]:
            jobs.change(connection, job, event, actor="test")
        path = f"jobs/{job}/" + ("adapter/step-9-e1" if state == "done" else "state/e1-s5")
        folder = settings.path(path)
        folder.mkdir(parents=True)
        (folder / "adapter_model.safetensors").write_bytes(os.urandom(3000))
        write_digests(folder)
        if state == "paused":
            jobs.set(connection, job, state_path=path, state_step=5, step=5)
            return job
        row = {"id": f"adapter-{job[4:]}", "job": job, "owner": "ana", "step": 9, "path": path, "created": 0.0}
        connection.execute(t.artifacts.insert().values(row | {"sha256": digest_of(folder / "SHA256SUMS")}))
    return job


@pytest.fixture
def home(tmp_path) -> Home:
    settings = settings_of(tmp_path / "home")
    db = open_database(settings)
    (settings.datasets / DATASET).mkdir(parents=True)
    (settings.datasets / DATASET / "data.csv").write_text("prompt,completion\na,b\n")
    with db.write() as connection:
        row = {"id": DATASET, "owner": "ana", "name": "a", "sha256": "", "format": "csv", "rows": 1}
        connection.execute(t.datasets.insert().values(row | {"columns": [], "bytes": 1, "created": 0.0}))
    done, paused = (add_job(db, settings, state) for state in EVENTS)
    db.close()
    return Home(settings.home, done, paused)


def move(home: Home) -> Path:
    return home.folder.rename(home.folder.with_name("elsewhere"))


def rename(home: Home) -> Path:
    """A name is no pattern and no address."""
    return home.folder.rename(home.folder.with_name("home[1]?mode=ro#x%20*"))


def link(home: Home) -> Path:
    linked = home.folder.with_name("link")
    linked.symlink_to(home.folder)
    return linked


def climb(home: Home) -> Path:
    (home.folder.parent / "below").mkdir()
    return home.folder.parent / "below" / ".." / "home"


def mount(home: Home) -> Path:
    """The parent has another name, and a link leads from the old one to it."""
    other = home.folder.parent.with_name(home.folder.parent.name + "-disk")
    home.folder.parent.rename(other)
    home.folder.parent.symlink_to(other)
    return home.folder


def restore(home: Home) -> Path:
    """As the documentation says: the copy of the database, data sets and jobs in an empty home."""
    other = home.folder.with_name("restored")
    assert run(["backup", str(other / "service.db"), "--home", str(home.folder)]) == 0
    for folder in ("datasets", "jobs"):
        shutil.copytree(home.folder / folder, other / folder)
    shutil.rmtree(home.folder)
    return other


def relative(home: Home) -> Path:
    os.chdir(home.folder.parent)
    return Path("home")


@pytest.mark.parametrize("name", [move, rename, link, climb, mount, restore, relative])
@pytest.mark.parametrize("version", [3, t.VERSION])
def test_a_home_with_another_name_keeps_everything(home, tiny_base, monkeypatch, name, version):
    """Also if it got its other name before its database was brought up to date."""
    monkeypatch.chdir(home.folder)
    before = home.files(home.folder)
    if version == 3:
        make_version_3(home)
    folder = name(home)
    running, end = start_service(folder, tiny_base, owners=("ana",))
    try:
        running.service.controller.sweeper.work(100)
        ana = running.client("ana")
        target = ana.job(home.done).adapter(running.settings.home.parent / "downloaded")
        assert home.files(folder) == before
        for file in target.iterdir():
            assert file.read_bytes() == before[f"jobs/{home.done}/adapter/step-9-e1/{file.name}"]
        with running.db.read() as connection:
            row = Jobs(running.db).get(connection, home.paused)
        assert (running.settings.path(row["state_path"]) / "SHA256SUMS").is_file()
        assert running.settings.home == folder.resolve()
    finally:
        end()


def test_a_home_that_is_exchanged_while_it_serves_is_refused_until_it_is_back(home, tiny_base, tmp_path):
    """Moved away, another one in its place, another database in it. A link to it may lead elsewhere meanwhile."""
    named, before, copy = link(home), home.files(home.folder), tmp_path / "copy" / "service.db"
    (tmp_path / "empty").mkdir()
    aside, database = tmp_path / "aside", home.folder / "service.db"
    assert run(["backup", str(copy), "--home", str(home.folder)]) == 0
    running, end = start_service(named, tiny_base, owners=("ana",))
    try:
        named.unlink()
        named.symlink_to(tmp_path / "empty")
        ana = running.client("ana")
        for way in ("moved", "exchanged", "replaced"):
            (database if way == "replaced" else home.folder).rename(aside)
            if way == "exchanged":
                shutil.copytree(aside, home.folder, ignore=shutil.ignore_patterns("*.sock"))
            if way == "replaced":
                shutil.copyfile(copy, database)
            for method, path in (("GET", "/v1/jobs"), ("POST", f"/v1/jobs/{home.paused}/continue")):
                status, answer = raw(running.url, method, path, x_api_key=running.keys["ana"])
                assert (status, json.loads(answer)["error"]["code"]) == (503, "store.replaced")
            wait_for(lambda: "is not the file any more" in running.service.controller.not_ready)
            if way == "exchanged":
                assert home.files(home.folder) == before
                shutil.rmtree(home.folder)
            aside.rename(database if way == "replaced" else home.folder)
            assert ana.job(home.paused).show()["state"] == "paused"
        assert ana.job(home.done).adapter(tmp_path / "downloaded").is_dir()
        assert home.files(home.folder) == before
        assert not any((tmp_path / "empty").iterdir())
    finally:
        end()


def make_version_3(home: Home) -> None:
    with sqlite3.connect(home.folder / "service.db") as connection:
        connection.execute("UPDATE jobs SET state_path = ? || '/' || state_path", (str(home.folder),))
        connection.execute("UPDATE artifacts SET path = ? || '/' || path", (str(home.folder),))
        connection.execute("DROP TABLE removals")
        connection.execute("ALTER TABLE keys DROP COLUMN limits")
        connection.execute("ALTER TABLE jobs DROP COLUMN eval_tokens")
        connection.execute("ALTER TABLE api_samplers DROP COLUMN used")
        connection.execute("UPDATE version SET number = 3")
    connection.close()


@pytest.mark.parametrize("database", ["none", "older", "earlier state"])
def test_a_database_that_knows_less_removes_nothing(home, database):
    """The moment between the two steps of a repair, a copy of before, and a job whose copy is at an earlier state."""
    settings, copy = settings_of(home.folder), home.folder.parent / "copy.db"
    if database == "older":
        with sqlite3.connect(settings.database) as connection:
            for table in ("artifacts", "transitions", "jobs", "datasets"):
                connection.execute(f"DELETE FROM {table}")
        connection.close()
    else:
        assert run(["backup", str(copy), "--home", str(home.folder)]) == 0
    for file in home.folder.glob("service.db*") if database == "none" else ():
        file.unlink()
    newer = settings.job(home.paused) / "state" / "e3-s40"
    newer.mkdir()
    (newer / "file").write_text("x")
    before = home.files(home.folder)
    db = open_database(settings)
    sweeper = Sweeper(settings, db)
    sweeper.begin()
    sweeper.work(100)
    db.close()
    assert home.files(home.folder) == before


def test_a_job_that_goes_on_from_an_older_copy_keeps_later_states_until_it_is_there(home):
    states = home.folder / "jobs" / home.paused / "state"
    for name in ("e3-s40", "e5-s12", "e6-s7"):
        (states / name).mkdir()
    assert [path.name for path in states_replaced_by(states / "e6-s7")] == ["e1-s5"]
    assert [path.name for path in states_replaced_by(states / "e7-s40")] == ["e6-s7", "e5-s12", "e3-s40", "e1-s5"]


@pytest.mark.parametrize("later", [[], ["e1-s3"], ["e2-s40", "e4-s9"]])
def test_a_job_whose_database_is_older_than_its_states_says_where_it_goes_on(tmp_path, tiny_base, monkeypatch, later):
    monkeypatch.setattr(SimulatedProcess, "most_steps", 3)  # the first keeps its place until it is cancelled
    service = Service(tmp_path / "home", tiny_base, None, places={4: 1})
    try:
        other, job = (service.submit(name, "red", steps=steps) for name, steps in (("other", 400), ("law", 12)))
        folder = service.settings.job(job) / "state"
        with service.db.write() as connection:  # it waits for the only place
            service.jobs.set(connection, job, state_path=f"jobs/{job}/state/e1-s5", state_step=5, step=5)
            event = {"kind": "changed", "owner": "ana", "at": 0.0, "data": {}, "job": job}
            connection.execute(t.events.insert().values(event))  # a controller that has read the job reads it again
        for name in ("e1-s5", *later):
            (folder / name).mkdir(parents=True)
        with service.db.write() as connection:
            service.jobs.ask(connection, other, "cancel", actor="test")
        wait_for(lambda: service.placed(job) != [])
        with service.db.read() as connection:
            query = select(t.events.c.data).where(t.events.c.job == job, t.events.c.kind == "earlier-state")
            said = connection.execute(query).scalars().all()
    finally:
        service.close()
    reasons = [f"the database knows the state of step 5, but not {name}" for name in later if name == "e4-s9"]
    assert said == [{"step": 5, "reason": reason} for reason in reasons]


def test_a_job_of_a_drained_worker_says_what_it_waits_for(tmp_path, tiny_base):
    service = Service(tmp_path / "home", tiny_base, None)

    def waits(job: str) -> dict:
        with service.db.read() as connection:
            return service.controller.outlook(connection, service.jobs.get(connection, job)).get("waits", {})

    def drain(value: bool) -> None:
        with service.db.write() as connection:
            connection.execute(t.groups.update().values(drained=value))

    try:
        wait_for(lambda: service.controller.ready)
        drain(True)
        job = service.submit("law", "red", steps=2)
        assert waits(job)["why"] == "its worker is drained for maintenance; POST /v1/workers/g0/undrain ends that"
        assert waits(job)["expected_start"] is None
        drain(False)
        service.wait(job)
    finally:
        service.close()


def test_what_is_deleted_is_put_aside_for_a_day(home, tiny_base, monkeypatch):
    running, end = start_service(home.folder, tiny_base, owners=("ana",))
    before = home.files(home.folder)
    sweeper, ana = running.service.controller.sweeper, running.client("ana")
    try:
        ana.job(home.paused).cancel()
        for path in (f"/v1/adapters/adapter-{home.done[4:]}", f"/v1/datasets/{DATASET}"):
            assert ana.request("DELETE", path) is None
        for job in (home.done, home.paused):
            assert ana.request("DELETE", f"/v1/jobs/{job}")["state"] == "deleted"
    finally:
        end()
    sweeper.work(100)
    jobs = home.folder / "jobs"
    assert [path.name for path in jobs.iterdir()] == [".removed"]
    assert list((home.folder / "datasets").iterdir()) == []  # its owner may need the room
    aside = home.files(home.folder)
    assert sorted(aside.values()) == sorted(content for name, content in before.items() if name.startswith("jobs/"))
    now = sweeper._emptied
    monkeypatch.setattr("lorafusion_jax.serve.control.sweep.time.time", lambda: 2e9 + DAY_S)
    monkeypatch.setattr("lorafusion_jax.serve.control.sweep.time.monotonic", lambda: now + 1e6)
    sweeper.work()
    assert home.files(home.folder) == {}


def test_a_deletion_that_was_broken_off_goes_on_and_an_upload_takes_it_back(home):
    """The server is killed after its transaction, and before the files are put aside."""
    settings = settings_of(home.folder)
    db = open_database(settings)
    adapter, data = f"jobs/{home.done}/adapter/step-9-e1", f"datasets/{DATASET}"
    with db.write() as connection:
        connection.execute(t.artifacts.delete())
        connection.execute(t.removals.insert(), [{"path": adapter}, {"path": data}])  # `data` is there again
    sweeper = Sweeper(settings, db)
    sweeper.begin()
    sweeper.work(100)
    with db.read() as connection:
        assert connection.execute(select(t.removals.c.path)).scalars().all() == [data]
    db.close()
    assert not settings.path(adapter).exists()
    assert settings.path(data).is_dir()


@pytest.mark.parametrize("absent", ["", "SHA256SUMS", "adapter_model.safetensors"])
def test_an_adapter_whose_files_are_gone_is_410(home, tiny_base, absent, tmp_path):
    path = home.folder / "jobs" / home.done / "adapter" / "step-9-e1" / absent
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    running, end = start_service(home.folder, tiny_base, owners=("ana",))
    try:
        with pytest.raises(ServiceError, match=r"adapter\.gone") as problem:
            running.client("ana").job(home.done).adapter(tmp_path / "to")
    finally:
        end()
    assert problem.value.status == 410
    assert all(problem.value.problems[0].values())
    assert str(home.folder) not in str(problem.value)


def test_names_beside_the_home_follow_its_resolved_path(home):
    linked = link(home)
    assert settings_of(linked).socket == settings_of(home.folder).socket
    long = home.folder.parent / ("deep" * 30)
    long.symlink_to(home.folder)
    assert settings_of(long).socket == home.folder / "control.sock"
    names = {RayLauncher.service_of(settings_of(path).home) for path in (home.folder, linked, climb(home))}
    assert len(names) == 1


@pytest.mark.parametrize("taken", ["file", "link", "open", "foreign"])
def test_the_socket_of_a_long_home_is_in_a_folder_of_its_user(tmp_path, monkeypatch, taken):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    settings = settings_of(tmp_path / ("deep" * 30))
    folder = settings.socket.parent
    settings.make_socket_folder()
    settings.make_socket_folder()  # by another server of this user
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700
    if taken == "open":
        folder.chmod(0o711)
    elif taken == "foreign":
        monkeypatch.setattr(
            Path, "lstat", lambda path: os.stat_result((0o40700, 1, 1, 1, os.getuid() + 1, 0, 0, 0, 0, 0))
        )
    else:
        folder.rmdir()
        folder.write_text("") if taken == "file" else folder.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=r"serve\.socket.*only this user") as problem:
        settings.make_socket_folder()
    assert str(folder) in str(problem.value)
    settings_of(tmp_path / "home").make_socket_folder()  # has its socket inside


def test_a_newer_version_changes_nothing_of_a_home_in_use(home, tiny_base, monkeypatch):
    """It refuses before it migrates; commands other than `serve` never do. Then it migrates, and leaves a copy."""
    settings = settings_of(home.folder)
    running, end = start_service(home.folder, tiny_base, owners=())
    migrations = t.MIGRATIONS | {t.VERSION: ("ALTER TABLE jobs RENAME COLUMN weight TO share",)}
    try:
        with server.hold(settings), monkeypatch.context() as newer:
            newer.setattr(t, "VERSION", t.VERSION + 1)
            newer.setattr(t, "MIGRATIONS", migrations)
            with pytest.raises(RunError, match=r"serve\.in-use"):
                server.run_server(settings, port=0)
            for command in (["keys", "add", "ana"], ["keys", "ls"], ["keys", "revoke", "abcdefgh"]):
                assert run([*command, "--home", str(home.folder)]) == 1
            assert run(["backup", str(home.folder / "backup.db"), "--home", str(home.folder)]) == 0
        with running.db.read() as connection:
            assert Jobs(running.db).get(connection, home.done)["weight"] == 1.0
    finally:
        end()
    with monkeypatch.context() as newer:
        newer.setattr(t, "VERSION", t.VERSION + 1)
        newer.setattr(t, "MIGRATIONS", migrations)
        open_database(settings).close()
    with pytest.raises(RunError, match=r"store\.version") as problem:
        open_database(settings)
    assert "version of lorafusion-jax that wrote it" in problem.value.fix
    for file in home.folder.glob("service.db*"):
        file.unlink()
    (home.folder / f"service.version-{t.VERSION}.db").rename(settings.database)
    db = open_database(settings)
    with db.read() as connection:
        assert Jobs(db).get(connection, home.done)["weight"] == 1.0
    db.close()


def test_a_home_that_others_can_use_is_closed(home, monkeypatch):
    settings = settings_of(home.folder)
    home.folder.chmod(0o755)
    settings.database.chmod(0o644)
    open_database(settings).close()
    assert [path.stat().st_mode & 0o777 for path in (home.folder, settings.database)] == [0o700, 0o600]
    home.folder.chmod(0o750)

    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(Path, "chmod", refuse)  # it belongs to somebody else
    with pytest.raises(ConfigError, match=r"serve\.home"):
        open_database(settings)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_secret_of_a_worker_is_not_among_its_arguments(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\nread secret; echo "got $secret"; exec sleep 60\n')
    script.chmod(0o700)
    monkeypatch.setattr(launch.sys, "executable", str(script))
    worker = launch.LocalLauncher("tcp:here:1").start(
        {"server": "tcp:here:1", "group": "g0", "epoch": 1, "secret": "fa11ab1e"}, tmp_path / "log.txt"
    )
    try:
        while "got" not in (tmp_path / "log.txt").read_text():
            time.sleep(0.01)
        assert (tmp_path / "log.txt").read_text() == "got fa11ab1e\n"
        for name in ("cmdline", "environ"):
            assert b"fa11ab1e" not in Path(f"/proc/{worker._pid}/{name}").read_bytes()
    finally:
        worker.kill()
