"""Models of the training API in a worker: their requests become calls of a stream, and results become files and events.

Threads read payloads and write results, while slots run. A model's state is saved between two of its requests, where no
gradients wait for a step; what comes after the newest state is in the server's log, and runs again if the worker is
lost.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lorafusion_jax.errors import CallError, LoraFusionError, ServerCallError
from lorafusion_jax.files import replace_bytes
from lorafusion_jax.serve.state_folders import check_home, state_folder
from lorafusion_jax.serve.tinker.datums import DatumError, Sparse, read_batch, write_outputs
from lorafusion_jax.serve.wire import Message
from lorafusion_jax.serve.worker.link import Link
from lorafusion_jax.session import AdapterState, Session, Task
from lorafusion_jax.session.calls import (
    Call,
    ForwardBackward,
    LoadState,
    OptimStep,
    Row,
    RowsResult,
    SaveState,
    StepDone,
    dense,
)
from lorafusion_jax.session.export import export_task
from lorafusion_jax.session.places import PlaceWeights
from lorafusion_jax.session.stream import Stream

LARGEST_LOG = 256 << 20  # bytes of payloads after which a state is saved, however young the last one is


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What was read of a model: its state, or the weights that it starts from."""

    task: Task
    state: AdapterState | None
    first: PlaceWeights | None


@dataclass(slots=True, kw_only=True, eq=False)
class Model:
    """A model in the session, or on its way into it.

    Attributes:
        loading: None once it has started.
        stream: None until it has started.
        received: last request that was received.
        adds: whether gradients that were submitted wait for a step.
        unanswered: requests whose answers are not emitted.
        state, kept: newest state on the disk, and the request that it follows.
        saving: a state that is read or written, and the request that it follows.
        saved_at, log_bytes: when the last state was read, and the bytes of payloads since.
        leaves: whether the server has asked for it back; then its last state is saved once.
    """

    job: str
    epoch: int
    folder: Path
    wanted_place: int
    state: Path | None
    loading: Future[Loaded] | None
    received: int
    kept: int
    stream: Stream | None = None
    adds: bool = False
    unanswered: set[int] = field(default_factory=set[int])
    saving: Future[None] | None = None
    saved_at: float = 0.0
    log_bytes: int = 0
    leaves: bool = False
    last_save: bool = False
    ended: bool = False


class Models:
    """The models of a worker. Methods are called by its loop, but for `holds`.

    Args:
        save_s: seconds between two saves of the state of a model.
        wake: ends the wait of the loop.
    """

    def __init__(self, session: Session, link: Link, *, save_s: float, wake: Callable[[], None]):
        self._session, self._link, self._save_s, self._wake = session, link, save_s, wake
        self._models: dict[str, Model] = {}
        self._newest: dict[str, int] = {}
        self._readers = ThreadPoolExecutor(1, "payloads")  # one, because calls of a model have an order
        self._answers = ThreadPoolExecutor(1, "answers")
        self._writer = ThreadPoolExecutor(1, "model-states")

    def holds(self) -> list[Message]:
        """What a server that has just started is told."""
        return [{"job": model.job, "epoch": model.epoch} for model in list(self._models.values())]

    def __contains__(self, job: str) -> bool:
        return job in self._models

    def start(self, command: Message) -> None:
        """Begins to read a model, which starts in one of the next rounds."""
        job, epoch, model = command["job"], command["epoch"], self._models.get(command["job"])
        if epoch <= self._newest.get(job, 0):  # asked again after a connection was lost; it may have ended since
            if model is not None and model.stream is not None:
                self._link.emit("started", job=job, epoch=model.epoch)
            return
        if model is not None:
            self._end(model, None)
        self._newest[job] = epoch
        state = None if command["state"] is None else Path(command["state"])
        seq = 0 if state is None else int(state.name.rpartition("s")[2])
        self._models[job] = Model(
            job=job,
            epoch=epoch,
            folder=Path(command["folder"]),
            wanted_place=command["place"],
            state=state,
            loading=self._readers.submit(self._load, command["values"]["stream"], state),
            received=seq,
            kept=seq,
            saved_at=time.monotonic(),
        )

    def _load(self, values: dict[str, Any], state: Path | None) -> Loaded:
        options = {key: values[key] for key in ("rank", "alpha", "seed", "targets", "owner")}
        task, load = self._session.new_stream(values["name"], **options), values["load"]
        if state is not None:
            return Loaded(task=task, state=AdapterState.read(state, task.adapter), first=None)
        if load is None:
            return Loaded(task=task, state=None, first=self._session.draw(task))
        checkpoint = AdapterState.read(Path(load["folder"]), task.adapter)
        if load["optimizer"]:
            return Loaded(task=task, state=checkpoint, first=None)
        return Loaded(task=task, state=None, first=PlaceWeights(spec=task.spec, leaves=checkpoint.weights))

    def execute(self, command: Message) -> None:
        """Takes a command about a model."""
        model = self._models[command["job"]]
        if model.epoch != command["epoch"]:
            self._link.emit("gone", job=model.job, epoch=command["epoch"])
        elif command["command"] == "stop":
            model.leaves = True
        elif command["command"] == "weight" and model.stream is not None:
            model.stream.reweight(command["weight"])
        elif command["command"] == "request" and command["seq"] == model.received + 1 and not model.leaves:
            model.received += 1
            model.unanswered.add(command["seq"])
            self._readers.submit(self._read, model, command)

    def advance(self) -> None:
        """Starts what was read, and ends what leaves."""
        for model in list(self._models.values()):
            if model.loading is not None and model.loading.done() and not model.leaves:
                self._start_loaded(model, model.loading)
            if model.leaves:
                self._leave(model)

    def _start_loaded(self, model: Model, loading: Future[Loaded]) -> None:
        try:
            loaded = loading.result()
            self._session.start(model.wanted_place, loaded.task, loaded.state, loaded.first, sums=True)
        except Exception as problem:  # whatever it is, others do not fail with it
            self._end(model, "failed", step=model.kept, reason=str(problem) or type(problem).__name__)
            return
        assert isinstance(loaded.task.source, Stream)
        model.stream, model.loading = loaded.task.source, None
        model.stream.wake = self._wake
        self._link.emit("started", job=model.job, epoch=model.epoch)

    def _leave(self, model: Model) -> None:
        """Ends a model that was asked for, with a state of its last request if it has nothing to do."""
        if model.saving is not None and not model.saving.done():
            return
        has_news = not model.adds and not model.unanswered and model.received > model.kept
        if model.stream is not None and has_news and not model.last_save:
            model.last_save = True
            self._save(model, model.stream, model.received)
            return
        path = None if model.state is None else str(model.state)
        self._end(model, "stopped", step=model.kept, path=path)

    def leave_all(self, run: Callable[[], object]) -> None:
        """Ends all models; `run` runs what they wait for."""
        for model in self._models.values():
            model.leaves = True
        while self._models:
            run()
            self.advance()
            time.sleep(0.005)
        for pool in (self._readers, self._answers, self._writer):
            pool.shutdown(wait=True, cancel_futures=True)

    def _end(self, model: Model, kind: str | None, **data: Any) -> None:
        model.ended = True
        if model.stream is not None:
            self._session.forget(model.job)
        if kind is not None:  # behind its answers
            self._answers.submit(self._link.emit, kind, job=model.job, epoch=model.epoch, **data).result()
        del self._models[model.job]  # last: what a worker neither holds nor told of is lost

    # In the thread of payloads.

    def _read(self, model: Model, command: Message) -> None:
        """Submits the call of a request, and then a save if it is time for one."""
        assert model.stream is not None
        answer = partial(self._answer, model, command)
        try:
            call = call_of(command, self._session.tasks[model.job])
        except Exception as problem:  # whatever it is, later requests run
            call = None
            answer(_failed(problem))
        if call is not None:
            if isinstance(call, OptimStep | LoadState):
                model.adds = False
            model.adds = model.adds or (isinstance(call, ForwardBackward) and not call.forward_only)
            model.stream.submit(call).add_done_callback(answer)
        model.log_bytes += command["bytes"]
        is_due = time.monotonic() - model.saved_at > self._save_s or model.log_bytes > LARGEST_LOG
        is_saved = model.saving is None or model.saving.done()
        if is_due and is_saved and not model.adds and not model.leaves:
            self._save(model, model.stream, command["seq"])

    def _save(self, model: Model, stream: Stream, seq: int) -> None:
        """Reads the state after a request, and has it written."""
        model.saving = Future()
        model.saved_at, model.log_bytes = time.monotonic(), 0
        stream.submit(SaveState()).add_done_callback(lambda state: self._writer.submit(self._write, model, seq, state))

    # In the thread of states.

    def _write(self, model: Model, seq: int, state: Future[AdapterState]) -> None:
        assert model.saving is not None
        try:
            check_home(model.folder)
            path = state.result().write(state_folder(model.folder, model.epoch, seq))
        except LoraFusionError as problem:
            if not model.ended:
                self._link.emit("not-saved", job=model.job, epoch=model.epoch, reason=str(problem))
        else:
            self._answers.submit(self._note_saved, model, seq, path).result()
        finally:
            model.saving.set_result(None)
            self._wake()

    # In the thread of answers.

    def _note_saved(self, model: Model, seq: int, path: Path) -> None:
        """Says that a state is there. All requests before it were answered before: their results are waited for."""
        if not model.ended:
            model.state, model.kept = path, seq
            self._link.emit("saved", job=model.job, epoch=model.epoch, step=seq, path=str(path))

    def _answer(self, model: Model, command: Message, future: Future[Any]) -> None:
        """Has the result of a call written and told. Called by whatever thread completes it."""
        self._answers.submit(self._tell, model, command, future)

    def _tell(self, model: Model, command: Message, future: Future[Any]) -> None:
        problem = future.exception()
        if model.ended or (isinstance(problem, CallError) and problem.code == "call.closed"):
            return  # it runs again from the newest state
        answer: dict[str, Any] = {"job": model.job, "epoch": model.epoch, "seq": command["seq"]}
        if problem is not None:
            answer |= {"error": _sentence(problem), "category": getattr(problem, "category", "server")}
        else:
            try:
                answer |= self._result(model, command, future.result())
            except (LoraFusionError, OSError) as problem:  # the disk
                answer |= {"error": _sentence(problem), "category": "server", "ran": True}
        self._link.emit("answered", **answer)
        model.unanswered.discard(command["seq"])

    def _result(self, model: Model, command: Message, result: Any) -> dict[str, Any]:
        """Writes the result of a call. Returns what is told of it."""
        match result:
            case RowsResult():
                content = write_outputs(result.outputs, result.metrics)
                replace_bytes(Path(command["result"]), content)
                return {"result": {}, "sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
            case StepDone():
                return {"result": {"metrics": result.metrics}}
            case AdapterState():
                check_home(model.folder)
                folder = Path(command["values"]["folder"])
                if command["kind"] == "save_weights":
                    result.write(folder)
                else:
                    shutil.rmtree(folder, ignore_errors=True)  # of a worker that was lost
                    export_task(self._session.tasks[model.job], result, folder, name=command["values"]["name"] or "")
                return {"result": {"bytes": sum(path.stat().st_size for path in folder.iterdir())}}
            case None:
                return {"result": {"type": "load_weights", "path": command["values"]["path"]}}
        raise AssertionError(type(result))


def call_of(command: Message, task: Task) -> Call:
    """Returns the call of a request.

    Raises:
        LoraFusionError: it is no call, or what it names cannot be read.
    """
    kind, values = command["kind"], dict(command["values"])
    if mistake := values.pop("refused", ""):
        raise CallError("call.refused", f"{mistake}.")
    if kind == "optim_step":
        return OptimStep(**values)
    if kind.startswith("save_weights"):
        return SaveState(optimizer=kind == "save_weights")
    if kind == "load_weights":
        return LoadState(state=AdapterState.read(Path(values["folder"]), task.adapter), optimizer=values["optimizer"])
    try:
        body = Path(command["path"]).read_bytes()
    except OSError:
        body = b""
    if hashlib.sha256(body).hexdigest() != command["sha256"]:
        message = "the request was damaged on the server's disk."
        raise ServerCallError("call.damaged", message, fix="send the data again")
    try:
        batch = read_batch(body)
    except DatumError as problem:
        raise CallError("call.inputs", f"{problem}.") from None
    rows = [
        Row(tokens=datum.tokens, inputs={name: _dense(at, name, value) for name, value in datum.inputs.items()})
        for at, datum in enumerate(batch.datums)
    ]
    return ForwardBackward(rows=rows, loss=batch.loss, config=batch.config, forward_only=command["kind"] == "forward")


def _dense(at: int, name: str, value: Any) -> Any:
    if not isinstance(value, Sparse):
        return value
    return dense(value.values, value.crow, value.col, value.shape, where=f"datum {at}, {name}")


def _failed(problem: Exception) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(problem)
    return future


def _sentence(problem: BaseException) -> str:
    """An error of ours in one text: what, where, why and the fix."""
    return str(problem) or type(problem).__name__
