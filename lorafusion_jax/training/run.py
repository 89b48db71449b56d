"""One process of a run: its folder, events, checkpoints and exports around a session and a loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from threading import Event

import jax

from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.checkpoint.store import StateStore
from lorafusion_jax.checkpoint.warm_start import reread_warm_starts
from lorafusion_jax.config.join import select_adapters
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.references import with_references
from lorafusion_jax.digests import is_intact
from lorafusion_jax.errors import RunError
from lorafusion_jax.planning.prediction import predicted_run
from lorafusion_jax.planning.training_plan import slots_of_sizes
from lorafusion_jax.report.data_notes import data_notes
from lorafusion_jax.report.events import AdapterFailed, Listener, PhaseBegun, RunEvent, RunInterrupted, RunStarted
from lorafusion_jax.session.processes import any_process, barrier, is_first
from lorafusion_jax.session.session import Session
from lorafusion_jax.signals import deferred_stop
from lorafusion_jax.training.changes import recorded_changes, stopped_otherwise
from lorafusion_jax.training.evaluations import Evaluations, Scores
from lorafusion_jax.training.exports import AdapterWriter, BackgroundQueue, ExportQueue
from lorafusion_jax.training.hooks import Hooks
from lorafusion_jax.training.job import Job
from lorafusion_jax.training.loop import Interrupted, PlanRun
from lorafusion_jax.training.references import (
    JoiningReferences,
    compute_references,
    read_references,
    split_stored,
    store_references,
)
from lorafusion_jax.training.revisions import Revisions
from lorafusion_jax.training.rollouts import Rollouts
from lorafusion_jax.training.saver import Saver
from lorafusion_jax.training.state import Progress, RunResult, stop_event
from lorafusion_jax.training.text_samples import LiveGenerator

POLL_S = 0.1  # how often a run that waits at its end looks whether a stop is asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUp:
    """Events of loading and compiling, reported once the run folder exists.

    Attributes:
        failure: error of a stage.
    """

    events: Sequence[RunEvent] = ()
    failure: RunError | None = None


class Run:
    """Trains from `progress` to the end of the plan. All processes create one, after the folder exists.

    Args:
        job: with the plan of the folder.
        store: store of checkpoints.
        session: a session whose adapters are at `progress`.
        listener: called with every `RunEvent`.
        resumed: whether the run continues from a checkpoint.
        start_up: events of loading and compiling.
    """

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        *,
        store: StateStore,
        session: Session,
        progress: Progress,
        listener: Listener,
        resumed: bool,
        start_up: StartUp,
    ):
        self._job, self._folder = job, folder
        self._store, self._session, self._progress, self._listener = store, session, progress, listener
        self._resumed, self._start_up = resumed, start_up
        self._recorded = recorded_changes(folder)
        self._joining = JoiningReferences(session, self._listener)
        self._revisions = Revisions(
            job, folder, progress, self._recorded, session.lacks_memory, self._joining, self._listener
        )
        generator = LiveGenerator(job, session)
        self._rollouts = Rollouts(job, session, progress, folder.path / "rollouts", self._listener, generator)
        self._scores = Scores(job, session, folder.path / "rollouts", generator)
        self._evaluations = Evaluations(job, session, self._listener, generator, self._rollouts, self._scores)
        self._queue = BackgroundQueue("writer")
        writer = AdapterWriter(job, folder, progress)
        self._exports = ExportQueue(writer, session, listener, self._queue)
        self._saver = Saver(store, session, self._exports, self._queue, folder.state, listener)

    def execute(self) -> RunResult:
        """Trains, and records in the folder how training ended.

        Raises:
            Interrupted: a signal was received. The state is saved.
            RunError: a device failed or the disk is full. The last checkpoint is intact.
        """
        with ExitStack() as resources, self._record_end():
            self._store.check_space(self._session.facts.state_bytes)
            self._emit_start()
            for event in self._start_up.events:
                self._listener(event)
            try:
                if self._start_up.failure is not None:
                    raise self._start_up.failure
                self._prepare()
                stop_signal = resources.enter_context(deferred_stop())  # also while results are written
                with self._joining_spans():
                    self._make_loop().run()
                self._finish_caching(stop_signal)
            finally:
                self._joining.close()
                self._rollouts.close()
                self._scores.close()
                self._queue.close()
                self._write_timeline()
            result = RunResult(
                folder=self._folder.path,
                adapters=self._progress.adapters,
                seconds=self._progress.seconds,
                plan=self._job.plan,
            )
            self._listener(
                result.event(
                    self._session.facts.peak_bytes,
                    evaluation_s=round(self._evaluations.seconds, 3),
                    saving_s=round(self._saver.paused_s, 3),
                )
            )
            return result

    def _make_loop(self) -> PlanRun:
        hooks = Hooks(
            save=self._save,
            lacks_rows=self._rollouts.due,
            draw_rows=self._rollouts.draw,
            evaluate=self._evaluations.evaluate,
            finish=self._export,
            keep_best=self._export_best,
            add=self._add_adapters,
            finished=self._queue.poll,
            wants_revision=self._revisions.has_requests,
            revise=self._revisions.revise,
            bubble_share=self._session.spans.bubble_share,
            evaluation_s=self._evaluations.expected_s,
        )
        return PlanRun(
            self._job,
            self._session,
            self._progress,
            self._listener,
            hooks,
            changes=[change for change in self._recorded if change.slot >= self._progress.slot],
        )

    def _save(self, wait: bool) -> None:
        self._saver.save(self._progress, wait=wait)
        self._rollouts.saved()

    @contextmanager
    def _joining_spans(self) -> Iterator[None]:
        """Joins the timelines of all processes at the end, unless the body fails: another process may be lost then."""
        try:
            yield
        except Interrupted:
            self._session.spans.join(self._session.executor.links)
            raise
        self._session.spans.join(self._session.executor.links)

    @contextmanager
    def _record_end(self) -> Iterator[None]:
        """Records in the run folder why training stopped before the end of its plan."""
        try:
            yield
        except Interrupted:
            self._listener(RunInterrupted(slot=self._progress.slot))
            raise
        except BaseException as problem:
            with suppress(OSError):  # the disk may be full
                self._listener(stop_event(problem, self._progress.slot))
            raise

    def _prepare(self) -> None:
        """Runs what precedes the first microbatch: first evaluations, missing exports, drops."""
        self._session.compile_reads()
        if not self._resumed:
            for adapter in select_adapters(self._job.config, self._session.names).adapters:
                self._evaluations.evaluate(adapter.name, 0, self._progress.slot)
            self._end_dropped(self._progress.slot)  # resumed before its first checkpoint
            return
        slot, unwritten = self._progress.slot, self._progress.unwritten
        for name, adapter in self._progress.adapters.items():  # killed between checkpoint and export
            if adapter in unwritten or not adapter.step:
                continue
            if any_process(not is_intact(self._folder.adapter_step(name, adapter.step))):
                self._exports.submit_running(adapter, slot)
        self._queue.poll(wait=True)
        if is_first():  # killed between an export and the removal of the one before
            self._folder.mark_exports(self._job.config.save.keep)
        self._end_dropped(slot)
        for adapter in unwritten:
            adapter.status, adapter.reason = "done", ""
            self._export(adapter.name, slot)

    def _end_dropped(self, slot: int) -> None:
        """Ends adapters that were dropped when the run was resumed."""
        for adapter in self._progress.drop(stopped_otherwise(self._job.plan, self._recorded)):
            self._listener(
                AdapterFailed(
                    slot=slot, adapter=adapter.name, step=adapter.step, reason=adapter.reason, kept_step=adapter.step
                )
            )
            self._export(adapter.name, slot)

    def _emit_start(self) -> None:
        facts, progress = self._session.facts, self._progress.adapters
        predicted = None
        if is_first():
            self._folder.write_record(self._folder.read_record() | facts.device)
            job = self._job
            predicted = predicted_run(job.config, job.prepared, job.plan, processes=jax.process_count())
        self._listener(
            RunStarted(
                slot=self._progress.slot,
                device=facts.device["device"],
                mesh=self._job.config.mesh.model_dump(include={"stages", "data", "fsdp", "tensor"}),
                layers=facts.layers,
                remat=facts.remat,
                memory_warning=facts.memory_warning,
                data_notes=data_notes(self._job.config, self._job.prepared),
                slots=len(self._job.plan.slots),
                density=round(self._job.plan.density, 4),
                predicted_bubble_share=None if predicted is None else predicted.bubble_share,
                predicted={} if predicted is None else predicted.by_kind,
                adapters={name: adapter.num_steps for name, adapter in progress.items()},
                taken={name: adapter.step for name, adapter in progress.items()},
                failed={name: adapter.reason for name, adapter in progress.items() if adapter.status == "failed"},
                stopped={
                    name: adapter.status
                    for name, adapter in progress.items()
                    if adapter.status in ("paused", "cancelled")
                },
                capacity_tokens=self._job.plan.capacity_tokens,
                sizes=slots_of_sizes(self._job.plan),
                trainable=facts.num_trainable,
                stored=facts.stored,
                plan=self._job.plan.digest,
                frozen=facts.num_frozen,
            )
        )

    def _export(self, name: str, slots_done: int) -> None:
        adapter = self._progress.adapters[name]
        if adapter.step:
            self._exports.submit(adapter, slots_done)

    def _export_best(self, name: str, slots_done: int) -> None:
        if self._job.config.save.best:
            self._exports.submit_best(self._progress.adapters[name], slots_done)

    def _add_adapters(self, names: Sequence[str], slots_done: int) -> None:
        config = select_adapters(self._job.config, list(self._progress.adapters))
        doing = "making room for" if self._session.needs_room(config) else "starting"
        self._listener(PhaseBegun(slot=slots_done, text=f"{doing} {', '.join(names)}"))
        addition = config.model_copy(update={"adapters": config.adapters[len(self._session.names) :]})
        first = len(config.adapters) - len(addition.adapters)
        starts = reread_warm_starts(self._folder.read_record().get("warm_starts", {}), addition)
        weights = {first + index: arrays for index, arrays in starts.items()}
        with self._session.spans.pause("adding adapters"):
            self._session.add(config, self._job.prepared, weights, self._progress.adapters)
            self._add_references(addition, slots_done)
            self._session.compile_reads()
        for name in names:
            self._evaluations.evaluate(name, 0, slots_done)
        self._end_dropped(slots_done)

    def _add_references(self, new: JobConfig, slots_done: int) -> None:
        """Reads the references of new adapters, or computes them if the run never had these adapters."""
        folder = self._folder
        stored, missing = split_stored(new, folder.read_record())
        prepared = read_references(folder.path, folder.read_record(), self._job.config, self._job.prepared, stored)
        if missing:
            references, events = compute_references(self._session, prepared, missing, self._listener, slots_done)
            prepared = with_references(prepared, references)
            for event in events:
                self._listener(event)
            if is_first():
                folder.write_record(store_references(folder.path, folder.read_record(), references, self._job.config))
            barrier()
        self._job.prepared = prepared
        self._session.take_data(self._job.config, prepared)

    def _finish_caching(self, stop_signal: Event) -> None:
        """Waits until the quantised base is cached; if a stop is asked for, closing the session ends the writing."""
        reading, slot = self._session.reading, self._progress.slot
        if not reading.wait_stored(0):
            self._listener(PhaseBegun(slot=slot, text="caching the quantised base"))
        while not reading.wait_stored(POLL_S) and not stop_signal.is_set():
            pass
        for notice in reading.take_notices():
            self._listener(replace(notice, slot=slot))

    def _write_timeline(self) -> None:
        timeline = self._session.spans.close(self._job.plan)
        if timeline.spans and is_first():
            with suppress(OSError):  # a full disk is reported elsewhere
                self._folder.write_timeline(timeline.to_json())
