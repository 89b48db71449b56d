"""Brings jobs to the workers and back: the table of jobs says what shall be, and the controller makes it so.

Every round compares the database with what the scheduler wants and with what the workers hold. A server that was killed
therefore continues where it was. Only events of a job's present epoch count; an older writer changes nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from sqlalchemy import select

from lorafusion_jax.config.places import Places
from lorafusion_jax.serve.control.child import Answer, Child
from lorafusion_jax.serve.control.completions import Completions
from lorafusion_jax.serve.control.from_settings import make_launcher, make_scheduler
from lorafusion_jax.serve.control.hub import Connection, Hub
from lorafusion_jax.serve.control.launch import Launcher
from lorafusion_jax.serve.control.pace import Pace
from lorafusion_jax.serve.control.publish import deliveries
from lorafusion_jax.serve.control.scheduler import GROUP, Configuration, Scheduler, jobs_tried_alone, plan_of_row
from lorafusion_jax.serve.control.session import Session, SessionPlan, drained_sessions, maintenance
from lorafusion_jax.serve.control.spec import job_values, kind_of, stream_values
from lorafusion_jax.serve.control.sweep import Sweeper
from lorafusion_jax.serve.control.worker_events import StreamEvents, WorkerEvents
from lorafusion_jax.serve.refusals import completed, with_names
from lorafusion_jax.serve.settings import ONE_SESSION, Settings
from lorafusion_jax.serve.state_folders import states_beyond
from lorafusion_jax.serve.states import ON_WORKER, StateError
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.database import DailyCopy, Database, StoreError
from lorafusion_jax.serve.store.jobs import Job, Jobs, MayRun, is_suspect
from lorafusion_jax.serve.store.keys import Limits, note_use, user_limits
from lorafusion_jax.serve.wire import Message

ROUND_S = 0.1
CLOSE_S = 5.0  # of the ten in which a server ends; requests have three before
MOST_CHECKS = 8  # of the jobs of an owner that wait for a child
WRITE_S, SILENT_S = 5.0, 60.0  # between two looks whether the database takes writes; of no round, which is a failure
log = logging.getLogger("lorafusion.control")


class Streams(StreamEvents, Protocol):
    """Models of the training API: jobs whose rows come by requests."""

    def attach(self, hub: Hub) -> None: ...
    def look(self) -> None: ...
    def push_new(self, rows: Sequence[Job]) -> None: ...


class Controller:
    """Sessions on the devices of this machine.

    Args:
        streams: the models of the training API (None: it is not served).
        with_worker: False: jobs are checked and queued only.
        scheduler: decides which sessions there are (None: as the settings say).
        launcher: starts workers (None: as the settings say).

    Attributes:
        refused_decisions: decisions of the scheduler that did not take effect.
        completions: under way.
        used_keys: key → when it was last used, to be written.
    """

    def __init__(
        self,
        settings: Settings,
        db: Database,
        *,
        streams: Streams | None = None,
        with_worker: bool = True,
        scheduler: Scheduler | None = None,
        launcher: Launcher | None = None,
    ):
        self._with_worker = with_worker
        self._settings, self._db, self._jobs, self._rows = settings, db, Jobs(db), MayRun(db)
        self._events, self._streams = WorkerEvents(settings, db, self._jobs, streams), streams
        self.refused_decisions, self._problem, self.used_keys = 0, "", dict[str, float]()
        self._round_at, self._written_at, self._trouble = time.monotonic(), -WRITE_S, ""
        self._scheduler = scheduler or make_scheduler(settings)
        self._sessions: dict[str, Session] = {}
        self.child = Child(settings.child_memory)
        self.sweeper, self.daily_copy = Sweeper(settings, db), DailyCopy(db)
        self._deliveries = deliveries(settings, db)
        self._checks = ThreadPoolExecutor(1, "check")
        self._pace = Pace()
        self._checking: dict[str, str] = {}  # jobs in the child → owner
        self._ended = threading.Event()
        settings.make_socket_folder()
        self._hub = Hub(settings.socket, self._admit, self._take, tcp=settings.workers_at)
        self.completions = Completions(self._hub)
        if streams is not None:
            streams.attach(self._hub)
        self._launcher = launcher or make_launcher(settings, self._hub.address)
        self._thread = threading.Thread(target=self._loop, name="controller", daemon=True)
        if with_worker:
            self._adopt_sessions()
        self._hub.start()  # now that the sessions are there to which workers belong

    def start(self) -> None:
        self.sweeper.begin()
        self._thread.start()

    def close(self, *, stop_worker: bool = True) -> None:
        """Ends the controller. Workers save their jobs and end, or train on for a minute without a server.

        Whatever is under way, it takes `CLOSE_S`: a worker that saves for longer goes on without the server.
        """
        self._ended.set()
        until = time.monotonic() + CLOSE_S

        def left_s() -> float:
            return max(0.0, until - time.monotonic())

        self._checks.shutdown(wait=False, cancel_futures=True)
        self.child.close(left_s() / 2)
        if self._thread.is_alive():
            self._thread.join(left_s())
        sessions = list(self._sessions.values()) if stop_worker else []
        for session in sessions:
            session.terminate()
        for session in sessions:
            session.stop(left_s())
        self.completions.close()
        self._hub.close()
        self.daily_copy.close(left_s())
        for delivery in self._deliveries:
            delivery.close()
        self._launcher.close()

    @property
    def connected(self) -> bool:
        return bool(self._hub.connections)

    @property
    def refused_events(self) -> int:
        """Events and workers of old epochs."""
        return self._events.refused

    @property
    def ready(self) -> bool:
        """Whether jobs can train: a worker is ready, or opens when there is a job."""
        waits = not self._sessions and self._with_worker and self._settings.policy != ONE_SESSION
        return waits or any(session.trains for session in list(self._sessions.values()))

    @property
    def not_ready(self) -> str:
        """What its last round saw that keeps jobs from training, or nothing."""
        if time.monotonic() - self._round_at > SILENT_S:
            return f"the controller has not answered for {SILENT_S:g} s"
        return self._trouble or ("" if self.ready and self.connected else "no worker is ready")

    def is_connected(self, group: str) -> bool:
        return group in self._hub.connections

    def warm(self, base: str) -> list[str]:
        """Sessions of a base that train."""
        return [name for name, session in list(self._sessions.items()) if session.plan.base == base and session.trains]

    def places(self, group: str = GROUP) -> dict[int, str | None]:
        """Place of a session → job."""
        with self._db.read() as connection:
            on_worker = self._jobs.in_states(connection, *ON_WORKER)
        job_by_place = {job["place"]: job["id"] for job in on_worker if job["group"] == group}
        return {place: job_by_place.get(place) for place in range(len(self.layout(group).ranks))}

    def base_of(self, group: str) -> str:
        """Name of the base of a session."""
        session = self._sessions.get(group)
        return next(iter(self._settings.bases)) if session is None else session.plan.base

    def layout(self, group: str = GROUP) -> Places:
        """The places of a session; of one that does not exist, those of the settings."""
        session = self._sessions.get(group)
        return Places.of(self._settings.places if session is None else session.plan.places)

    @property
    def groups(self) -> list[str]:
        """Names of the sessions."""
        return list(self._sessions) or ([GROUP] if self._settings.policy == ONE_SESSION else [])

    def outlook(self, connection: Any, job: Job) -> dict[str, Any]:
        """Why a job waits and when it is expected to start, or how fast it trains and when it is expected to end."""
        if job["state"] in ("starting", "running"):
            return {"steps_per_s": self._pace.rate(job), "predicted_end": self._pace.end(job)}
        if job["state"] != "queued":
            return {}
        rows, limits = list(filter(_may_run, self._rows.read())), user_limits(connection)
        order = self._scheduler.order(rows, limits)
        position = next((at for at, row in enumerate(order) if row["id"] == job["id"]), len(order))
        obstacle = (
            self.problem or ("" if self.ready else self.not_ready) or maintenance(connection, self.warm(job["base"]))
        )
        why = obstacle or self._scheduler.full(job, rows, limits.get(job["owner"], Limits()))
        training = [row for row in rows if row["state"] in ON_WORKER]
        start = None if obstacle else self._pace.start(order[:position], training)
        return {"waits": {"position": position + 1, "why": why, "expected_start": start}}

    def _loop(self) -> None:
        while not self._ended.wait(ROUND_S):
            try:
                self._look_at_database()
                self._check_new()
                self.sweeper.work()
                self.daily_copy.look()
                if self._streams is not None:
                    self._streams.look()
                for delivery in self._deliveries:
                    delivery.look()
                if self._with_worker:
                    self._arrange()
                self._trouble = ""
            except StoreError as problem:  # busy or full: the next round tries again
                log.warning("%s", problem)
                self._trouble, self._written_at = f"{problem.what} {problem.why}", -WRITE_S
            except Exception:
                log.exception("a round of the controller failed")
                self._trouble = "a round of the controller failed, see the log"
            self._round_at = time.monotonic()

    def _look_at_database(self) -> None:
        if time.monotonic() - self._written_at >= WRITE_S:
            with self._db.write() as connection:
                note_use(connection, self.used_keys)
                self._written_at = time.monotonic()

    def _arrange(self) -> None:
        """Makes sessions and placements what the scheduler wants."""
        rows = list(filter(_may_run, self._rows.read()))
        with self._db.read() as connection:
            limits = user_limits(connection)
        ready = {name: session.trains for name, session in self._sessions.items()}
        self._scheduler.count_hosts(self._launcher.hosts)
        configuration = self._scheduler.decide(rows, ready, limits)
        self._pace.note(rows)
        self._record(configuration)
        self._record_problem()
        self._arrange_sessions(configuration)
        self._preempt(rows, configuration)
        self._place(rows, configuration)
        for session in self._sessions.values():
            session.send()
        if self._streams is not None:
            self._streams.push_new(rows)

    def _record(self, configuration: Configuration) -> None:
        if not configuration.decisions and not configuration.refused:
            return
        self.refused_decisions += len(configuration.refused)
        rows = [{"text": text, "refused": ""} for text in configuration.decisions]
        rows += [{"text": f"a decision of {policy}", "refused": why} for policy, why in configuration.refused]
        with self._db.write() as connection:
            for row in rows:
                connection.execute(t.decisions.insert().values(at=time.time(), **row))

    @property
    def problem(self) -> str:
        """Why no worker can be started now."""
        return self._launcher.problem

    def _record_problem(self) -> None:
        """Records that the cluster is away, or back."""
        if (problem := self.problem) == self._problem:
            return
        text = f"jobs wait: {problem}" if problem else "the cluster is back"
        log.warning("%s", text)
        with self._db.write() as connection:
            connection.execute(t.decisions.insert().values(at=time.time(), text=text))
        self._problem = problem

    def _arrange_sessions(self, configuration: Configuration) -> None:
        for name in [name for name in self._sessions if configuration.sessions.get(name) != self._sessions[name].plan]:
            if self._drain(name):
                self._sessions.pop(name).remove()
        for name, plan in configuration.sessions.items():
            neighbours = [session for session in self._sessions.values() if session.group != name]
            if name not in self._sessions and not any(_share_gpus(session.plan, plan) for session in neighbours):
                self._sessions[name] = self._new_session(name, plan)
        for name, session in self._sessions.items():
            try:
                session.watch()
            except StoreError:
                raise
            except ConnectionError as problem:  # the cluster is away
                log.warning("no worker of %s can be started: %s", name, problem)
            except Exception:  # sessions elsewhere go on
                log.exception("the worker of %s cannot be watched or started", name)

    def _new_session(self, name: str, plan: SessionPlan) -> Session:
        return Session(self._settings, self._db, self._jobs, self._hub, name, plan, self.values, self._launcher)

    def _drain(self, group: str) -> bool:
        """Asks the jobs of a session to leave it. Returns whether none is left."""
        with self._db.read() as connection:
            jobs = [job for job in self._jobs.in_states(connection, *ON_WORKER) if job["group"] == group]
        for job in jobs:
            self._ask_to_leave(job, "its session ends")
        return not jobs or not self._sessions[group].connected

    def _preempt(self, rows: list[Job], configuration: Configuration) -> None:
        """Takes jobs off sessions in which they shall not train."""
        lone_jobs = jobs_tried_alone(rows, configuration.group)
        for job in rows:
            if job["state"] not in ("starting", "running"):
                continue
            if configuration.group.get(job["id"]) != job["group"]:
                self._ask_to_leave(job, "it shall train elsewhere, or wait")
            elif lone_jobs.get(job["group"], job["id"]) != job["id"]:
                self._ask_to_leave(job, f"{lone_jobs[job['group']]} is tried alone, because its worker was lost")

    def _ask_to_leave(self, job: Job, why: str) -> None:
        if job["state"] != "draining":
            with self._db.write() as connection, suppress(StateError):
                self._jobs.ask(connection, job["id"], "preempt", actor="controller", why=why)

    def _adopt_sessions(self) -> None:
        """Goes on with the sessions of an earlier server."""
        with self._db.read() as connection:
            groups = [dict(row) for row in connection.execute(select(t.groups)).mappings()]
        rows = list(filter(_may_run, self._rows.read()))
        self._scheduler.adopt(groups, rows)
        for name, plan in self._scheduler.decide(rows, {}).sessions.items():
            self._sessions[name] = self._new_session(name, plan)
        for row in groups:
            session = self._sessions.get(row["id"])
            if session is None or not session.is_that_of(row):  # the service was started with other settings
                self._new_session(row["id"], plan_of_row(row)).remove(at_once=True)
        with self._db.write() as connection:
            for job in self._jobs.in_states(connection, *ON_WORKER):
                if job["group"] not in self._sessions:
                    self._jobs.lost(connection, job["id"], why="its session ended")

    def _check_new(self) -> None:
        with self._db.read() as connection:
            rows = self._jobs.unchecked(connection, [*self._settings.bases])
        checks = Counter(self._checking.values())
        for name, owner in rows:
            if name in self._checking or checks[owner] >= MOST_CHECKS:
                continue
            checks[owner] += 1
            self._checking[name] = owner
            with self._db.read() as connection:
                job = self._jobs.get(connection, name)
            answer = self.child.submit(f"{owner}, jobs", "check", self.question(job), most=MOST_CHECKS)
            answer.add_done_callback(lambda answer, job=job: self._on_check(job, answer))

    def _on_check(self, job: Job, answer: Future[Answer]) -> None:
        """Called by the thread of the child, which must not wait for the database."""
        if not answer.cancelled() and answer.exception() is None:
            with suppress(RuntimeError):  # the controller ends; the next server checks the job
                self._checks.submit(self._judge, job, answer.result())

    def _judge(self, job: Job, answer: Answer) -> None:
        try:
            verdict: Answer = self.verdict(job, answer)
        except Exception as problem:
            log.exception("the check of %s failed", job["id"])
            message = f"the job could not be checked: {problem}"
            verdict = {"problems": [completed({"code": "job.check", "what": message})]}
        try:
            with self._db.write() as connection:
                if verdict["problems"]:
                    why = verdict["problems"][0]["what"]
                    self._jobs.change(
                        connection, job["id"], "reject", actor="checker", why=why, problems=verdict["problems"]
                    )
                else:
                    sizes = {name: verdict[name] for name in ("steps", "tokens", "eval_tokens", "rank", "lengths")}
                    self._jobs.change(connection, job["id"], "accept", actor="checker", **sizes)
        except StateError:
            pass  # cancelled meanwhile
        except StoreError as problem:
            log.warning("%s", problem)  # it runs again
        finally:
            self._checking.pop(job["id"], None)

    def question(self, job: Job) -> dict[str, Any]:
        """Returns what a child is asked to check a job."""
        return {"values": self.values(job), "places": dict(self._settings.places)}

    def verdict(self, job: Job, answer: Answer) -> Answer:
        """Returns the problems of a job that a child has checked, or its steps and tokens."""
        problems = answer["problems"]
        if not problems and (why := self._scheduler.refuses(_row_of(job, answer))):
            fix = "fewer tokens in data.max_length, or a machine with more GPUs or memory"
            problems = [completed({"code": "job.too-large", "where": "base", "what": why, "fix": fix})]
        shown = {str(path): name for path, name in self._files(job).values()}  # as their owner calls them
        shown |= {f"{job['id']}: ": f"{job['spec'].get('name', 'it')}: ", str(self._settings.home): ""}
        return answer | {"problems": [with_names(entry, shown) for entry in problems]}

    def values(self, job: Job) -> dict[str, Any]:
        """Returns the job file of a job; of a model of the training API, which has no data, what its adapter is."""
        if "stream" in job["spec"]:
            return stream_values(job["spec"], job["id"], job["owner"], self._settings.path)
        spec, settings = job["spec"] | {"weight": job.get("weight", job["spec"]["weight"])}, self._settings
        files, folders = {dataset: path for dataset, (path, _) in self._files(job).items()}, dict[str | None, Path]()
        with self._db.read() as connection:
            start, reference = spec.get("init_from"), spec.get("objective", {}).get("reference")
            for adapter in filter(None, (start, reference)):
                path = connection.scalar(select(t.artifacts.c.path).where(t.artifacts.c.id == adapter))
                folders |= {} if path is None else {adapter: settings.path(path)}
        sections = {"base": settings.base, "batch": settings.batch, "mesh": settings.mesh, "train": settings.train}
        session = {name: dict(values) for name, values in sections.items()}
        base = settings.bases[job["base"]]
        start, reference = folders.get(start), folders.get(reference)
        return job_values(spec, job["id"], base=base, files=files, session=session, start=start, reference=reference)

    def _files(self, job: Job) -> dict[str, tuple[Path, str]]:
        """Returns where each data set of a job is, and its name as it was uploaded."""
        files, data = {}, job["spec"].get("data", {})
        with self._db.read() as connection:
            for dataset in filter(None, (data.get("train"), data.get("eval"))):
                row = connection.execute(select(t.datasets).where(t.datasets.c.id == dataset)).mappings().first()
                ending, name = ("jsonl", dataset) if row is None else (row["format"], row["name"])
                files[dataset] = self._settings.datasets / dataset / f"data.{ending}", name
        return files

    def _admit(self, hello: Message) -> int | str:
        with self._db.write() as connection:
            row = t.find_row(connection, t.groups, hello["hello"])
            if row is None or row["epoch"] != hello["epoch"]:
                self._events.refused += 1
                return f"epoch {hello['epoch']} of {hello['hello']} is over"
            connection.execute(t.groups.update().where(t.groups.c.id == row["id"]).values(pid=hello["pid"]))
            if row["id"] in self._sessions:
                self._sessions[row["id"]].adopt(row["state"])
            return row["received"]

    def _place(self, rows: list[Job], configuration: Configuration) -> None:
        """Gives free places of their sessions to queued jobs, those of higher priority first."""
        with self._db.read() as connection:
            drained = drained_sessions(connection)
            on_worker = self._jobs.in_states(connection, *ON_WORKER)  # also those that leave, to pause or to end
        occupied: dict[str, set[int]] = {}
        for job in on_worker:
            occupied.setdefault(job["group"], set()).add(job["place"])  # None: it is being written
        lone_jobs = jobs_tried_alone(rows, configuration.group)
        layouts = {name: Places.of(session.plan.places) for name, session in self._sessions.items() if session.trains}
        for job in rows:
            group = configuration.group.get(job["id"], "")
            if job["state"] != "queued" or group not in layouts or group in drained:
                continue
            plan = self._sessions[group].plan
            if configuration.sessions.get(group) != plan or plan.base != job["base"]:
                continue  # it ends
            if group in lone_jobs and (lone_jobs[group] != job["id"] or occupied.get(group)):
                continue
            place = layouts[group].find(kind_of(job["spec"]), job["rank"], occupied.get(group, set()))
            if place is None:
                continue
            later = states_beyond(self._settings.job(job["id"]) / "state", job["state_step"])
            with self._db.write() as connection, suppress(StateError):
                self._jobs.place(connection, job["id"], group=group, place=place)
                if later:
                    reason = f"the database knows the state of step {job['state_step']}, but not {later[0].name}"
                    data = {"step": job["state_step"], "reason": reason}
                    self._db.add_event(connection, "earlier-state", job["owner"], job["id"], data)
                text = f"{job['id']} ({job['name']} of {job['owner']}) starts in place {place} of {group}"
                connection.execute(t.decisions.insert().values(at=time.time(), text=text))
                occupied.setdefault(group, set()).add(place)

    def _take(self, source: Connection, event: Message) -> None:
        """Takes an event of a worker. A job whose event cannot be taken fails, and its worker drops it."""
        if event["event"] == "completed":
            self.completions.take(source, event)
        elif not self._events.take(source, event):
            if (job := event.get("job")) is not None:
                self._hub.send(source.group, {"command": "stop", "job": job, "epoch": event["epoch"]})
        elif event["event"] == "ready" and source.group in self._sessions:
            self._sessions[source.group].started()


def _share_gpus(first: SessionPlan, second: SessionPlan) -> bool:
    return first.host == second.host and bool(set(first.gpus) & set(second.gpus))


def _may_run(job: Job) -> bool:
    """Whether a job trains or waits to train, rather than to be paused, cancelled or written."""
    if job["state"] == "running" and job["place"] is None:
        return is_suspect(job)  # its export may be what ends its worker
    return job["state"] != "draining" or job["after_drain"] in (None, "preempt")


def _row_of(job: Job, verdict: dict[str, Any]) -> Job:
    """A job as it will be once it is accepted."""
    sizes = {name: verdict[name] for name in ("steps", "rank", "lengths", "eval_tokens")}
    return {"owner": "-", "weight": 1.0, "priority": 0} | job | sizes
