"""The loop of a worker: executes commands between slots, trains windows, saves states, exports what is done."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.generation.engine import SLOTS
from lorafusion_jax.report.events import RunEvent
from lorafusion_jax.serve.state_folders import check_home, state_folder
from lorafusion_jax.serve.wire import Message
from lorafusion_jax.serve.worker.link import Link
from lorafusion_jax.serve.worker.loading import Held, Loaded, Reading, load, write_references
from lorafusion_jax.serve.worker.samples import Samples
from lorafusion_jax.serve.worker.stream import Models
from lorafusion_jax.session import AdapterState, Session, Task, WindowPlanner
from lorafusion_jax.session.export import AdapterExport, export_task

HORIZON = 48  # slots of a window
REPORT_S = 0.2  # between two messages about steps
SERVER_GONE_S = 60.0
IDLE_S = 0.05  # between two looks for commands while nothing trains
WAIT_S = 0.005  # between two looks for the end of jobs that leave
MOST_READS = 3  # of adapters that leave at a time: their weights are copied, and an optimizer has two moments
MOST_DEPARTURES = 16  # adapters that leave and are not on the disk: the host has memory for them
DISK, AGAIN_S = ("save.no-space", "save.failed"), 5.0  # a disk that takes nothing now, and when to try again


class WorkerLoop:
    """Runs until the server says `close`, refuses the worker, or is gone for a minute.

    Devices do not wait for jobs that come and go: threads read data and first weights, read and write states, and
    export adapters, while slots run. What is read is copied on the devices, which have memory for one state: that of
    one job, or the weights of `MOST_READS` adapters that are done or stopped, which come first. An adapter that is
    read leaves its place to the next job, and is written from the host's copy. Saves are spread over `save_s`.

    Args:
        windows: of the session.
        save_s: seconds between two saves of the state of a job.
        sampling_share: of the time for samples while slots wait, too.
        sampler_places: adapters that are sampled from at a time.

    Attributes:
        models, samples: of the training API.
    """

    def __init__(
        self, session: Session, windows: WindowPlanner, link: Link, held: dict[str, Held], *, save_s: float,
        sampling_share: float = 0.5, sampler_places: int = SLOTS,
    ):  # fmt: skip
        self._session, self._windows = session, windows
        self._link, self._held, self._save_s = link, held, save_s
        self._readers = ThreadPoolExecutor(1, "data")
        self._reader = ThreadPoolExecutor(1, "states")  # in turn, because they share pinned memory
        self._writer = ThreadPoolExecutor(1, "saves")
        self._exporters = ThreadPoolExecutor(MOST_READS, "exports")
        self._rows: dict[tuple[str, int], list[dict[str, Any]]] = {}
        self._newest: dict[str, int] = {}  # job → its newest epoch here; a placement starts once
        self._reported = self._read_at = time.monotonic()
        self._reading: Reading | None = None
        self._written: Future[None] | None = None  # the newest save
        self._weights: list[Future[AdapterState]] = []  # of adapters that leave, which are being read
        self._closing = False

        def wake() -> None:
            link.commands.put({"command": "wake"})

        self.models = Models(session, link, save_s=save_s, wake=wake)
        self.samples = Samples(session, link, wake=wake, places=sampler_places)
        self._per_slot = sampling_share / (1 - sampling_share)  # seconds of samples for each second of slots
        self._owed_s = 0.0  # to samples
        self.stop = threading.Event()  # set by a signal

    def run(self) -> None:
        while not (self._closing or self.stop.is_set() or self._link.refused):
            tasks = (task for task in self._session.tasks.values() if task.name not in self.models)
            trains = (
                self.samples.busy
                or self._windows.has_calls
                or any(task.status in ("running", "preparing") for task in tasks)
            )
            self._execute_commands(wait_s=0.0 if trains else IDLE_S)
            self._start_loaded()
            self.models.advance()
            self._announce()
            has_slots = self.run_in_turn()
            if not has_slots and not self._windows.has_calls:
                self._session.drain()
            self._end_finished()
            self._report(now=not has_slots)
            self._advance_saves()
            if self._link.silent_s > SERVER_GONE_S:
                break
        if not self._link.refused:
            self._stop_and_wait(list(self._held.values()))
            self.models.leave_all(lambda: self._windows.run(self._windows.plan(HORIZON)))
        self.samples.close()
        for pool in (self._reader, self._writer, self._exporters):
            pool.shutdown(wait=True)
        self._readers.shutdown(wait=False, cancel_futures=True)

    def run_in_turn(self) -> bool:
        """Runs a window, or some passes of samples if these have had less than their share. Returns whether it is one.

        While samples wait, a window is a slot.
        """
        began = time.monotonic()
        if self.samples.busy and self._owed_s > 0:
            self.samples.advance()
            self._owed_s -= time.monotonic() - began
            return True
        if self.samples.busy:  # its last passes still run: their time is not that of the slot
            self.samples.wait()
            self._owed_s -= time.monotonic() - began
            began = time.monotonic()
        window = self._windows.plan(HORIZON)
        count = self._windows.run(window, self._listen, self._must_pause)
        if self.samples.busy and count:
            self._session.drain()
            self._owed_s = min(self._owed_s, 0.0) + (time.monotonic() - began) / count * self._per_slot
        else:
            self._owed_s = 0.0
            self.samples.advance()
        return bool(window.slots)

    def _must_pause(self) -> bool:
        self._report()
        self._advance_saves()
        has_work = self.samples.busy or any(self._is_ready(held) for held in self._held.values())
        return has_work or not self._link.commands.empty() or self.stop.is_set() or bool(self._link.refused)

    def _is_ready(self, held: Held) -> bool:
        """Whether a job can start now, or end."""
        if held.export is not None:
            return self._can_advance(held, held.export)
        if held.place is None:
            return held.loading is not None and held.loading.done()
        has_failed = self._session.tasks[held.job].status == "failed"
        return has_failed or (self._waits_to_leave(held) and self._can_read)

    def _can_advance(self, held: Held, export: AdapterExport[AdapterState]) -> bool:
        """Whether an adapter can leave its place, or its job end. Nothing is written into its folder then."""
        if held.place is not None:  # the devices may still refuse the last step
            task = self._session.tasks[held.job]
            assert held.reading is not None
            return held.reading.done() and (task.step >= export.step or task.status == "failed")
        is_saved = held.saving is None or held.saving.done() or held.saving.cancel()
        return export.is_due or (export.has_ended and is_saved)

    def _waits_to_leave(self, held: Held) -> bool:
        if held.place is None or held.export is not None:
            return False
        return self._session.tasks[held.job].status in ("done", "leaving")

    @property
    def _can_read(self) -> bool:
        """Whether devices and host have memory for a copy of another adapter that leaves."""
        self._weights = [reading for reading in self._weights if not reading.done()]
        reads_none = self._reading is None or self._reading.state.done()
        departures = sum(held.export is not None for held in self._held.values())
        return reads_none and len(self._weights) < MOST_READS and departures < MOST_DEPARTURES

    def _execute_commands(self, wait_s: float) -> None:
        while True:
            try:
                command = self._link.commands.get(timeout=wait_s) if wait_s else self._link.commands.get_nowait()
            except queue.Empty:
                return
            wait_s = 0.0
            self._execute(command)

    def _execute(self, command: Message) -> None:
        kind, job = command["command"], command.get("job", "")
        held = self._held.get(job)
        if kind == "close":
            self._closing = True
        elif kind == "wake":
            pass
        elif kind in ("sample", "complete"):
            self.samples.take(command)
        elif kind == "cancel":
            self.samples.cancel(command["future"])
        elif kind == "start" and "stream" in command["values"]:
            self.models.start(command)
        elif job in self.models:
            self.models.execute(command)
        elif kind == "start":
            self._begin_loading(command, held)
        elif held is None or held.epoch != command["epoch"]:
            self._link.emit("gone", job=job, epoch=command["epoch"])
        elif kind == "stop":
            self._stop(held)
        elif kind == "weight" and held.place is not None:
            self._session.tasks[held.job].reweight(command["weight"])

    def _begin_loading(self, command: Message, held: Held | None) -> None:
        job, epoch = command["job"], command["epoch"]
        if epoch <= self._newest.get(job, 0):  # asked again after a connection was lost; it may have ended since
            if held is not None and held.announced:
                self._link.emit("started", job=held.job, epoch=held.epoch)
            return
        if held is not None:
            self._stop_and_wait([held])
        self._newest[job] = epoch
        state = None if command["state"] is None else Path(command["state"])
        self._held[job] = Held(
            job=job,
            epoch=epoch,
            name=command["name"],
            folder=Path(command["folder"]),
            wanted_place=command["place"],
            state=state,
            loading=self._readers.submit(self._read, job, command["values"], state, Path(command["folder"])),
        )

    def _read(self, job: str, values: dict[str, Any], state: Path | None, folder: Path) -> Loaded:
        loaded = load(job, values, state, folder)
        return replace(loaded, first=self._session.draw(loaded.task)) if loaded.state is None else loaded

    def _start_loaded(self) -> None:
        for held in [held for held in self._held.values() if held.loading is not None and self._is_ready(held)]:
            assert held.loading is not None
            if (problem := held.loading.exception()) is not None:  # whatever it is, others do not fail with it
                self._end(held, "failed", step=held.saved, reason=str(problem) or type(problem).__name__)
                continue
            loaded = held.loading.result()
            task = loaded.task
            try:
                self._session.start(held.wanted_place, task, loaded.state, loaded.first)
            except LoraFusionError as problem:
                self._end(held, "failed", step=held.saved, reason=str(problem))
                continue
            held.place, held.saved, held.kept, held.loading = held.wanted_place, task.step, task.step, None
            held.read_at = time.monotonic()
            if loaded.damage:
                held.state = loaded.path
                path, reason = None if loaded.path is None else str(loaded.path), loaded.damage
                self._link.emit("damaged", job=held.job, epoch=held.epoch, step=task.step, path=path, reason=reason)
            if task.status == "preparing":
                held.new_references = True

    def _announce(self) -> None:
        """Says which jobs train now: all that have their references."""
        for held in self._held.values():
            task = None if held.place is None else self._session.tasks[held.job]
            if task is None or held.announced or task.status == "preparing":
                continue
            held.announced = True
            if held.new_references and task.references is not None:
                self._writer.submit(write_references, held.folder, task.references)
            self._link.emit("started", job=held.job, epoch=held.epoch, steps=task.num_steps)
            if not task.step:
                self._evaluate(held, task)

    def _end_finished(self) -> None:
        for held in [held for held in self._held.values() if held.loading is None]:
            self._end_if_finished(held)

    def _end_if_finished(self, held: Held) -> None:
        if not self._is_ready(held):
            return
        if held.export is not None:
            self._advance_export(held, held.export)
            return
        assert held.place is not None
        task = self._session.tasks[held.job]
        if task.status == "failed":
            self._end_failed(held, task)
        elif task.status == "done":
            self._evaluate(held, task)
            self._start_reading(held, optimizer=False)
            held.export = self._export(held, task)
        else:
            step = self._session.end_training(held.job)
            read_state = self._start_reading(held).result
            held.export = AdapterExport(step, read_state, partial(self._write, held))
            held.ends_as = "stopped"

    def _end_failed(self, held: Held, task: Task) -> None:
        self._session.forget(held.job)
        self._end(held, "failed", step=task.step, reason=task.reason)

    def _start_reading(self, held: Held, *, optimizer: bool = True) -> Future[AdapterState]:
        """Begins to read an adapter that leaves, while others train."""
        future = self._reader.submit(self._session.read(held.job, optimizer=optimizer))
        self._weights.append(future)
        held.reading = future
        return future

    def _export(self, held: Held, task: Task) -> AdapterExport[AdapterState]:
        assert held.reading is not None
        target = held.folder / "adapter" / f"step-{task.step}-e{held.epoch}"  # no older writer writes there

        def write(state: AdapterState) -> Path:
            check_home(held.folder)
            return export_task(task, state, target, name=held.name)

        return AdapterExport(task.step, held.reading.result, write)

    def _advance_export(self, held: Held, export: AdapterExport[AdapterState]) -> None:
        """Frees the place of an adapter that is read, and ends its job once it is written.

        While the disk takes nothing, an adapter that is done stays in memory. A job that is asked for then loses the
        steps since its newest state, which run again.
        """
        if held.place is not None:
            self._vacate(held, export)
        elif export.is_due:
            self._begin_export(held, export)
        elif isinstance(outcome := export.result, Path):
            self._end(held, held.ends_as, step=export.step, path=str(outcome))
        elif isinstance(outcome, OSError):
            raise outcome
        elif held.ends_as == "finished" and outcome.code not in DISK:
            self._end(held, "failed", step=export.step, reason=str(outcome))
        elif held.leaves:
            self._not_saved(held, outcome)
            self._end_with_newest_state(held)
        else:
            self._not_saved(held, outcome)
            export.begin_later(AGAIN_S)

    def _begin_export(self, held: Held, export: AdapterExport[AdapterState]) -> None:
        """Begins to write; a state on the thread of the saves, because one of the same step may be under way."""
        export.begin(self._exporters if held.ends_as == "finished" else self._writer)

    def _vacate(self, held: Held, export: AdapterExport[AdapterState]) -> None:
        task = self._session.tasks[held.job]
        if task.status == "failed":
            self._end_failed(held, task)
            return
        if task.status == "done" and held.ends_as == "stopped":  # its last step was its last of all
            self._evaluate(held, task)
            held.export = export = self._export(held, task)
            held.ends_as = "finished"
        self._session.forget(held.job)
        held.place = None
        self._link.emit("vacated", job=held.job, epoch=held.epoch)
        self._begin_export(held, export)

    def _evaluate(self, held: Held, task: Task) -> None:
        assert held.place is not None
        evaluation = self._session.evaluate(held.job)
        if evaluation is not None:
            row = {"kind": "eval", "step": task.step, "eval_loss": evaluation.loss, "eval_tokens": evaluation.tokens}
            row |= {f"eval_{name}": value for name, value in evaluation.metrics.items()}
            self._rows.setdefault((held.job, held.epoch), []).append(row | {"time": round(time.time(), 3)})

    def _end(self, held: Held, kind: str, **data: Any) -> None:
        if held.saving is not None and not held.saving.cancel():
            held.saving.result()  # nothing is written into the folder of a job that has ended
        self._report(now=True)
        self._link.emit(kind, job=held.job, epoch=held.epoch, **data)
        del self._held[held.job]  # last: what a worker neither holds nor told of is lost

    def _stop(self, held: Held) -> None:
        """Stops a job after the last step that was issued; its begun batch runs again later. Others train on."""
        held.leaves = True
        if held.loading is not None:
            held.loading.cancel()
            self._end(held, "stopped", step=held.saved, path=None if held.state is None else str(held.state))
            return
        if held.place is None or self._session.tasks[held.job].status in ("done", "failed"):
            return  # it ends by itself
        if self._session.end_training(held.job) == held.kept:
            self._session.forget(held.job)
            self._end_with_newest_state(held)

    def _stop_and_wait(self, jobs: Sequence[Held]) -> None:
        for held in jobs:
            self._stop(held)
        while any(self._held.get(held.job) is held for held in jobs):
            self._session.drain()
            self._end_finished()
            self._advance_saves()
            time.sleep(WAIT_S)

    def _end_with_newest_state(self, held: Held) -> None:
        """Ends a job; steps since its newest state run again."""
        self._end(held, "stopped", step=held.kept, path=None if held.state is None else str(held.state))

    def _advance_saves(self) -> None:
        """Writes the state that was read, or begins to read the next one."""
        if self._reading is not None:
            self._write_read(self._reading)
        elif self._can_save and (held := self._next_to_save()) is not None:
            assert held.place is not None
            held.read_at = self._read_at = time.monotonic()
            reader = self._session.read(held.job)
            self._reading = Reading(held=held, state=self._reader.submit(reader))

    @property
    def _can_save(self) -> bool:
        """Whether nothing is being read or has to be read first. The disk has one save at a time."""
        is_written = self._written is None or self._written.done()
        has_leavers = any(map(self._waits_to_leave, self._held.values()))
        return is_written and not has_leavers and all(reading.done() for reading in self._weights)

    def _next_to_save(self) -> Held | None:
        """Returns the job whose state is the oldest, once in a while: each of them once in `save_s`."""
        now = time.monotonic()
        jobs = [held for held in self._held.values() if held.announced and held.export is None]
        if now - self._read_at <= self._save_s / max(len(jobs), 1):
            return None
        candidates = [held for held in jobs if self._has_new_steps(held) and now - held.read_at > self._save_s / 2]
        return min(candidates, key=lambda held: held.read_at, default=None)

    def _has_new_steps(self, held: Held) -> bool:
        task = None if held.place is None else self._session.tasks[held.job]
        return task is not None and task.status == "running" and task.step > held.saved

    def _write_read(self, reading: Reading) -> None:
        """Has a state written that was read, once its job has come to its step: the step may still be refused."""
        if not reading.state.done():
            return
        held, state = reading.held, reading.state.result()
        task = None if held.place is None else self._session.tasks.get(held.job)
        if self._held.get(held.job) is not held or task is None or task.status in ("failed", "leaving"):
            self._reading = None
        elif task.step >= state.step:
            self._report(now=True)  # the steps of a state do not run again, so the server has to know their rows
            held.saved = state.step
            held.saving = self._written = self._writer.submit(self._save, held, state)
            self._reading = None

    def _save(self, held: Held, state: AdapterState) -> None:
        try:
            path = self._write(held, state)
        except LoraFusionError as problem:
            self._not_saved(held, problem)
            return
        held.state, held.kept = path, state.step
        self._link.emit("saved", job=held.job, epoch=held.epoch, step=state.step, path=str(path))

    def _not_saved(self, held: Held, problem: LoraFusionError) -> None:
        self._link.emit("not-saved", job=held.job, epoch=held.epoch, reason=str(problem))

    def _write(self, held: Held, state: AdapterState) -> Path:
        check_home(held.folder)
        return state.write(state_folder(held.folder, held.epoch, state.step))

    def _listen(self, event: RunEvent) -> None:
        row = event.row()
        held = self._held.get(row.pop("adapter"))
        if held is not None and event.kind == "step":
            self._rows.setdefault((held.job, held.epoch), []).append(row | {"time": round(time.time(), 3)})

    def _report(self, *, now: bool = False) -> None:
        if not self._rows or not (now or time.monotonic() - self._reported > REPORT_S):
            return
        rows, self._rows, self._reported = self._rows, {}, time.monotonic()
        for (job, epoch), job_rows in rows.items():
            self._link.emit("stepped", job=job, epoch=epoch, rows=job_rows)
