"""Jobs: every change of state is a row of `jobs`, a row of `transitions` and an event, in one transaction."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Text, and_, func, or_, select, text, tuple_, type_coerce

from lorafusion_jax.serve.states import ENDED, LIVE, NEW, ON_WORKER, next_state
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.database import Database

Job = dict[str, Any]
MOST_TRIES = 4  # lost workers of a job without progress
SUSPECT_TRIES = 2  # after which it trains alone until it has made progress
PROGRESS = 20  # steps after which earlier losses are forgotten
SHOWN = tuple(c.name for c in t.jobs.c if c.name not in ("state_path", "tries_step", "lengths", "eval_tokens"))
AT_ONCE = 500  # jobs that a statement names


class Jobs:
    """Reads and changes jobs."""

    def __init__(self, db: Database):
        self._db = db

    def submit(self, connection: Connection, owner: str, spec: dict[str, Any]) -> Job:
        """Adds a job in state `checking`."""
        row = {
            "id": "job-" + secrets.token_hex(6),
            "owner": owner,
            "name": spec["name"],
            "base": spec["base"],
            "spec": spec,
            "state": "checking",
            "weight": spec.get("weight", 1.0),
            "priority": spec.get("priority", 0),
            "deadline": spec.get("deadline"),
            "created": time.time(),
        }
        connection.execute(t.jobs.insert().values(row))
        self._note(connection, row["id"], owner, NEW, "checking", "submit", actor=owner, why="")
        return self.get(connection, row["id"])

    def change(self, connection: Connection, job: str, event: str, *, actor: str, why: str = "", **values: Any) -> Job:
        """Applies an event of the table of states, and sets columns with it.

        Raises:
            StateError: the state does not allow it; nothing changed.
        """
        before = self.get(connection, job)
        after = next_state(before["state"], event)
        now = time.time()
        values |= {"state": after}
        if event in ("failed", "reject", "refused", "lost", "poison"):
            values.setdefault("reason", why)
        elif after == "running" or after in ENDED:
            values.setdefault("reason", "")  # that it once lost a worker says nothing of it now
        if after == "queued":
            values |= {"queued": now, "group": None, "place": None}
        if after == "running" and before["started"] is None:
            values["started"] = now
        if after in ENDED or after == "paused":
            values |= {"group": None, "place": None} | ({"ended": now} if after in ENDED else {})
        connection.execute(t.jobs.update().where(t.jobs.c.id == job).values(values))
        self._note(connection, job, before["owner"], before["state"], after, event, actor=actor, why=why)
        row = self.get(connection, job)
        if after == "queued" and (next_event := row["after_drain"]):
            connection.execute(t.jobs.update().where(t.jobs.c.id == job).values(after_drain=None))
            if next_event in ("pause", "cancel"):
                return self.change(connection, job, next_event, actor=actor, why="asked for while it ran")
            return self.get(connection, job)
        return row

    def ask(self, connection: Connection, job: str, event: str, *, actor: str, why: str = "") -> Job:
        """Pauses, cancels or continues a job. A job on a worker is drained first. Repeating it changes nothing."""
        before = self.get(connection, job)
        target = {"pause": "paused", "cancel": "cancelled"}.get(event)
        waits = event == "continue" and before["state"] in ("queued", "starting", "running")
        if before["state"] == target or waits or (before["state"] == "draining" and before["after_drain"] == event):
            return before
        if before["state"] in ("starting", "running", "draining") and event in ("pause", "cancel", "preempt"):
            return self.change(connection, job, "drain", actor=actor, why=why or event, after_drain=event)
        return self.change(connection, job, event, actor=actor, why=why)

    def lost(self, connection: Connection, job: str, *, why: str) -> Job:
        """Returns a job of a lost worker to the queue; fails it after `MOST_TRIES` losses without progress."""
        row = self.get(connection, job)
        has_progress = row["step"] - row["tries_step"] >= PROGRESS
        tries = 1 if has_progress else row["tries"] + 1
        values = {"tries": tries, "tries_step": row["step"] if has_progress or tries == 1 else row["tries_step"]}
        self.restart(connection, job, step=row["state_step"], path=row["state_path"])
        after = self.change(connection, job, "lost", actor="controller", why=why, **values)
        if tries >= MOST_TRIES and after["state"] == "queued":
            reason = f"its worker was lost {tries} times within {PROGRESS} steps"
            return self.change(connection, job, "poison", actor="controller", why=reason)
        return after

    def restart(self, connection: Connection, job: str, *, step: int, path: str | None) -> None:
        """Sets the state from which a job goes on. Later steps run again, so their rows are removed."""
        self.set(connection, job, step=step, state_step=step, state_path=path)
        connection.execute(t.metrics.delete().where(t.metrics.c.job == job, t.metrics.c.step > step))

    def set(self, connection: Connection, job: str, **values: Any) -> None:
        """Sets columns that are no states."""
        connection.execute(t.jobs.update().where(t.jobs.c.id == job).values(values))

    def get(self, connection: Connection, job: str) -> Job:
        row = connection.execute(select(t.jobs).where(t.jobs.c.id == job)).mappings().one()
        return dict(row)

    def find(self, connection: Connection, job: str, owner: str | None, *, deleted: bool = False) -> Job | None:
        """Returns a job of an owner (None: of anybody); one that is deleted only if asked to."""
        row = t.find_row(connection, t.jobs, job, owner)
        return row if deleted or row is None or row["state"] != "deleted" else None

    def page(
        self,
        connection: Connection,
        *,
        owner: str | None,
        states: Sequence[str] = (),
        after: tuple[float, str] | None = None,
        limit: int = 100,
    ) -> list[Job]:
        """Jobs as they are shown, newest first, after a cursor (created, id)."""
        where = [t.jobs.c.state != "deleted", *t.seen_by(t.jobs, owner)]
        where += [t.jobs.c.state.in_(states)] if states else []
        where += [] if after is None else [tuple_(t.jobs.c.created, t.jobs.c.id) < after]
        order = (t.jobs.c.created.desc(), t.jobs.c.id.desc())
        query = select(*(t.jobs.c[name] for name in SHOWN)).where(*where).order_by(*order).limit(limit)
        return [dict(row) for row in connection.execute(query).mappings()]

    def in_states(self, connection: Connection, *states: str) -> list[Job]:
        """Jobs in these states: by priority, then in order of arrival, which no step of the clock changes."""
        order = (t.jobs.c.priority.desc(), text("jobs.rowid"))
        query = select(t.jobs).where(t.jobs.c.state.in_(states)).order_by(*order)
        return [dict(row) for row in connection.execute(query).mappings()]

    def unchecked(self, connection: Connection, bases: Sequence[str]) -> list[tuple[str, str]]:
        """Jobs of these bases that are to be checked, and their owners: by priority, then in order of arrival."""
        order = (t.jobs.c.priority.desc(), text("jobs.rowid"))
        where = t.jobs.c.state == "checking", t.jobs.c.base.in_(bases)
        query = select(t.jobs.c.id, t.jobs.c.owner).where(*where).order_by(*order)
        return [(row[0], row[1]) for row in connection.execute(query)]

    def transitions(self, connection: Connection, job: str) -> list[dict[str, Any]]:
        query = select(t.transitions).where(t.transitions.c.job == job).order_by(t.transitions.c.number)
        return [
            {k: v for k, v in row.items() if k not in ("job", "number")} for row in connection.execute(query).mappings()
        ]

    def count_live(self, connection: Connection, owner: str) -> int:
        query = select(func.count()).select_from(t.jobs).where(t.jobs.c.owner == owner, t.jobs.c.state.in_(LIVE))
        return connection.scalar(query) or 0

    def using(self, connection: Connection, thing: str) -> list[str]:
        """Live jobs that use a data set, or an adapter to start from or to compare with."""
        names_it = type_coerce(t.jobs.c.spec, Text).contains(thing, autoescape=True)
        rows = connection.execute(select(t.jobs.c.id, t.jobs.c.spec).where(t.jobs.c.state.in_(LIVE), names_it)).all()
        return [job for job, spec in rows if thing in _used(spec)]

    def place(self, connection: Connection, job: str, *, group: str, place: int) -> Job:
        """Writes a new placement of a queued job: its epoch grows, and earlier writers are refused from now on."""
        epoch = self.get(connection, job)["epoch"] + 1
        row = {"job": job, "epoch": epoch, "group": group, "place": place, "at": time.time()}
        connection.execute(t.placements.insert().values(row))
        return self.change(connection, job, "place", actor="controller", epoch=epoch, group=group, place=place)

    def add_metrics(self, connection: Connection, job: str, rows: Sequence[dict[str, Any]]) -> None:
        """Adds rows of metrics; those of a step that ran before are replaced."""
        for row in rows:
            key = and_(t.metrics.c.job == job, t.metrics.c.kind == row["kind"], t.metrics.c.step == row["step"])
            connection.execute(t.metrics.delete().where(key))
            connection.execute(t.metrics.insert().values(job=job, kind=row["kind"], step=row["step"], row=row))

    def metrics(self, connection: Connection, job: str, from_step: int, every: int) -> list[dict[str, Any]]:
        in_interval = or_(t.metrics.c.kind != "step", t.metrics.c.step % every == 0)
        query = (
            select(t.metrics.c.row)
            .where(t.metrics.c.job == job, t.metrics.c.step >= from_step, in_interval)
            .order_by(t.metrics.c.step, t.metrics.c.kind)
        )
        return list(connection.execute(query).scalars())

    def _note(
        self, connection: Connection, job: str, owner: str, before: str, after: str, event: str, *, actor: str, why: str
    ) -> None:
        row = {"job": job, "before": before, "after": after, "event": event, "at": time.time(), "actor": actor}
        connection.execute(t.transitions.insert().values(row | {"why": why}))
        self._db.add_event(connection, "state", owner, job, {"before": before, "after": after, "why": why})


class MayRun:
    """The jobs that train or wait to. Of those that wait a read takes from the file only what has changed.

    An event names each job whose state, weight, priority or deadline has changed, in the transaction that changed it.
    """

    def __init__(self, db: Database):
        self._db, self._lock = db, threading.Lock()
        self._seen = -1  # number of the newest event that was looked at
        self._queued: dict[str, Job] = {}

    def read(self) -> list[Job]:
        """Returns the jobs, by priority and then in order of arrival. Their rows are not to be changed."""
        with self._lock, self._db.read() as connection:
            newest = connection.scalar(select(func.max(t.events.c.seq))) or 0
            if self._seen < 0:
                self._queued = {job["id"]: job for job in _numbered(connection, t.jobs.c.state == "queued")}
            elif newest > self._seen:
                is_change = t.events.c.kind.in_(("state", "changed"))
                query = select(t.events.c.job).where(t.events.c.seq > self._seen, is_change).distinct()
                self._read_again(connection, connection.execute(query).scalars().all())
            self._seen = newest
            rows = [*self._queued.values(), *_numbered(connection, t.jobs.c.state.in_(ON_WORKER))]
        return sorted(rows, key=lambda job: (-job["priority"], job["number"]))

    def _read_again(self, connection: Connection, changed: Sequence[str]) -> None:
        for job in changed:
            self._queued.pop(job, None)
        for first in range(0, len(changed), AT_ONCE):
            in_batch = t.jobs.c.id.in_(changed[first : first + AT_ONCE])
            self._queued |= {job["id"]: job for job in _numbered(connection, t.jobs.c.state == "queued", in_batch)}


def _numbered(connection: Connection, *where: Any) -> list[Job]:
    """Jobs with the number of their arrival, which no step of the clock changes."""
    query = select(t.jobs, text("jobs.rowid AS number")).where(*where)
    return [dict(row) for row in connection.execute(query).mappings()]


def _used(spec: dict[str, Any]) -> tuple[str | None, ...]:
    data, objective = spec["data"], spec.get("objective", {})
    return data.get("train"), data.get("eval"), spec.get("init_from"), objective.get("reference")


def is_suspect(job: Job) -> bool:
    """Whether a job may be what ended its workers."""
    return job["tries"] >= SUSPECT_TRIES and job["step"] - job["tries_step"] < PROGRESS
