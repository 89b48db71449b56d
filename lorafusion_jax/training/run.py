"""One sitting of a run: its folder, events, checkpoints and exported adapters around a session and a loop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lorafusion_jax.checkpoint.digests import is_intact
from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.checkpoint.store import StateStore
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.log_file import read_rows
from lorafusion_jax.pipeline.processes import any_process, barrier, is_first
from lorafusion_jax.pipeline.session import Session
from lorafusion_jax.planning.prediction import predicted_bubbles
from lorafusion_jax.report.data_notes import data_notes
from lorafusion_jax.report.events import (
    AdapterChanged,
    AdapterEvaluated,
    AdapterFailed,
    Listener,
    PhaseBegun,
    RunEvent,
    RunFinished,
    RunInterrupted,
    RunStarted,
    RunStopped,
    StateSaved,
)
from lorafusion_jax.signals import deferred_stop, stop_if_asked
from lorafusion_jax.training.adapter_writer import AdapterWriter
from lorafusion_jax.training.changes import recorded_changes, stopped_otherwise
from lorafusion_jax.training.export_queue import ExportQueue
from lorafusion_jax.training.loop import Hooks, Interrupted, Loop
from lorafusion_jax.training.revisions import Revisions
from lorafusion_jax.training.state import AdapterProgress, Progress
from scheduling import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended.

    Attributes:
        seconds: time spent in slots, over all sittings.
    """

    folder: Path
    adapters: dict[str, AdapterProgress]
    seconds: float
    plan: Plan

    @property
    def exit_code(self) -> int:
        failed = [adapter.status == "failed" for adapter in self.adapters.values()]
        return 0 if not any(failed) else 1 if all(failed) else 3

    def event(self, peak_bytes: int | None = None) -> RunFinished:
        """The news of it."""
        return RunFinished(
            slot=len(self.plan.slots),
            exit_code=self.exit_code,
            seconds=round(self.seconds, 3),
            peak_bytes=peak_bytes,
        )


class Run:
    """Trains from `progress` to the end of the plan; all processes make one when the folder is there.

    Args:
        plan: that of the folder.
        store: of checkpoints.
        session: its adapters stand where `progress` says.
        listener: gets every `RunEvent`.
        resumed: from a checkpoint.
    """

    def __init__(
        self,
        config: JobConfig,
        prepared: Prepared,
        plan: Plan,
        folder: RunFolder,
        *,
        store: StateStore,
        session: Session,
        progress: Progress,
        listener: Listener,
        resumed: bool,
    ):
        self._config, self._prepared, self._folder = config, prepared, folder
        self._store, self._session, self._progress, self._listener = store, session, progress, listener
        self._resumed = resumed
        self._recorded = recorded_changes(folder)
        self._revisions = Revisions(config, plan, folder, progress, self._recorded, self._tell)
        self._told = _told_changes(folder)
        self._exports = ExportQueue(AdapterWriter(config, prepared, folder, progress), session.read, listener)

    def execute(self) -> RunResult:
        """Trains; notes in the folder how the sitting ended.

        Raises:
            Interrupted: by a signal; the state is saved.
            RunError: a device failed or the disk is full; the last checkpoint stands.
        """
        with ExitStack() as held, self._recording_its_end():
            self._store.check_space(self._session.state_bytes)
            self._tell_start()
            try:
                self._begin()
                held.enter_context(deferred_stop())  # also while results are written
                self._loop().run()
            finally:
                self._exports.close()
                self._write_timeline()
            result = RunResult(
                folder=self._folder.path,
                adapters=self._progress.adapters,
                seconds=self._progress.seconds,
                plan=self._revisions.plan,
            )
            self._tell(result.event(self._session.peak_bytes))
            return result

    def _loop(self) -> Loop:
        hooks = Hooks(
            save=self._save,
            evaluate=self._evaluate,
            finish=self._finish,
            finished=self._exports.poll,
            wants_revision=self._revisions.asked,
            revise=self._revisions.revise,
            bubble_share=self._session.spans.bubble_share,
        )
        return Loop(
            self._config,
            self._prepared,
            self._revisions.plan,
            self._session.executor,
            self._progress,
            self._tell,
            hooks,
            changes=[change for change in self._recorded if change.slot >= self._progress.slot],
        )

    def _tell(self, event: RunEvent) -> None:
        if isinstance(event, AdapterChanged):  # a resumed run comes to changes of its checkpoint's slot again
            key = event.slot, event.adapter, event.action
            if key in self._told:
                return
            self._told.add(key)
        self._listener(event)

    @contextmanager
    def _recording_its_end(self) -> Iterator[None]:
        """Notes in the run folder how a sitting ended that did not come to the end of its plan."""
        try:
            yield
        except Interrupted:
            self._tell(RunInterrupted(slot=self._progress.slot))
            raise
        except BaseException as problem:
            with suppress(OSError):  # a full disk cannot take the note either
                self._tell(RunStopped(slot=self._progress.slot, code=_code(problem), what=_what(problem)))
            raise

    def _begin(self) -> None:
        """What comes before the first microbatch."""
        self._session.compile_reads()
        if not self._resumed:
            for adapter in self._config.adapters:
                self._evaluate(adapter.name, 0, self._progress.slot)
            return
        slot, unwritten = self._progress.slot, self._progress.unwritten
        for name, adapter in self._progress.adapters.items():  # a kill came between checkpoint and export
            if adapter in unwritten or not adapter.step:
                continue
            if any_process(not is_intact(self._folder.adapter_step(name, adapter.step))):
                self._exports.write(adapter, slot)
        for adapter in self._progress.drop(stopped_otherwise(self._revisions.plan, self._recorded)):
            self._tell(
                AdapterFailed(
                    slot=slot, adapter=adapter.name, step=adapter.step, reason=adapter.reason, kept_step=adapter.step
                )
            )
            self._finish(adapter.name, slot)
        for adapter in unwritten:
            adapter.status, adapter.reason = "done", ""
            self._finish(adapter.name, slot)

    def _tell_start(self) -> None:
        session, progress = self._session, self._progress.adapters
        if is_first():
            self._folder.write_record(self._folder.read_record() | session.device)
        self._tell(
            RunStarted(
                slot=self._progress.slot,
                device=session.device["device"],
                mesh=self._config.mesh.model_dump(include={"stages", "data", "fsdp"}),
                layers=session.layers,
                remat=session.remat,
                memory_warning=session.memory_warning,
                data_notes=data_notes(self._config, self._prepared),
                slots=len(self._revisions.plan.slots),
                density=round(self._revisions.plan.density, 4),
                predicted_bubble_share=predicted_bubbles(self._config, self._revisions.plan) if is_first() else None,
                adapters={name: adapter.num_steps for name, adapter in progress.items()},
                taken={name: adapter.step for name, adapter in progress.items()},
                failed={name: adapter.reason for name, adapter in progress.items() if adapter.status == "failed"},
                stopped={n: own.status for n, own in progress.items() if own.status in ("paused", "cancelled")},
                capacity_tokens=self._revisions.plan.capacity_tokens,
                trainable=session.num_trainable,
                plan=self._revisions.plan.digest,
                frozen=session.num_frozen,
            )
        )

    def _evaluate(self, name: str, step: int, slots_done: int) -> None:
        stop_if_asked()
        if self._prepared.adapters[name].eval is None:
            return
        self._tell(PhaseBegun(text=f"evaluating {name}"))
        with self._session.spans.pause(f"evaluating {name}"):
            found = self._session.evaluate(name)
        self._tell(
            AdapterEvaluated(
                slot=slots_done,
                adapter=name,
                step=step,
                eval_loss=found.loss,
                eval_tokens=found.tokens,
                metrics={f"eval_{key}": value for key, value in found.metrics.items()},
            )
        )

    def _save(self) -> None:
        self._tell(PhaseBegun(text="saving"))
        started = time.perf_counter()
        with self._session.spans.pause("saving"):
            self._exports.poll(wait=True)  # an adapter that the checkpoint calls done has its folder
            arrays = self._session.save_state()
            if is_first():
                self._store.save(self._progress.slot, arrays, self._progress.position())
            for adapter in self._progress.adapters.values():
                if adapter.status == "running" and adapter.step:
                    self._exports.write(adapter, self._progress.slot)
            barrier("saved")
        self._tell(
            StateSaved(
                slot=self._progress.slot,
                path=str(self._folder.state / str(self._progress.slot)),
                seconds=round(time.perf_counter() - started, 3),
            )
        )

    def _finish(self, name: str, slots_done: int) -> None:
        adapter = self._progress.adapters[name]
        if adapter.step:
            self._exports.submit(adapter, slots_done)

    def _write_timeline(self) -> None:
        timeline = self._session.spans.close(self._revisions.plan)
        if timeline.spans and is_first():
            with suppress(OSError):  # a full disk has its own error
                self._folder.write_timeline(timeline.to_json())


def _told_changes(folder: RunFolder) -> set[tuple[int, str, str]]:
    rows = read_rows(folder.path / "events.jsonl")
    return {(row["slot"], row["adapter"], row["action"]) for row in rows if row["kind"] == AdapterChanged.kind}


def _code(problem: BaseException) -> str:
    return problem.code if isinstance(problem, LoraFusionError) else type(problem).__name__


def _what(problem: BaseException) -> str:
    """Why a sitting ended, in one line."""
    if isinstance(problem, LoraFusionError):
        return problem.what
    if isinstance(problem, KeyboardInterrupt):  # a second signal, or one before the first microbatch
        return "at once, by a signal"
    return str(problem).partition("\n")[0][:300] or type(problem).__name__
