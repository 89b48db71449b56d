"""Events of workers: what an event changes, and its number, are one transaction."""

from __future__ import annotations

import logging
import re
import shutil
import time
from pathlib import Path
from typing import Any, Protocol

from sqlalchemy import Connection as Transaction

from lorafusion_jax.digests import digest_of, is_intact
from lorafusion_jax.serve.control.hub import Connection
from lorafusion_jax.serve.settings import Settings
from lorafusion_jax.serve.state_folders import ADAPTER, JOB, states_in, states_replaced_by
from lorafusion_jax.serve.state_folders import NAME as STATE
from lorafusion_jax.serve.states import ON_WORKER
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.database import Database, StoreError
from lorafusion_jax.serve.store.jobs import Job, Jobs
from lorafusion_jax.serve.wire import Message

log = logging.getLogger("lorafusion.control")


class StreamEvents(Protocol):
    """Takes the events of models of the training API, in the transaction of each event."""

    def started(self, connection: Transaction, job: Job) -> None: ...
    def answered(self, connection: Transaction, job: Job, event: Message) -> str: ...
    def kept(self, connection: Transaction, job: Job, step: int) -> None: ...
    def sampled(self, connection: Transaction, event: Message) -> None: ...

    def taken(self) -> None:
        """Called once the transaction is on the disk."""
        ...


class WorkerEvents:
    """Writes the events of workers into the database.

    Args:
        streams: takes what is told of models of the training API (None: there are none).

    Attributes:
        refused: events of old epochs.
    """

    def __init__(self, settings: Settings, db: Database, jobs: Jobs, streams: StreamEvents | None = None):
        self._settings, self._db, self._jobs, self._streams = settings, db, jobs, streams
        self.refused = 0

    def take(self, source: Connection, event: Message) -> bool:
        """Takes an event, and then removes files that nobody needs any more.

        Returns:
            False if the event could not be taken. Its job has failed then, rather than to hold up all events after it.
        """
        kind, job = event["event"], event.get("job")
        try:
            if kind == "finished":  # every byte is read, before the database is held
                event = event | {"intact": self._is_intact(event)}
            folders = self._take_now(source, event)
        except StoreError:
            raise
        except Exception as problem:
            log.exception("event %s of %s could not be taken", kind, job or source.group)
            why = f"the server could not take its event {kind}: {problem}"
            self._take_now(source, {"event": "untaken", "reason": why, **_named(event)})
            return False
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        if self._streams is not None:
            self._streams.taken()
        return True

    def _is_intact(self, event: Message) -> bool:
        try:
            return is_intact(self._settings.path(_stored("adapter", ADAPTER, event["job"], event["path"])))
        except ValueError:  # refused with its event
            return False

    def _take_now(self, source: Connection, event: Message) -> list[Path]:
        """Returns folders that nobody needs once the transaction is on the disk."""
        with self._db.write() as connection:
            group = t.find_row(connection, t.groups, source.group)
            if group is None or group["epoch"] != source.epoch or event["number"] <= group["received"]:
                self.refused += group is None or group["epoch"] != source.epoch
                return []
            kind, job = event["event"], event.get("job")
            values: dict[str, Any] = {"received": event["number"]}
            if kind == "ready":
                values |= {"state": "ready", "device": event["device"]}
            elif kind == "not-opened":
                values |= {"state": "failed"}
                log.error("the session could not be opened: %s", event["reason"])
            connection.execute(t.groups.update().where(t.groups.c.id == source.group).values(values))
            if kind == "sampled" and self._streams is not None:
                self._streams.sampled(connection, event)
            row = None if job is None else self._jobs.find(connection, job, None)
            return [] if row is None else self._take_of_job(connection, row, event)

    def _take_of_job(self, connection: Any, job: Job, event: Message) -> list[Path]:
        if event["epoch"] != job["epoch"] or job["state"] not in ON_WORKER:
            self.refused += 1  # a writer of an earlier placement
            return []
        kind, name, actor = event["event"], job["id"], f"worker {job['group']}"
        match kind:
            case "started":
                if job["state"] in ("starting", "draining"):
                    self._jobs.change(connection, name, "started", actor=actor, steps=event.get("steps", job["steps"]))
                if (streams := self._streams_of(job)) is not None:
                    streams.started(connection, job)
            case "answered":
                streams = self._streams_of(job)
                if streams is not None and (why := streams.answered(connection, job, event)):
                    self._jobs.change(connection, name, "failed", actor=actor, why=why)
            case "vacated":  # its last step is taken; it is done once its adapter is on the disk
                self._jobs.set(connection, name, place=None)
            case "stepped":
                self._take_rows(connection, job, event["rows"])
            case "saved":
                return self._keep_state(connection, job, event)
            case "damaged":  # it has started from an earlier state
                path = None if event["path"] is None else _stored("state", STATE, name, event["path"])
                self._jobs.restart(connection, name, step=event["step"], path=path)
                self._db.add_event(connection, "damaged", job["owner"], name, {"reason": event["reason"]})
            case "not-saved":
                self._db.add_event(connection, "not-saved", job["owner"], name, {"reason": event["reason"]})
            case "stopped":
                folders = self._keep_state(connection, job, event)
                job_row = self._jobs.get(connection, name)
                self._jobs.restart(connection, name, step=job_row["state_step"], path=job_row["state_path"])
                if job["state"] == "draining":
                    self._jobs.change(connection, name, "stopped", actor=actor)
                else:  # the worker ends in good order
                    self._jobs.change(connection, name, "lost", actor=actor, why="its worker ended")
                return folders
            case "failed":
                self._jobs.change(connection, name, "failed", actor=actor, why=event["reason"], step=event["step"])
            case "untaken":
                self._jobs.change(connection, name, "failed", actor="controller", why=event["reason"])
            case "finished":
                return self._take_adapter(connection, job, event)
            case "gone":
                self._jobs.lost(connection, name, why="its worker does not have it")
        return []

    def _streams_of(self, job: Job) -> StreamEvents | None:
        """What takes the events of a model; None for other jobs."""
        return self._streams if "stream" in job["spec"] else None

    def _take_rows(self, connection: Any, job: Job, rows: list[dict[str, Any]]) -> None:
        self._jobs.add_metrics(connection, job["id"], rows)
        steps = [row for row in rows if row["kind"] == "step"]
        if steps:
            self._jobs.set(connection, job["id"], step=steps[-1]["step"], loss=steps[-1]["loss"])
        for row in rows:
            self._db.add_event(connection, row["kind"], job["owner"], job["id"], row)

    def _keep_state(self, connection: Any, job: Job, event: Message) -> list[Path]:
        """Makes a written state the current one. Returns older ones; the one before it stays, too."""
        if event["path"] is None or event["step"] < job["state_step"]:
            return []
        step = max(event["step"], job["step"])  # steps after the state may have been told of before it
        path = _stored("state", STATE, job["id"], event["path"])
        self._jobs.set(connection, job["id"], state_path=path, state_step=event["step"], step=step)
        if (streams := self._streams_of(job)) is not None:
            streams.kept(connection, job, event["step"])
        folder, before = self._settings.path(path), self._settings.path(job["state_path"] or path)
        return [older for older in states_replaced_by(folder) if older != before] if folder.is_dir() else []

    def _take_adapter(self, connection: Any, job: Job, event: Message) -> list[Path]:
        path, actor = _stored("adapter", ADAPTER, job["id"], event["path"]), f"worker {job['group']}"
        folder = self._settings.path(path)
        if not event["intact"]:
            why = f"{folder.name} was exported and is damaged"
            self._jobs.change(connection, job["id"], "failed", actor=actor, why=why, step=event["step"])
            return []
        row = {
            "id": f"adapter-{job['id'].removeprefix('job-')}",
            "job": job["id"],
            "owner": job["owner"],
            "step": event["step"],
            "path": path,
            "sha256": digest_of(folder / "SHA256SUMS"),
            "created": time.time(),
        }
        connection.execute(t.artifacts.delete().where(t.artifacts.c.id == row["id"]))
        connection.execute(t.artifacts.insert().values(row))
        self._jobs.change(connection, job["id"], "finished", actor=actor, step=event["step"], state_path=None)
        return states_in(self._settings.job(job["id"]) / "state")  # the adapter was read: it is whole


def _stored(kind: str, form: re.Pattern[str], job: str, path: str) -> str:
    """Returns the path for the database of a folder that a worker wrote, which may know the home by another name.

    Raises:
        ValueError: it is no name that a worker gives.
    """
    name = Path(path).name
    if JOB.fullmatch(job) is None or form.fullmatch(name) is None:
        raise ValueError(f"{name} is no name of a folder in {kind} of a job")
    return f"jobs/{job}/{kind}/{name}"


def _named(event: Message) -> Message:
    """What says which event it is."""
    return {key: event[key] for key in ("number", "job", "epoch") if key in event}
