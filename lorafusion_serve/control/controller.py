"""Brings jobs to the worker and back: the table of jobs says what shall be, and the controller makes it so.

Every round compares the database with what the worker holds and sends what differs. A server that was killed therefore
continues where it was. Only events of a job's present epoch count; an older writer changes nothing.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from sqlalchemy import select

from lorafusion_jax.checkpoint.digests import digest_of, is_intact
from lorafusion_serve.control.child import Child
from lorafusion_serve.control.hub import Connection, Hub
from lorafusion_serve.control.spec import job_values
from lorafusion_serve.settings import Settings
from lorafusion_serve.states import ON_WORKER, StateError
from lorafusion_serve.store import tables as t
from lorafusion_serve.store.database import Database, StoreError
from lorafusion_serve.store.jobs import Job, Jobs
from lorafusion_serve.wire import Message

ROUND_S = 0.1
START_S = 180.0  # for a worker to start and connect
MOST_BACKOFF_S = 60.0
GROUP = "g0"
log = logging.getLogger("lorafusion.control")


class Controller:
    """One session on one set of devices.

    Args:
        with_worker: False: jobs are checked and queued only.

    Attributes:
        ready: whether the worker has opened its session.
        refused_events: events of old epochs.
    """

    def __init__(self, settings: Settings, db: Database, *, with_worker: bool = True):
        self._with_worker = with_worker
        self._settings, self._db, self._jobs = settings, db, Jobs(db)
        self.ready, self.refused_events, self.opened_s = False, 0, 0.0
        self._ranks = tuple(rank for rank, count in sorted(settings.places.items()) for _ in range(count))
        self._was_connected, self._failed_starts, self._not_before = False, 0, 0.0
        self._sent: set[tuple[str, int, str]] = set()  # commands of this connection: (job, epoch, command)
        self._weights: dict[tuple[str, int], float] = {}  # that the worker has, by (job, epoch)
        self._seen: Connection | None = None
        self._silent_since = time.monotonic()
        self._process: subprocess.Popen | None = None
        self.child = Child()
        self._checks = ThreadPoolExecutor(1, "check")
        self._checking: set[str] = set()
        self._ended = threading.Event()
        self._hub = Hub(settings.socket, self._admit, self._take)
        self._thread = threading.Thread(target=self._loop, name="controller", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, *, stop_worker: bool = True) -> None:
        """Ends the controller. The worker saves its jobs and ends, or trains on for a minute without a server."""
        self._ended.set()
        self._thread.join()
        if stop_worker and self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(60)
        self._hub.close()
        self._checks.shutdown(wait=False, cancel_futures=True)
        self.child.close()

    @property
    def connected(self) -> bool:
        return GROUP in self._hub.connections

    def places(self) -> dict[int, str | None]:
        """Place → job."""
        with self._db.read() as connection:
            taken = {job["place"]: job["id"] for job in self._jobs.in_states(connection, *ON_WORKER)}
        return {place: taken.get(place) for place in range(len(self._ranks))}

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._ranks

    def _loop(self) -> None:
        while not self._ended.wait(ROUND_S):
            try:
                self._check_new()
                if self._with_worker:
                    self._watch_worker()
                if self.ready and self.connected:
                    self._place()
                    self._send()
            except StoreError as problem:  # busy or full: the next round tries again
                log.warning("%s", problem)
            except Exception:
                log.exception("a round of the controller failed")

    def _check_new(self) -> None:
        with self._db.read() as connection:
            new = [j for j in self._jobs.in_states(connection, "checking") if j["id"] not in self._checking]
        for job in new:
            self._checking.add(job["id"])
            self._checks.submit(self._check, job)

    def _check(self, job: Job) -> None:
        found = self.run_check(job)
        try:
            with self._db.write() as connection:
                if found["problems"]:
                    why = found["problems"][0]["what"]
                    self._jobs.change(
                        connection, job["id"], "reject", actor="checker", why=why, problems=found["problems"]
                    )
                else:
                    sizes = {name: found[name] for name in ("steps", "tokens", "rank")}
                    self._jobs.change(connection, job["id"], "accept", actor="checker", **sizes)
        except StateError:
            pass  # cancelled meanwhile
        except StoreError:
            self._checking.discard(job["id"])

    def run_check(self, job: Job) -> dict[str, Any]:
        """Checks the data of a job in a child process: its problems, or its steps and tokens."""
        found = self.child.ask("check", {"values": self.values(job), "largest_rank": self._ranks[-1]})
        home = str(self._settings.home)
        found["problems"] = [{k: v.replace(home, "") for k, v in one.items()} for one in found["problems"]]
        return found

    def values(self, job: Job) -> dict[str, Any]:
        """Returns the job file of a job."""
        spec, settings = job["spec"] | {"weight": job.get("weight", job["spec"]["weight"])}, self._settings
        files, start = {}, None
        with self._db.read() as connection:
            for dataset in filter(None, (spec["data"]["train"], spec["data"].get("eval"))):
                row = connection.execute(select(t.datasets).where(t.datasets.c.id == dataset)).mappings().first()
                ending = "jsonl" if row is None else row["format"]
                files[dataset] = settings.datasets / dataset / f"data.{ending}"
            if spec.get("init_from"):
                found = connection.scalar(select(t.artifacts.c.path).where(t.artifacts.c.id == spec["init_from"]))
                start = None if found is None else Path(found)
        sections = {"base": settings.base, "batch": settings.batch, "mesh": settings.mesh, "train": settings.train}
        session = {name: dict(values) for name, values in sections.items()}
        base = settings.bases[job["base"]]
        return job_values(spec, job["id"], base=base, files=files, session=session, start=start)

    def _watch_worker(self) -> None:
        connection = self._hub.connections.get(GROUP)
        self._was_connected |= connection is not None
        if connection is not self._seen:
            self._seen, self._sent, self._weights = connection, set(), {}
            self._silent_since = time.monotonic()
        silent_s = time.monotonic() - (self._silent_since if connection is None else connection.contact)
        died = self._process is not None and self._process.poll() is not None
        if connection is not None and silent_s <= self._settings.lease_s:
            return
        lease_s = self._settings.lease_s if self._was_connected else max(START_S, self._settings.lease_s)
        if self._process is not None and not died and silent_s <= lease_s:
            return  # it starts, or connects again
        if died and time.monotonic() < self._not_before:
            return  # it ended before it was ready: not again at once
        adopted = self._process is None and connection is None and self._adoptable()
        if adopted and silent_s <= self._settings.lease_s:
            return  # a worker of an earlier server, which will connect
        self._replace_worker("it ended" if died else "no sign of it" if self._process or adopted else "no worker yet")

    def _adoptable(self) -> bool:
        with self._db.read() as connection:
            pid = connection.scalar(select(t.groups.c.pid).where(t.groups.c.id == GROUP))
        return pid is not None and _is_worker(pid)

    def _replace_worker(self, why: str) -> None:
        """Ends what is left of a worker, returns its jobs to the queue, and starts another one."""
        self.ready = False
        self._hub.drop(GROUP)
        with self._db.read() as connection:
            row = connection.execute(select(t.groups).where(t.groups.c.id == GROUP)).mappings().one_or_none()
        for pid in {self._process.pid if self._process else None, row["pid"] if row else None} - {None}:
            if _is_worker(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        with self._db.write() as connection:
            for job in self._jobs.in_states(connection, *ON_WORKER):
                self._jobs.lost(connection, job["id"], why=f"its worker was lost: {why}")
            epoch = 1 if row is None else row["epoch"] + 1
            connection.execute(t.groups.delete().where(t.groups.c.id == GROUP))
            values = {"id": GROUP, "base": next(iter(self._settings.bases)), "epoch": epoch, "state": "opening"}
            places = {str(rank): count for rank, count in self._settings.places.items()}
            drained = False if row is None else row["drained"]
            connection.execute(t.groups.insert().values(values | {"places": places, "drained": drained}))
            text = f"worker {GROUP}, epoch {epoch}: started, because {why}"
            connection.execute(t.decisions.insert().values(at=time.time(), text=text))
            self._db.add_event(connection, "worker", "admin", None, {"group": GROUP, "epoch": epoch, "why": why})
        self._failed_starts += 1  # until it is ready
        self._spawn(epoch)
        self._silent_since, self._was_connected = time.monotonic(), False
        self._not_before = self._silent_since + min(2.0**self._failed_starts, MOST_BACKOFF_S)

    def _spawn(self, epoch: int) -> None:
        settings = self._settings
        told = {
            "socket": str(settings.socket),
            "group": GROUP,
            "epoch": epoch,
            "beat_s": min(settings.lease_s / 6, 5.0),
            "base": {**settings.base, "model": str(next(iter(settings.bases.values())))},
            "mesh": dict(settings.mesh),
            "places": {str(rank): count for rank, count in settings.places.items()},
            "batch": dict(settings.batch),
            "train": dict(settings.train),
            "reproducible": settings.reproducible,
            "save_s": settings.save_s,
        }
        file = settings.log(GROUP)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lorafusion_serve.worker", json.dumps(told)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # it outlives a server that is killed
            )

    def _admit(self, hello: Message) -> int | str:
        with self._db.write() as connection:
            row = connection.execute(select(t.groups).where(t.groups.c.id == hello["hello"])).mappings().one_or_none()
            if row is None or row["epoch"] != hello["epoch"]:
                self.refused_events += 1
                return f"epoch {hello['epoch']} of {hello['hello']} is over"
            connection.execute(t.groups.update().where(t.groups.c.id == GROUP).values(pid=hello["pid"]))
            self.ready = row["state"] == "ready"
            return row["received"]

    def _place(self) -> None:
        """Gives free places to queued jobs, those of higher priority first."""
        with self._db.read() as connection:
            queued = self._jobs.in_states(connection, "queued")
            taken = {job["place"] for job in self._jobs.in_states(connection, *ON_WORKER)}
            drained = connection.scalar(select(t.groups.c.drained).where(t.groups.c.id == GROUP))
        if drained:
            return
        for job in queued:
            free = [place for place, most in enumerate(self._ranks) if most >= job["rank"] and place not in taken]
            if len(taken) == len(self._ranks):
                break
            if not free:
                continue
            with self._db.write() as connection, suppress(StateError):
                self._jobs.place(connection, job["id"], group=GROUP, place=free[0])
                text = f"{job['id']} ({job['name']} of {job['owner']}) starts in place {free[0]}"
                connection.execute(t.decisions.insert().values(at=time.time(), text=text))
                taken.add(free[0])

    def _send(self) -> None:
        """Sends the commands that the worker does not have yet."""
        with self._db.read() as connection:
            jobs = self._jobs.in_states(connection, *ON_WORKER)
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
                    values=self.values(job),
                    state=job["state_path"],
                    folder=str(self._settings.job(job["id"])),
                )
            if job["state"] == "running" and self._weights.get((job["id"], job["epoch"])) != job["weight"]:
                self._send_weight(job)
            if job["state"] == "running" and self._seen is not None and not self._sent_any(job):
                held = any((own["job"], own["epoch"]) == (job["id"], job["epoch"]) for own in self._seen.holds)
                self._sent.add((job["id"], job["epoch"], "seen"))
                if not held:
                    with self._db.write() as connection, suppress(StateError):
                        self._jobs.lost(connection, job["id"], why="its worker does not have it")

    def _send_weight(self, job: Job) -> None:
        message = {"command": "weight", "job": job["id"], "epoch": job["epoch"], "weight": job["weight"]}
        if self._hub.send(GROUP, message):
            self._weights[job["id"], job["epoch"]] = job["weight"]

    def _sent_any(self, job: Job) -> bool:
        return any((name, epoch) == (job["id"], job["epoch"]) for name, epoch, _ in self._sent)

    def _send_once(self, job: Job, what: str, **data: Any) -> None:
        key = (job["id"], job["epoch"], what)
        if key in self._sent:
            return
        message = {"command": what, "job": job["id"], "epoch": job["epoch"]} | data
        if self._hub.send(GROUP, message):
            self._sent.add(key)

    def _take(self, source: Connection, event: Message) -> None:
        """Takes an event of the worker: what it changes, and its number, are one transaction."""
        with self._db.write() as connection:
            group = connection.execute(select(t.groups).where(t.groups.c.id == source.group)).mappings().one()
            if group["epoch"] != source.epoch or event["number"] <= group["received"]:
                self.refused_events += group["epoch"] != source.epoch
                return
            kind, job = event["event"], event.get("job")
            values: dict[str, Any] = {"received": event["number"]}
            if kind == "ready":
                values |= {"state": "ready", "device": event["device"]}
            elif kind == "not-opened":
                values |= {"state": "failed"}
                log.error("the session could not be opened: %s", event["reason"])
            connection.execute(t.groups.update().where(t.groups.c.id == source.group).values(values))
            if job is not None:
                self._take_of_job(connection, self._jobs.get(connection, job), event)
        if kind == "ready":
            self.ready, self._failed_starts = True, 0

    def _take_of_job(self, connection: Any, job: Job, event: Message) -> None:
        if event["epoch"] != job["epoch"] or job["state"] not in ON_WORKER:
            self.refused_events += 1  # a writer of an earlier placement
            return
        kind, name, actor = event["event"], job["id"], f"worker {GROUP}"
        match kind:
            case "started":
                if job["state"] in ("starting", "draining"):
                    self._jobs.change(connection, name, "started", actor=actor, steps=event.get("steps", job["steps"]))
            case "stepped":
                self._take_rows(connection, job, event["rows"])
            case "saved":
                self._keep_state(connection, job, event)
            case "not-saved":
                self._db.add_event(connection, "not-saved", job["owner"], name, {"reason": event["reason"]})
            case "stopped":
                self._keep_state(connection, job, event)
                if job["state"] == "draining":
                    self._jobs.change(connection, name, "stopped", actor=actor)
                else:  # the worker ends in good order
                    self._jobs.change(connection, name, "lost", actor=actor, why="its worker ended")
            case "failed":
                self._jobs.change(connection, name, "failed", actor=actor, why=event["reason"], step=event["step"])
            case "finished":
                self._take_adapter(connection, job, event)
            case "gone":
                self._jobs.lost(connection, name, why="its worker does not have it")

    def _take_rows(self, connection: Any, job: Job, rows: list[dict[str, Any]]) -> None:
        self._jobs.add_metrics(connection, job["id"], rows)
        steps = [row for row in rows if row["kind"] == "step"]
        if steps:
            self._jobs.set(connection, job["id"], step=steps[-1]["step"], loss=steps[-1]["loss"])
        for row in rows:
            self._db.add_event(connection, row["kind"], job["owner"], job["id"], row)

    def _keep_state(self, connection: Any, job: Job, event: Message) -> None:
        """Makes a written state the current one. Older ones are removed once nothing can need them."""
        if event["path"] is None or event["step"] < job["state_step"]:
            return
        self._jobs.set(connection, job["id"], state_path=event["path"], state_step=event["step"], step=event["step"])
        keep = {event["path"], job["state_path"]}
        for folder in (self._settings.job(job["id"]) / "state").glob("e*-s*"):
            if str(folder) not in keep:
                shutil.rmtree(folder, ignore_errors=True)

    def _take_adapter(self, connection: Any, job: Job, event: Message) -> None:
        folder, actor = Path(event["path"]), f"worker {GROUP}"
        if not is_intact(folder):
            why = f"{folder.name} was exported and is damaged"
            self._jobs.change(connection, job["id"], "failed", actor=actor, why=why, step=event["step"])
            return
        row = {
            "id": f"adapter-{job['id'].removeprefix('job-')}",
            "job": job["id"],
            "owner": job["owner"],
            "step": event["step"],
            "path": str(folder),
            "sha256": digest_of(folder / "SHA256SUMS"),
            "created": time.time(),
        }
        connection.execute(t.artifacts.delete().where(t.artifacts.c.id == row["id"]))
        connection.execute(t.artifacts.insert().values(row))
        self._jobs.change(connection, job["id"], "finished", actor=actor, step=event["step"], state_path=None)
        shutil.rmtree(self._settings.job(job["id"]) / "state", ignore_errors=True)


def _is_worker(pid: int) -> bool:
    """Whether a process is a worker of this program; its number may have gone to another one."""
    try:
        return b"lorafusion_serve.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
