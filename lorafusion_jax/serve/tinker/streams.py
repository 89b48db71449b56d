"""What the controller does for models: it sends their requests to workers in order, and takes the answers.

A model is a job of the table of jobs, which has a place like others; its steps are the numbers of its requests.
"""

from __future__ import annotations

import logging
import re
import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from sqlalchemy import Connection, select

from lorafusion_jax.serve.api.problems import ApiError
from lorafusion_jax.serve.control.hub import Hub
from lorafusion_jax.serve.settings import Settings
from lorafusion_jax.serve.states import ENDED, StateError
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.database import Database
from lorafusion_jax.serve.store.jobs import Job, Jobs
from lorafusion_jax.serve.store.keys import Limits, user_limits
from lorafusion_jax.serve.tinker import checkpoints, futures
from lorafusion_jax.serve.tinker.bodies import Receiver
from lorafusion_jax.serve.tinker.futures import SERVER, USER, Row, Waiters
from lorafusion_jax.serve.tinker.log import (
    ALIVE_S,
    GAP_S,
    find_model,
    find_request,
    forget_request,
    forget_requests,
    future_of,
    next_requests,
    overdue_requests,
    payload_of,
    skip,
    waiting_samples,
)
from lorafusion_jax.serve.wire import Message

SAVES = ("save_weights", "save_weights_for_sampler", "save_weights_external")
JUMP_S = 30.0  # by which the clock of the machine is set, or which it sleeps; less is not seen
LOOK_S = 1.0  # between two looks at sessions and futures whose time is over
IS_CHECKPOINT = t.removals.c.path.startswith("checkpoints/")
log = logging.getLogger("lorafusion.control")


class Streams:
    """The models of a service.

    Attributes:
        waiters: who waits for futures.
        receiver: of bodies.
        secret: signs URLs of downloads.
        reads: futures whose results were sent.
        deleted: owner and path of checkpoints that were removed last.
    """

    def __init__(self, settings: Settings, db: Database):
        self.settings, self.db, self.jobs = settings, db, Jobs(db)
        self.waiters, self.receiver, self.secret = Waiters(), Receiver(), secrets.token_bytes(32)
        self._hub: Hub | None = None
        self._sending = threading.Lock()
        self._sent: dict[str, tuple[int, int, int]] = {}  # job → epoch, number of the connection, last request sent
        self._samples: tuple[int, set[str]] = (-1, set())  # number of the connection, futures of samples sent to it
        self._done: deque[str] = deque()  # futures to wake once their transaction is on the disk
        self._unneeded: deque[str] = deque()  # files to remove then
        self.reads: deque[str] = deque()
        self.deleted: deque[tuple[str, str]] = deque(maxlen=1000)
        self._looked, self._judges_from = 0.0, 0.0
        self._clock = time.time() - time.monotonic()

    def attach(self, hub: Hub) -> None:
        """Names the connections to workers."""
        self._hub = hub

    def push(self, job: str) -> None:
        """Sends the requests of a model that its worker does not have yet."""
        with self._sending:
            with self.db.read() as connection:
                row = self.jobs.get(connection, job)
                worker = None if self._hub is None else self._hub.connections.get(row["group"] or "")
                if row["state"] != "running" or worker is None or self._hub is None:
                    return
                epoch, number, last = self._sent.get(job, (0, 0, 0))
                if (epoch, number) != (row["epoch"], worker.number):
                    last = row["state_step"]
                requests = next_requests(connection, row["spec"]["stream"]["model"], last)
            for request in requests:
                if not self._hub.send(worker.group, self._command(row, request)):
                    break
                last = request["seq"]
            self._sent[job] = row["epoch"], worker.number, last

    def push_samples(self) -> None:
        """Sends the samples that the worker does not have yet: all again, if it has connected again."""
        with self._sending:
            worker = None if self._hub is None else next(iter(self._hub.connections.values()), None)
            if worker is None or self._hub is None:
                return
            number, futures_at_worker = self._samples
            if number != worker.number:
                futures_at_worker = set()
            with self.db.read() as connection:
                keys = waiting_samples(connection)
                fresh_keys = [(stream, seq) for stream, seq in keys if future_of(stream, seq) not in futures_at_worker]
                requests = [find_request(connection, *request) for request in fresh_keys]
            futures_at_worker &= {future_of(*request) for request in keys}
            for request in filter(None, requests):
                future, values = future_of(request["stream"], request["seq"]), dict(request["body"])
                folder = values.pop("folder")
                message = {"command": "sample", "future": future, "values": values["request"]}
                message |= {"folder": None if folder is None else str(self.settings.path(folder))}
                message |= {"result": str(self.settings.path(result_of(request["stream"], request["seq"])))}
                if not self._hub.send(worker.group, message):
                    break
                futures_at_worker.add(future)
            self._samples = worker.number, futures_at_worker

    def cancel(self, future: str) -> None:
        """Ends samples whose future has ended."""
        self.waiters.wake([future])
        with self._sending:
            for worker in [] if self._hub is None else list(self._hub.connections.values()):
                if self._hub is not None:
                    self._hub.send(worker.group, {"command": "cancel", "future": future})

    def push_new(self, rows: Sequence[Job]) -> None:
        """Sends the requests of models that have come to a worker, or whose worker has connected again."""
        workers = [] if self._hub is None else list(self._hub.connections.values())
        if workers and workers[0].number != self._samples[0]:
            self.push_samples()
        for row in rows:
            if row["state"] == "running" and is_stream(row) and self._hub is not None:
                worker = self._hub.connections.get(row["group"])
                if worker is not None and self._sent.get(row["id"], (0, 0, 0))[:2] != (row["epoch"], worker.number):
                    self.push(row["id"])

    def _command(self, job: Job, request: dict[str, Any]) -> Message:
        path = None if request["path"] is None else str(self.settings.path(request["path"]))
        message = {"command": "request", "job": job["id"], "epoch": job["epoch"], "seq": request["seq"]}
        message |= {"kind": request["kind"], "values": request["body"], "path": path, "sha256": request["sha256"]}
        message |= {"bytes": request["bytes"]}
        folder = request["body"].get("folder")
        if request["kind"] in SAVES:
            folder = checkpoints.checkpoint_folder(request["stream"], request["seq"])
        if folder:
            message["values"] = request["body"] | {"folder": str(self.settings.path(folder))}
        return message | {"result": str(self.settings.path(result_of(request["stream"], request["seq"])))}

    def started(self, connection: Connection, job: Job) -> None:
        """Takes that a model has its place: it can be used from now on."""
        model = job["spec"]["stream"]["model"]
        result = {"model_id": model, **job["spec"]["stream"]["answer"]}
        if futures.complete(connection, future_of(model, 0), result):
            self._done.append(future_of(model, 0))

    def answered(self, connection: Connection, job: Job, event: Message) -> str:
        """Takes the answer to a request. That of one that runs again after a lost worker is there already.

        Returns why the model is not the one that its client was told of; empty: it is.
        """
        stream, seq = job["spec"]["stream"]["model"], event["seq"]
        future = future_of(stream, seq)
        if (error := event.get("error")) is not None:
            first = futures.find_future(connection, future, None)
            if first is not None and first["state"] == "done" and not event.get("ran"):
                return f"request {seq} ran again after a lost worker, and failed then: {error}"
            futures.fail(connection, future, error, event["category"])
        elif (request := find_request(connection, stream, seq)) is not None and request["kind"] in SAVES:
            self._record(connection, future, request, event["result"]["bytes"])
        else:
            values = {}
            if event.get("sha256"):
                values = {"path": result_of(stream, seq), "sha256": event["sha256"], "bytes": event["bytes"]}
            futures.complete(connection, future, event["result"], **values)
        self.jobs.set(connection, job["id"], step=max(seq, job["step"]))
        self._done.append(future)
        return ""

    def sampled(self, connection: Connection, event: Message) -> None:
        """Takes samples."""
        future, (stream, _, seq) = event["future"], event["future"].rpartition(":")
        if (error := event.get("error")) is not None:
            futures.fail(connection, future, error, event["category"])
        else:
            path = result_of(stream, int(seq))
            futures.complete(connection, future, {}, path=path, sha256=event["sha256"], bytes=event["bytes"])
        forget_request(connection, stream, int(seq))
        self._done.append(future)

    def _record(self, connection: Connection, future: str, request: Row, size: int) -> None:
        """Adds what a request has saved. That of one that runs again is there already, or was removed since."""
        row = futures.find_future(connection, future, None)
        if row is None or row["state"] != "waiting":
            return
        try:
            result, folders = checkpoints.record(
                connection, find_model(connection, request["stream"], None), request, size
            )
        except ApiError as problem:
            futures.fail(connection, future, f"{problem.error['what']} {problem.error['fix']}", USER)
            self.remove(connection, checkpoints.checkpoint_folder(request["stream"], request["seq"]))
            return
        futures.complete(connection, future, result)
        for folder in folders:
            self.remove(connection, folder)

    def remove(self, connection: Connection, folder: str) -> None:
        """Removes the folder of a checkpoint: with the next `taken`, or once no request or model needs it.

        The next server does it if this one is killed before.
        """
        connection.execute(t.removals.insert().prefix_with("OR IGNORE").values(path=folder))
        if folder not in checkpoints.folders_in_use(connection):
            self._unneeded.append(folder)

    def _weights(self, connection: Connection) -> dict[str, float]:
        """Weights of models that change: their owner's. Its models that have rows share it, see `Turns`."""
        limits = user_limits(connection)
        models = {row["id"]: row for row in self.jobs.in_states(connection, "running") if is_stream(row)}
        shares = {job: limits.get(row["owner"], Limits()).share for job, row in models.items()}
        return {job: share for job, share in shares.items() if models[job]["weight"] != share}

    def kept(self, connection: Connection, job: Job, step: int) -> None:
        """Takes that a state of a model is on the disk: requests up to it never run again."""
        self._unneeded.extend(forget_requests(connection, job["spec"]["stream"]["model"], step))

    def taken(self) -> None:
        """Called once what was taken is on the disk."""
        with suppress(IndexError):
            names = []
            while self._done:
                names.append(self._done.popleft())
            self.waiters.wake(names)
        with suppress(IndexError):
            while self._unneeded:
                path = self.settings.path(self._unneeded.popleft())
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)

    def look(self) -> None:
        """Looks at what ends by time: sessions without a sign of their client, futures, models that have ended."""
        if time.monotonic() - self._looked < LOOK_S:
            return
        self._looked = time.monotonic()
        judges = self._judges()
        reads = [self.reads.popleft() for _ in range(len(self.reads))]
        with self.db.read() as connection:
            leaving, returning, over = _models_to_change(connection)
            leaving = leaving if judges else []
            overdue = connection.execute(select(t.api_futures.c.id).where(t.api_futures.c.until < time.time()).limit(1))
            has_expired = overdue.first() is not None or bool(checkpoints.count_expired(connection))
            weights, gaps = self._weights(connection), overdue_requests(connection) if judges else []
            removals = set(connection.execute(select(t.removals.c.path).where(IS_CHECKPOINT)).scalars())
            unneeded = removals - checkpoints.folders_in_use(connection) if removals else set()
        removed = {folder for folder in removals if not self.settings.path(folder).exists()}
        self._unneeded.extend(unneeded - removed)
        if not (leaving or returning or over or reads or has_expired or weights or gaps or removed):
            self.taken()
            return
        with self.db.write() as connection:
            for job, weight in weights.items():
                self.jobs.set(connection, job, weight=weight)
            for future in reads:
                futures.note_read(connection, future)
            skipped = [(find_model(connection, stream, None), seq) for stream, seq in gaps]
            for model, seq in skipped:
                skip(connection, model, seq)
            changes = [(model, "pause", "no sign of its client") for model in leaving]
            for model, event, why in (*changes, *((model, "continue", "a request") for model in returning)):
                with suppress(StateError):
                    self.jobs.ask(connection, model["job"], event, actor="controller", why=why)
            for model in over:
                why, category = (model["reason"], SERVER) if model["state"] == "failed" else ("it was ended", USER)
                message = f"the model takes no requests any more: {why}"
                self._done.extend(futures.fail_waiting(connection, model["id"], message, category))
                self._unneeded.extend(forget_requests(connection, model["id"]))
            self._unneeded.extend(futures.remove_expired(connection))
            for folder in checkpoints.remove_expired(connection):
                self.remove(connection, folder)
            connection.execute(t.removals.delete().where(t.removals.c.path.in_(removed)))
        for model, _ in skipped:
            self.push(model["job"])
        self.taken()

    def _judges(self) -> bool:
        """Whether the times of clients can be compared with now: not soon after the clock was set, or stood still."""
        clock = time.time() - time.monotonic()
        if abs(clock - self._clock) > JUMP_S:
            log.warning("the clock has moved by %.0f s beside the time that has passed", clock - self._clock)
            self._judges_from = time.monotonic() + GAP_S
        self._clock = clock
        return time.monotonic() >= self._judges_from


def _models_to_change(connection: Connection) -> tuple[list[Row], list[Row], list[Row]]:
    """Models whose client has gone, models that left and are asked for again, and models that have ended."""
    models, jobs, sessions = t.api_models, t.jobs, t.api_sessions
    columns = select(models.c.id, models.c.job, jobs.c.state, jobs.c.reason, sessions.c.beat, sessions.c.ended)
    both = columns.join(jobs, jobs.c.id == models.c.job).join(sessions, sessions.c.id == models.c.session)
    is_requested = models.c.id.in_(select(t.api_futures.c.stream).where(t.api_futures.c.state == "waiting"))
    is_silent = sessions.c.beat < time.time() - ALIVE_S
    conditions = (
        jobs.c.state.in_(("queued", "starting", "running")) & is_silent,
        (jobs.c.state == "paused") & ~is_silent & is_requested,
        jobs.c.state.in_((*ENDED, "deleted")) & is_requested,
    )
    leaving, returning, over = (
        [dict(row) for row in connection.execute(both.where(where)).mappings()] for where in conditions
    )
    return leaving, returning, over


def is_stream(job: Job) -> bool:
    """Whether a job is a model of the training API."""
    return "stream" in job["spec"]


def result_of(stream: str, seq: int) -> str:
    """Where the result of a request is, relative to the home."""
    return re.sub(r"pb$", "out", payload_of(stream, seq))
