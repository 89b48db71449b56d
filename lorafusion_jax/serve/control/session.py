"""One session: its worker process on a set of devices, from the server's side.

Every round compares the database with what the worker holds and sends what differs. Only events of the worker's present
epoch count; an older writer changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import select

from lorafusion_jax.serve.control.hub import Connection, Hub
from lorafusion_jax.serve.control.launch import Launcher, Worker
from lorafusion_jax.serve.settings import Settings
from lorafusion_jax.serve.states import ON_WORKER, StateError
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.database import Database
from lorafusion_jax.serve.store.jobs import Job, Jobs

START_S = 180.0  # for a worker to start and connect
LOCAL = "local"  # the only host
STOP_S = 60.0  # for a worker to save its jobs and end
MISSED_BEATS = 3  # of a worker that hangs
MOST_BACKOFF_S = 60.0
NO_WORKER = "no worker yet"
log = logging.getLogger("lorafusion.control")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlan:
    """What a session is.

    Args:
        base: name of its base model.
        places: class → number of places.
        gpus: numbers of its GPUs (empty: whatever the machine has).
        mesh: `mesh.stages` and `mesh.data`, where they differ from the settings.
        capacity_tokens: of its microbatches, where the settings have none.
        host: whose GPUs these are, in the view of a policy.
    """

    base: str
    places: Mapping[str, int]
    gpus: tuple[int, ...] = ()
    mesh: Mapping[str, int] = field(default_factory=dict[str, int])
    capacity_tokens: int | None = None
    host: str = LOCAL


class Session:
    """A worker process and what it was told.

    Args:
        group: name of the session.
        values: (job) → its job file in this session.
        launcher: starts workers.

    Attributes:
        ready: whether the worker has opened its session.
    """

    def __init__(
        self,
        settings: Settings,
        db: Database,
        jobs: Jobs,
        hub: Hub,
        group: str,
        plan: SessionPlan,
        values: Callable[[Job], dict[str, Any]],
        launcher: Launcher,
    ):
        self.group, self.plan, self.ready = group, plan, False
        self._launcher = launcher
        self._settings, self._db, self._jobs, self._hub, self._values = settings, db, jobs, hub, values
        self._was_connected, self._failed_starts, self._not_before = False, 0, 0.0
        self._sent: set[tuple[str, int, str]] = set()  # commands of this connection: (job, epoch, command)
        self._weights: dict[tuple[str, int], float] = {}  # that the worker has, by (job, epoch)
        self._seen: Connection | None = None
        self._silent_since = time.monotonic()
        self._worker: Worker | None = None

    @property
    def connected(self) -> bool:
        return self.group in self._hub.connections

    @property
    def trains(self) -> bool:
        """Whether jobs can be placed: the worker is ready, and this round has seen its connection and what it told."""
        seen = self._seen
        return self.ready and seen is not None and seen.is_settled and self._hub.connections.get(self.group) is seen

    def started(self) -> None:
        """Notes that the worker has opened its session."""
        self.ready, self._failed_starts = True, 0

    def terminate(self) -> None:
        """Asks the worker to save its jobs and to end; `stop` waits for it."""
        if (worker := self._worker or self._recorded_worker()) is not None:
            worker.terminate()

    def stop(self, seconds: float = STOP_S) -> None:
        """Ends the worker, also one of an earlier server; its jobs are saved.

        Args:
            seconds: to wait. A worker that takes longer goes on saving, and ends by itself; one that gives no sign of
                it would not.
        """
        self.ready = False
        worker = self._worker or self._recorded_worker()
        if worker is not None:
            worker.terminate()
            if worker.wait(seconds) or self._is_silent():
                worker.kill()  # what it held of a cluster is given back; one that still saves leaves by itself
            self._worker = None

    def remove(self, *, at_once: bool = False) -> None:
        """Ends the worker for good. Jobs that it still has return to the queue.

        Args:
            at_once: its jobs are not saved before.
        """
        if not at_once:
            self.stop()
        self._kill_rest()
        self._hub.drop(self.group)
        with self._db.write() as connection:
            self._return_jobs(connection, "its session ended")
            connection.execute(t.groups.delete().where(t.groups.c.id == self.group))

    def watch(self) -> bool:
        """Replaces the worker if there is none, or none that lives. Returns whether its jobs were lost."""
        connection = self._hub.connections.get(self.group)
        self._was_connected |= connection is not None
        if connection is not self._seen:
            self._seen, self._sent, self._weights = connection, set(), {}
            self._silent_since = time.monotonic()
        silent_s = self._silent_s(connection)
        if connection is not None and silent_s <= self._settings.lease_s:
            return False
        is_dead = self._worker is not None and self._worker.has_ended()
        lease_s = self._settings.lease_s if self._was_connected else max(START_S, self._settings.lease_s)
        if self._worker is not None and not is_dead and silent_s <= lease_s:
            return False  # it starts, or connects again
        if (is_dead or self._worker is None) and time.monotonic() < self._not_before:
            return False  # it ended before it was ready, or could not be started: not again at once
        if self._failed_starts and self._launcher.problem:
            return False  # its jobs wait in the queue
        adopts = self._worker is None and connection is None and self._adoptable()
        if adopts and silent_s <= self._settings.lease_s:
            return False  # a worker of an earlier server, which will connect
        self._replace_worker("it ended" if is_dead else "no sign of it" if self._worker or adopts else NO_WORKER)
        return True

    def send(self) -> None:
        """Sends the commands that the worker does not have yet."""
        if not self.trains:
            return
        with self._db.read() as connection:
            jobs = [job for job in self._jobs.in_states(connection, *ON_WORKER) if job["group"] == self.group]
        for job in jobs:
            if job["state"] == "draining":
                self._send_once(job, "stop")
                continue
            if job["state"] == "starting":
                self._send_once(
                    job,
                    "start",
                    name=job["name"],
                    place=job["place"],
                    values=self._values(job),
                    state=None if job["state_path"] is None else str(self._settings.path(job["state_path"])),
                    folder=str(self._settings.job(job["id"])),
                )
            if job["state"] == "running" and self._weights.get((job["id"], job["epoch"])) != job["weight"]:
                self._send_weight(job)
            if job["state"] == "running" and self._seen is not None and not self._sent_any(job):
                has_job = any((hold["job"], hold["epoch"]) == (job["id"], job["epoch"]) for hold in self._seen.holds)
                self._sent.add((job["id"], job["epoch"], "seen"))
                if not has_job:
                    with self._db.write() as connection, suppress(StateError):
                        self._jobs.lost(connection, job["id"], why="its worker does not have it")

    def is_that_of(self, row: Mapping[str, Any]) -> bool:
        """Whether the worker of an earlier server opened the same as this one would."""
        return row["opens"] == self._opens_digest()

    def adopt(self, state: str) -> None:
        """Notes that a worker of this session has connected."""
        self.ready = state == "ready"

    def _is_silent(self) -> bool:
        """Whether a worker has missed its beats, or not connected for so long."""
        return self._silent_s(self._hub.connections.get(self.group)) > MISSED_BEATS * self._beat_s

    def _silent_s(self, connection: Connection | None) -> float:
        return time.monotonic() - (self._silent_since if connection is None else connection.contact)

    @property
    def _beat_s(self) -> float:
        return min(self._settings.lease_s / 6, 5.0)

    def _adoptable(self) -> bool:
        return self._recorded_worker() is not None

    def _recorded_worker(self) -> Worker | None:
        """Returns the worker of the database, if it lives."""
        with self._db.read() as connection:
            row = t.find_row(connection, t.groups, self.group)
        return None if row is None else self._launcher.find(self.group, row["epoch"], row["pid"])

    def _kill_rest(self) -> None:
        """Ends what is left of a worker."""
        for worker in (self._worker, self._recorded_worker()):
            if worker is not None:
                worker.kill()

    def _replace_worker(self, why: str) -> None:
        """Ends what is left of a worker, returns its jobs to the queue, and starts another one."""
        self.ready = False
        self._hub.drop(self.group)
        self._kill_rest()
        group, plan = self.group, self.plan
        with self._db.write() as connection:
            row = t.find_row(connection, t.groups, group)
            loss = "it ended while no server ran" if why == NO_WORKER else why
            self._return_jobs(connection, f"its worker was lost: {loss}")
            epoch = 1 + (connection.scalar(select(t.epochs.c.last).where(t.epochs.c.group == group)) or 0)
            connection.execute(t.epochs.delete().where(t.epochs.c.group == group))
            connection.execute(t.epochs.insert().values(group=group, last=epoch))
            connection.execute(t.groups.delete().where(t.groups.c.id == group))
            values = {"id": group, "base": plan.base, "epoch": epoch, "state": "opening", "places": dict(plan.places)}
            values |= {"gpus": list(plan.gpus), "mesh": dict(plan.mesh), "capacity": plan.capacity_tokens}
            values |= {"opens": self._opens_digest(), "host": plan.host}
            is_drained = False if row is None else row["drained"]
            connection.execute(t.groups.insert().values(values | {"drained": is_drained}))
            text = f"worker {group}, epoch {epoch}: started, because {why}"
            connection.execute(t.decisions.insert().values(at=time.time(), text=text))
            self._db.add_event(connection, "worker", "admin", None, {"group": group, "epoch": epoch, "why": why})
        self._failed_starts += 1  # until it is ready
        self._silent_since, self._was_connected, self._worker = time.monotonic(), False, None
        self._not_before = self._silent_since + min(2.0**self._failed_starts, MOST_BACKOFF_S)
        self._worker = self._start_worker(epoch)

    def _return_jobs(self, connection: Any, why: str) -> None:
        for job in self._jobs.in_states(connection, *ON_WORKER):
            if job["group"] == self.group:
                self._jobs.lost(connection, job["id"], why=why)

    def _start_worker(self, epoch: int) -> Worker:
        settings = self._settings
        arguments = {
            "server": self._hub.address,
            "secret": self._hub.secret,
            "group": self.group,
            "epoch": epoch,
            "beat_s": self._beat_s,
            "save_s": settings.save_s,
        }
        return self._launcher.start(arguments | self._opens(), settings.log(self.group))

    def _opens(self) -> dict[str, Any]:
        """What its worker opens."""
        settings, plan = self._settings, self.plan
        capacity = {} if plan.capacity_tokens is None else {"capacity_tokens": plan.capacity_tokens}
        return {
            "gpus": list(plan.gpus),
            "base": {**settings.base, "model": str(settings.bases[plan.base])},
            "mesh": {**settings.mesh, **plan.mesh},
            "places": {str(name): count for name, count in plan.places.items()},
            "batch": {**capacity, **settings.batch},
            "train": dict(settings.train),
            "reproducible": settings.reproducible,
            "sampling_share": settings.sampling_share,
            "sampler_places": settings.sampler_places,
            **({"row_targets": 1, "jobs_share": settings.jobs_share} if settings.training_api else {}),
        }

    def _opens_digest(self) -> str:
        return hashlib.sha256(json.dumps(self._opens(), sort_keys=True, default=str).encode()).hexdigest()

    def _send_weight(self, job: Job) -> None:
        message = {"command": "weight", "job": job["id"], "epoch": job["epoch"], "weight": job["weight"]}
        if self._hub.send(self.group, message):
            self._weights[job["id"], job["epoch"]] = job["weight"]

    def _sent_any(self, job: Job) -> bool:
        return any((name, epoch) == (job["id"], job["epoch"]) for name, epoch, _ in self._sent)

    def _send_once(self, job: Job, command: str, **data: Any) -> None:
        key = (job["id"], job["epoch"], command)
        if key in self._sent:
            return
        message = {"command": command, "job": job["id"], "epoch": job["epoch"]} | data
        if self._hub.send(self.group, message):
            self._sent.add(key)


def drained_sessions(connection: Any) -> set[str]:
    """Sessions that are given no jobs."""
    return set(connection.execute(select(t.groups.c.id).where(t.groups.c.drained)).scalars())


def maintenance(connection: Any, sessions: list[str]) -> str:
    """Says that all sessions of a job's base are drained; "" if they are not."""
    is_over = not sessions or set(sessions) - drained_sessions(connection)
    return "" if is_over else f"its worker is drained for maintenance; POST /v1/workers/{sessions[0]}/undrain ends that"
