"""What nobody needs any more is removed, in counted steps; what the service did not write stays."""

from __future__ import annotations

import time

import pytest
from sqlalchemy import select

from lorafusion_jax.serve.control.sweep import AT_ONCE, Sweeper
from lorafusion_jax.serve.server import open_database
from lorafusion_jax.serve.settings import Settings
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.jobs import Jobs

ENDS = {"cancelled": ("cancel",), "done": ("accept", "place", "started", "finished"), "queued": ("accept",)}


class Home:
    """Jobs with their files."""

    def __init__(self, folder):
        self.settings = Settings(home=folder, bases={}, places={4: 1})
        self.db = open_database(self.settings)
        self.jobs, self.sweeper = Jobs(self.db), Sweeper(self.settings, self.db)

    def job(self, state: str, *, adapter: bool = False) -> str:
        """A job with states, references, leftovers of a killed worker, and files of somebody else."""
        with self.db.write() as connection:
            job = self.jobs.submit(connection, "ana", {"name": "law", "base": "tiny", "data": {}})["id"]
            for event in ENDS["cancelled" if state == "deleted" else state]:
                self.jobs.change(connection, job, event, actor="test")
            if state == "deleted":
                self.jobs.change(connection, job, "delete", actor="test")
            self.jobs.set(connection, job, state_path=f"jobs/{job}/state/e2-s9")
            self.jobs.add_metrics(connection, job, [{"kind": "step", "step": 1, "loss": 1.0}])
            if adapter:
                row = {
                    "id": f"adapter-{job[4:]}",
                    "job": job,
                    "owner": "ana",
                    "step": 9,
                    "path": f"jobs/{job}/adapter/step-9-e2",
                }
                connection.execute(t.artifacts.insert().values(row | {"sha256": "", "created": time.time()}))
        for name in (
            "state/e1-s3",
            "state/e2-s6",
            "state/e2-s9",
            "state/.e2-s12.new",
            "adapter/step-9-e2",
            "references",
        ):
            self.write(job, f"{name}/file")
        self.write(job, "adapter/step-9-e2/SHA256SUMS")
        self.write(job, "adapter/.step-9-e3.gone/file")
        self.write(job, ".references.json.part")
        return job

    def write(self, job: str, name: str) -> None:
        file = self.settings.job(job) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")

    def files(self, job: str) -> set[str]:
        folder = self.settings.job(job)
        return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}

    def sweep(self) -> None:
        self.sweeper.begin()
        for _ in range(100):
            self.sweeper.work()


@pytest.fixture
def home(tmp_path):
    made = Home(tmp_path / "home")
    yield made
    made.db.close()


def test_a_deleted_job_leaves_its_adapter_until_that_is_deleted(home):
    job, other = home.job("deleted", adapter=True), home.job("deleted")
    home.sweep()
    assert home.files(job) == {"adapter/step-9-e2/file", "adapter/step-9-e2/SHA256SUMS"}
    assert not home.settings.job(other).exists()
    with home.db.write() as connection:
        assert connection.execute(select(t.metrics)).all() == []
        assert len(home.jobs.transitions(connection, job)) == 3  # what happened stays known
        connection.execute(t.artifacts.delete())
    home.sweeper.add(job)
    home.sweeper.work()
    assert not home.settings.job(job).exists()


def test_live_and_ended_jobs_keep_what_they_need(home):
    """A live job has its newest state and the one before; what a worker may be writing is left alone."""
    live, ended, done = home.job("queued"), home.job("cancelled"), home.job("done", adapter=True)
    before = home.files(live)
    home.sweep()
    assert before - home.files(live) == {"state/e1-s3/file"}
    assert home.files(ended) == {
        "state/e1-s3/file", "state/e2-s6/file", "state/e2-s9/file", "adapter/step-9-e2/file",
        "adapter/step-9-e2/SHA256SUMS", "references/file",
    }  # fmt: skip
    assert home.files(done) == {"adapter/step-9-e2/file", "adapter/step-9-e2/SHA256SUMS"}


def test_what_the_service_did_not_write_stays(home, tmp_path):
    job, strange = home.job("deleted"), "state/notes/why.txt"
    home.write(job, strange)
    outside = tmp_path / "mine"
    outside.mkdir()
    (outside / "e1-s1").mkdir()
    (outside / "e1-s1" / "file").write_text("x")
    (home.settings.job(job) / "state" / "e7-s7").symlink_to(outside / "e1-s1")
    unknown = home.settings.job("job-ffffffffffff")
    (unknown / "state" / "e1-s1").mkdir(parents=True)
    linked = home.settings.job(home.job("deleted"))
    for folder in sorted(linked.rglob("*"), reverse=True):
        folder.unlink() if folder.is_file() else folder.rmdir()
    linked.rmdir()
    linked.symlink_to(outside)
    home.sweep()
    assert home.files(job) == {strange}
    assert (outside / "e1-s1" / "file").read_text() == "x"
    assert (unknown / "state" / "e1-s1").is_dir()


def test_uploads_that_were_broken_off_go_at_the_start(home):
    """A data set that the database does not know stays: the database may be an older copy."""
    data = home.settings.datasets
    named = {"sha256-" + "a" * 64: True, "sha256-" + "b" * 64: True, ".upload-0123456789abcdef": False, "mine": True}
    for name in named:
        (data / name).mkdir(parents=True)
    with home.db.write() as connection:
        row = {"id": "sha256-" + "a" * 64, "owner": "ana", "name": "a", "sha256": "", "format": "csv", "rows": 1}
        connection.execute(t.datasets.insert().values(row | {"columns": [], "bytes": 1, "created": 0.0}))
    home.sweep()
    assert {path.name for path in data.iterdir()} == {name for name, stays in named.items() if stays}


def test_old_events_of_steps_and_decisions_go(home):
    """States stay, and the newest row: whoever reads events goes on after its number."""
    job, now = home.job("queued"), time.time()
    ages = [9, 8, 8, 6, 40, 9]  # days
    with home.db.write() as connection:
        for kind, days in zip(("step", "state", "eval", "step", "state", "step"), ages, strict=True):
            row = {"job": job, "owner": "ana", "kind": kind, "at": now - 86_400 * days, "data": {"days": days}}
            connection.execute(t.events.insert().values(row))
        for days in (40, 29, 35):
            connection.execute(t.decisions.insert().values(at=now - 86_400 * days, text=str(days)))
    home.sweeper.work()
    with home.db.read() as connection:
        rows = connection.execute(select(t.events.c.kind, t.events.c.data).order_by(t.events.c.seq)).all()
        texts = connection.execute(select(t.decisions.c.text)).scalars().all()
        assert home.jobs.metrics(connection, job, 0, 1) != []
    assert [(kind, data["days"]) for kind, data in rows if "days" in data] == [
        ("state", 8), ("step", 6), ("state", 40), ("step", 9),
    ]  # fmt: skip
    assert texts == ["29", "35"]


def test_work_is_counted_and_a_killed_server_finishes_later(home, monkeypatch):
    """Each round looks at a few jobs; one that cannot be removed stops nobody, and the next start takes it again."""
    jobs = [home.job("deleted") for _ in range(AT_ONCE + 2)]
    home.sweeper.begin()
    home.sweeper.work()
    assert sum(home.settings.job(job).exists() for job in jobs) == 2
    left = next(job for job in jobs if home.settings.job(job).exists())

    def fails(path, *_, **__):
        raise OSError(30, "read-only", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("lorafusion_jax.serve.control.sweep.Path.rename", fails)
        home.sweeper.work()
    assert "state/e2-s9/file" in home.files(left)
    again = Sweeper(home.settings, home.db)
    again.begin()
    again.work(100)
    assert not any(home.settings.job(job).exists() for job in jobs)
