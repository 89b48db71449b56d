"""Executes a plan, and saves.

Once all adapters have stopped, the rest of the plan is skipped. Before a save the pipeline is drained: no slot enters
until those in the pipeline are done. At such a drain point the rest of the plan may be replaced, and adapters may join.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import numpy as np

from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.planning.pauses import FIRST_SAVE_MINUTES, evaluations
from lorafusion_jax.planning.turns import NextUses
from lorafusion_jax.report.events import Listener, PhaseBegun, ProgramCompiled, SlotDone
from lorafusion_jax.session.assembler import Batches
from lorafusion_jax.session.loop import SlotHooks
from lorafusion_jax.session.processes import any_process, is_alone
from lorafusion_jax.session.release import release_unused
from lorafusion_jax.session.session import Session
from lorafusion_jax.session.steps import StepHooks
from lorafusion_jax.session.task import AdapterProgress, Task
from lorafusion_jax.signals import deferred_stop, saving
from lorafusion_jax.training.changes import Change, apply, cap_slots
from lorafusion_jax.training.hooks import Hooks
from lorafusion_jax.training.job import Job
from lorafusion_jax.training.meter import COMPILING, EVALUATING, SAMPLING, SAVING, Meter
from lorafusion_jax.training.selection import Selection
from lorafusion_jax.training.state import Progress
from scheduling import Plan, issue_order
from scheduling import pipeline as schedule

# Lookup tables of a plan for the loop.


class PlanTables:
    """Tables of the job's current plan. Call `renew` after the plan was replaced.

    Attributes:
        batches: microbatches of the slots.
        slot_tokens: real tokens of every adapter in every slot.
        slot_adapters: adapters with rows in every slot.
        slot_rows: rows that every slot computes, of all replicas.
        last_slot: in which each adapter takes its last step; -1: none.
        next_uses: when adapters are needed.
    """

    def __init__(self, job: Job, session: Session):
        self._job, self._session = job, session
        self.batches = Batches(job.config, job.prepared, job.plan, session.assembler, session.tasks)
        self._count()

    def renew(self) -> None:
        """Rebuilds the tables from the job. Microbatches keep their shape if the new samples fit into it."""
        self._session.take_data(self._job.config, self._job.prepared)
        self.batches.replace_plan(self._job.config, self._job.prepared, self._job.plan)
        self._count()

    def _count(self) -> None:
        plan, prepared = self._job.plan, self._job.prepared
        self.slot_tokens = slot_tokens(plan, prepared)
        self.slot_adapters = [tuple(tokens) for tokens in self.slot_tokens]
        self.next_uses = NextUses(self.slot_tokens)
        self.slot_rows = [
            rows * len(slot.replicas) for slot, rows in zip(plan.slots, plan.slot_capacities, strict=True)
        ]
        self.last_slot = dict.fromkeys((adapter.name for adapter in self._job.config.adapters), -1) | {
            name: slot for slot, name, _ in plan.batches_ending()
        }


def slot_tokens(plan: Plan, prepared: Prepared) -> list[dict[str, int]]:
    """Counts the real tokens of every adapter in every slot."""
    lengths: Mapping[str, np.ndarray] = {name: data.stream_tokens() for name, data in prepared.adapters.items()}
    result: list[dict[str, int]] = []
    for slot in plan.slots:
        tokens: dict[str, int] = {}
        for ref in slot.samples:
            tokens[ref.adapter] = tokens.get(ref.adapter, 0) + int(lengths[ref.adapter][ref.sample])
        result.append(tokens)
    return result


LOG_EVERY_S = 2.0
ASK_EVERY = 8  # slots between two agreements of the processes on whether to pause


class Interrupted(Exception):
    """The run was stopped by a signal and has saved its state."""


class PlanRun:
    """Runs the plan of a job from `progress.slot` to the end. Updates `progress` in place.

    Args:
        session: whose tasks have the clocks of `progress`.
        program: events per stage (None: 1F1B).
        changes: changes that the plan contains but `progress` does not yet, in order of slots.
    """

    def __init__(
        self,
        job: Job,
        session: Session,
        progress: Progress,
        emit: Listener,
        hooks: Hooks,
        program: schedule.Program | None = None,
        changes: Sequence[Change] = (),
    ):
        self._job, self._session, self._progress, self._emit, self._hooks = job, session, progress, emit, hooks
        self._program, self._changes = program, deque(changes)
        self._tables = PlanTables(job, session)
        self._meter = Meter()
        self._selection = Selection(job, progress)
        session.steps.listener = emit
        session.steps.hooks = StepHooks(is_urgent=self._is_urgent, on_step=self._evaluate_if_due, on_end=self._end)
        session.loop.hooks = SlotHooks(
            must_pause=self._must_pause, on_done=self._count_slots, on_read=self._log_progress
        )
        self._is_alone = is_alone()
        self._steps_saved = session.steps.num_issued  # before the last save
        self._start_plan()
        self._seconds_before = progress.seconds  # of earlier processes of this run
        self._saved_at, self._logged_at, self._saves = time.monotonic(), 0.0, 0
        self._stop = threading.Event()  # set by a signal

    def run(self) -> None:
        """Trains to the end of the plan.

        Raises:
            Interrupted: SIGINT or SIGTERM was received. The state is saved.
            RunError: a device failed. The last checkpoint is intact.
        """
        with deferred_stop() as self._stop, self._session.executor.blaming(None, None):
            todo, stopped = self._update_plan(self._events_left()), False
            if todo:
                self._compile_missing()
                self._emit(PhaseBegun(slot=self._progress.slot, text="first steps"))
            while todo and not stopped:
                todo = self._issue_until_pause(todo)
                with saving() if self._stop.is_set() else nullcontext():
                    self._session.drain()
                self._progress.slot = todo[0].slot if todo else self._job.plan.num_slots
                stopped = any_process(self._stop.is_set())
                todo = self._update_plan(todo, revise=not stopped)
                if todo and not stopped and self._save_due():
                    self._save_state()
            self._emit(self._progress_event(self._progress.slot))
            self._save_state(wait=True)
        if todo:
            raise Interrupted

    def _events_left(self) -> list[schedule.Event]:
        plan = self._job.plan
        program = schedule.one_forward_one_backward(plan) if self._program is None else self._program
        return [event for event in issue_order(program, plan.num_stages) if event.slot >= self._progress.slot]

    def _update_plan(self, todo: list[schedule.Event], *, revise: bool = True) -> list[schedule.Event]:
        """Applies the changes at a drained slot. Returns the remaining events."""
        self._apply_changes()
        while revise and (changes := self._hooks.revise()) is not None:
            self._changes = deque([*cap_slots(self._changes, self._progress.slot), *changes])
            self._tables.renew()
            self._start_plan()
            self._apply_changes()
            todo = self._events_left()
            if todo:
                self._compile_missing()
        if self._any_running() or not todo:
            return todo
        self._progress.slot = self._job.plan.num_slots
        return []

    def _start_plan(self) -> None:
        """Continues with the job's plan, which is equal to the one before in all slots that are done."""
        self._progress.plan = self._job.plan.digest
        self._has_rollouts = any(data.rollout is not None for data in self._job.prepared.adapters.values())
        self._meter.replan(self._tables.slot_tokens, self._tables.slot_rows, self._tables.last_slot)
        for name in self._session.steps.failed():
            self._meter.drop(name, self._progress.slot)

    def _apply_changes(self) -> None:
        added: list[str] = []
        while self._changes and self._changes[0].slot <= self._progress.slot:
            change = self._changes.popleft()
            event = apply(change, self._progress)
            if event is not None:
                self._emit(event)
                self._evaluate_and_export(self._progress.adapters[change.adapter])
                self._selection.compare()  # before the next change, as in the run that made them
                added += [change.adapter] if change.action == "add" else []
        if added:
            self._hooks.add(added, self._progress.slot)
            self._tables.renew()  # the samples of new adapters have references now
            self._compile_missing()

    def _evaluate_and_export(self, adapter: AdapterProgress) -> None:
        """Evaluates and exports an adapter that a change has ended or paused."""
        # Otherwise it was evaluated after its step.
        if adapter.status == "done" and not self._selection.evaluates_between(adapter.name, adapter.step):
            self._evaluate(adapter.name, adapter.step, self._progress.slot)
        if adapter.status != "running":
            self._meter.drop(adapter.name, self._progress.slot)
            self._hooks.finish(adapter.name, self._progress.slot)

    def _issue_until_pause(self, todo: list[schedule.Event]) -> list[schedule.Event]:
        """Issues events in order until a pause is due. Returns the events of slots that did not enter."""
        self._session.send_ahead(self._tables.next_uses, todo[0].slot)
        while True:
            todo = self._session.run(todo, self._tables.slot_adapters.__getitem__, self._tables.batches.of)
            if not todo or self._pause_due(slot := todo[0].slot):
                return todo
            lacks_places = self._lacks_places(slot)
            if not lacks_places and not self._lacks_rows(slot):
                return todo
            if lacks_places:
                self._session.take_places(self._tables.next_uses, slot)
                continue
            self._session.drain()
            self._progress.slot = slot
            with self._meter.paused(SAMPLING):
                self._hooks.draw_rows(slot)

    def _must_pause(self, slot: int) -> bool:
        return self._pause_due(slot) or self._lacks_rows(slot) or self._lacks_places(slot)

    def _lacks_rows(self, slot: int) -> bool:
        return self._has_rollouts and self._hooks.lacks_rows(slot)

    def _lacks_places(self, slot: int) -> bool:
        return self._session.is_paged and not self._session.holds(self._tables.slot_adapters[slot])

    def _count_slots(self, slots: list[int]) -> None:
        self._meter.slots_done(slots)
        self._hooks.finished()

    def _is_urgent(self, name: str, step: int) -> bool:
        """Whether a step is read at once.

        An evaluation needs the weights of its step; those of the last step stay. What decides about other adapters is
        read at once, so that it is read at the same slot in every run.
        """
        last = step == self._progress.adapters[name].num_steps
        return self._needs_evaluation(name, step) and (not last or self._job.config.ends_early)

    def _needs_evaluation(self, name: str, step: int) -> bool:
        """Whether the adapter is evaluated after this step."""
        last = step == self._progress.adapters[name].num_steps
        has_held_out = self._job.prepared.adapters[name].eval is not None
        return has_held_out and (last or self._selection.evaluates_between(name, step))

    def _evaluate_if_due(self, task: Task, slots_done: int) -> None:
        if self._needs_evaluation(task.name, task.step):
            self._evaluate(task.name, task.step, slots_done)

    def _evaluate(self, name: str, step: int, slots_done: int) -> None:
        """Evaluates an adapter. The meter counts the time as a pause."""
        with self._meter.paused(EVALUATING):
            metrics = self._hooks.evaluate(name, step, slots_done)
        if metrics is not None and self._selection.take(name, step, metrics):
            self._hooks.keep_best(name, slots_done)

    def _end(self, task: Task, slots_done: int) -> None:
        if task.status == "failed":
            self._meter.drop(task.name, slots_done)
            self._selection.compare()
        self._hooks.finish(task.name, slots_done)

    def _compile_missing(self) -> None:
        """Compiles what the start has not."""
        slot = self._progress.slot
        rows = self._tables.batches.empty(slot)
        if self._session.executor.is_warm(rows):
            return
        self._emit(PhaseBegun(slot=slot, text="compiling the training step"))
        began = time.perf_counter()
        with self._meter.paused(COMPILING):
            self._session.executor.warm_up(rows)
            release_unused()
        seconds = round(time.perf_counter() - began, 3)
        self._emit(ProgramCompiled(slot=slot, program="training step", seconds=seconds))

    def _evaluations_left_s(self) -> float | None:
        """Estimates the time of future evaluations from those so far. None if unknown."""
        every, halving, remaining_s = self._job.config.train.eval_every_steps, self._job.config.halving, 0.0
        for name, adapter in self._progress.adapters.items():
            if adapter.status != "running" or self._job.prepared.adapters[name].eval is None:
                continue
            seconds = self._hooks.evaluation_s(name)
            if seconds is None:
                return None
            remaining_s += seconds * evaluations(adapter.step, adapter.num_steps, every, halving)
        return remaining_s

    def _any_running(self) -> bool:
        """Whether an adapter still trains, or will again. All processes see the same at the same slot."""
        return bool(self._changes) or any(a.status == "running" for a in self._progress.adapters.values())

    def _pause_due(self, slot: int) -> bool:
        if not self._any_running() or (self._changes and self._changes[0].slot <= slot):
            return True
        stopped = dict(self._job.plan.stopped)
        if self._job.config.train.on_failed == "replan" and not self._session.steps.failed() <= stopped.keys():
            return True
        if any(adapter.stop_pending for adapter in self._progress.adapters.values()):
            return True
        if self._steps_to_save():
            return True
        is_asked = self._stop.is_set() or self._hooks.wants_revision() or self._time_to_save()
        if self._is_alone:
            return is_asked
        return any_process(is_asked) if slot % ASK_EVERY == 0 else False

    def _save_due(self) -> bool:
        """Whether a pause saves. A new plan alone does not: from an earlier checkpoint it comes to the same slots."""
        return self._steps_to_save() or any_process(self._time_to_save())

    def _steps_to_save(self) -> bool:
        every = self._job.config.save.every_steps
        return every is not None and self._session.steps.num_issued - self._steps_saved >= every

    def _time_to_save(self) -> bool:
        minutes = self._job.config.save.every_minutes
        if minutes is None:
            return False
        minutes = minutes if self._saves else min(minutes, FIRST_SAVE_MINUTES)
        return time.monotonic() - self._saved_at > 60 * minutes

    def _save_state(self, *, wait: bool = False) -> None:
        self._progress.seconds = self._seconds_before + self._meter.seconds
        with self._meter.paused(SAVING), saving():
            self._hooks.save(wait)
        self._steps_saved, self._saved_at = self._session.steps.num_issued, time.monotonic()
        self._saves += 1

    def _progress_event(self, slots_done: int) -> SlotDone:
        figures = self._meter.snapshot(slots_done, self._evaluations_left_s())
        return SlotDone(slot=slots_done, **figures, bubble_share=self._hooks.bubble_share())

    def _log_progress(self, slots_done: int) -> None:
        every = self._job.config.train.log_every_s
        if time.monotonic() - self._logged_at >= (LOG_EVERY_S if every is None else every):
            self._logged_at = time.monotonic()
            self._emit(self._progress_event(slots_done))
