"""Executes a plan: issues its events, steps the adapters whose global batch is complete, looks at results later.

The devices always have the next microbatch queued. An adapter whose step would not be finite keeps its last good
weights and stops. Its rows become padding where they stand, so the others compute what they would have computed, and a
slot of such rows only is skipped. Once all adapters have stopped, the rest of the plan is left out. To save, no further
slot is let in until those in the pipeline are through. At such a drain point another plan may take the place of what is
left.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.assemble import Microbatch
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.optim.schedules import learning_rates
from lorafusion_jax.optim.step import hyper
from lorafusion_jax.pipeline.batches import Batches, without
from lorafusion_jax.pipeline.executor import Executor, StepResult
from lorafusion_jax.pipeline.processes import any_process, is_alone
from lorafusion_jax.report.events import (
    AdapterFailed,
    Listener,
    PhaseBegun,
    ProgramCompiled,
    SlotDone,
    StepTaken,
)
from lorafusion_jax.signals import deferred_stop
from lorafusion_jax.training.changes import Change, Revision, apply
from lorafusion_jax.training.meter import Meter
from lorafusion_jax.training.prefetch import prefetch
from lorafusion_jax.training.state import Progress
from scheduling import Plan, issue_order
from scheduling import pipeline as schedule

LOG_EVERY_S = 2.0
ASK_EVERY = 8  # slots between two questions among processes whether to pause


class Interrupted(Exception):
    """The run was asked to stop and has saved its state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What the loop does besides training.

    Attributes:
        save: writes a checkpoint of the state.
        evaluate: (adapter, step, slots done) → held-out loss is measured and reported.
        finish: (adapter, slots done); an adapter took its last step, and what follows may go on while others train.
        finished: tells what came of it meanwhile.
        wants_revision: whether a user asks for another plan; looked at before every slot.
        revise: another plan from the drained slot `progress.slot` on; None: the same. All processes ask together.
        bubble_share: measured idle share of the recent slots, pauses left out; None: nothing to say.
    """

    save: Callable[[], None]
    evaluate: Callable[[str, int, int], None]
    finish: Callable[[str, int], None]
    finished: Callable[[], None] = lambda: None
    wants_revision: Callable[[], bool] = lambda: False
    revise: Callable[[], Revision | None] = lambda: None
    bubble_share: Callable[[], float | None] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """An optimizer step that was issued and not looked at yet."""

    adapter: str
    step: int
    lr: float
    loss_tokens: int
    slots_done: int
    result: StepResult


class Loop:
    """One run over a plan, from `progress.slot` to the end; changes `progress` in place.

    Args:
        program: events per stage; None: 1F1B.
        changes: that the plan knows and `progress` does not yet, in order of slots.
    """

    def __init__(
        self,
        config: JobConfig,
        prepared: Prepared,
        plan: Plan,
        executor: Executor,
        progress: Progress,
        emit: Listener,
        hooks: Hooks,
        program: schedule.Program | None = None,
        changes: Sequence[Change] = (),
    ):
        self._config, self._executor = config, executor
        self._prepared, self._progress, self._emit, self._hooks = prepared, progress, emit, hooks
        self._program, self._changes = program, deque(changes)
        self._index = {adapter.name: index for index, adapter in enumerate(config.adapters)}
        self._batches = Batches(config, prepared, plan, executor.local_replicas)
        steps = Counter(name for name, _ in self._batches.loss_tokens)  # of the job: some may end earlier
        self._rates = {a.name: learning_rates(a.optim, steps[a.name]) for a in config.adapters}
        self._left_out: dict[int, frozenset[str]] = {}  # slot -> adapters that had failed when it was let in
        self._meter = Meter([], plan.capacity_tokens * plan.data_parallel, {}, progress.slot)
        self._take_plan(plan)
        self._seconds_before = progress.seconds  # of earlier sittings
        self._taken: deque[Taken] = deque()
        self._steps_since_save, self._saved_at, self._logged_at = 0, time.monotonic(), 0.0
        self._stop = threading.Event()  # set by a signal

    def run(self) -> None:
        """Trains to the end of the plan.

        Raises:
            Interrupted: SIGINT or SIGTERM came; the state is saved.
            RunError: a device failed; the last checkpoint stands.
        """
        with deferred_stop() as self._stop, self._executor.blaming(None, None):
            todo, stopped = self._settle(self._events_left()), False
            if todo:
                self._compile()
            while todo and not stopped:
                todo = self._issue(todo)
                self._drain()
                self._progress.slot = todo[0].slot if todo else len(self._plan.slots)
                stopped = any_process(self._stop.is_set())
                todo = self._settle(todo, revise=not stopped)
                if todo and not stopped:
                    self._save()
            self._emit(self._figures(self._progress.slot))
            self._save()
        if todo:
            raise Interrupted

    def _events_left(self) -> list[schedule.Event]:
        program = schedule.one_forward_one_backward(self._plan) if self._program is None else self._program
        return [event for event in issue_order(program, self._plan.num_stages) if event.slot >= self._progress.slot]

    def _settle(self, todo: list[schedule.Event], *, revise: bool = True) -> list[schedule.Event]:
        """Carries out at a drained slot what is to change there; returns the events that are left then."""
        self._carry_out_changes()
        while revise and (revision := self._hooks.revise()) is not None:
            self._changes.extendleft(reversed(revision.changes))
            self._take_plan(revision.plan)
            self._carry_out_changes()
            todo = self._events_left()
        if self._anybody_left() or not todo:
            return todo
        self._progress.slot = len(self._plan.slots)
        return []

    def _take_plan(self, plan: Plan) -> None:
        """Goes on with a plan that is equal to the one before in all slots that are done."""
        self._plan, self._progress.plan = plan, plan.digest
        self._batches.take_plan(plan)
        ends = list(plan.batches_ending())
        self._batch_of = {(slot, name): batch for slot, name, batch in ends}
        self._slot_tokens = slot_tokens(plan, self._prepared)
        last = {name: max((slot for slot, n, _ in ends if n == name), default=-1) for name in self._index}
        self._meter.replan(self._slot_tokens, last)
        for name in self._failed():
            self._meter.drop(name, self._progress.slot)

    def _carry_out_changes(self) -> None:
        while self._changes and self._changes[0].slot <= self._progress.slot:
            change = self._changes.popleft()
            adapter = self._progress.adapters[change.adapter]
            news = apply(change, adapter)
            if news is None:
                continue
            self._emit(news)
            every = self._config.train.eval_every_steps
            if adapter.status == "done" and not (every and adapter.step % every == 0):  # else that has been done
                self._hooks.evaluate(adapter.name, adapter.step, self._progress.slot)
            if adapter.status != "running":
                self._meter.drop(adapter.name, self._progress.slot)
                self._hooks.finish(adapter.name, self._progress.slot)

    def _issue(self, todo: list[schedule.Event]) -> list[schedule.Event]:
        """Issues events in order until a pause is due; returns those of slots that were not let in."""
        slots = [event.slot for event in todo if event.kind == "forward" and event.stage == 0]
        batches = prefetch(self._batches.of, slots)
        later: list[schedule.Event] = []
        try:
            for event in todo:
                if (later and event.slot >= later[0].slot) or (
                    event.kind == "forward" and event.stage == 0 and self._pause_due(event.slot)
                ):
                    later.append(event)
                else:
                    self._run_event(event, batches)
        finally:
            batches.close()
        return later

    def _run_event(self, event: schedule.Event, batches: Iterator[Microbatch]) -> None:
        enters = event.kind == "forward" and event.stage == 0
        if enters:  # all events of a slot know the same adapters as failed, in every process
            self._left_out[event.slot] = self._failed()
        failed, tokens = self._left_out[event.slot], self._slot_tokens[event.slot]
        if event.kind == "update":
            for name in event.adapters:
                if name not in failed and self._executor.close_batch(event, name):
                    self._step(name, event.slot)
            return
        batch = next(batches) if enters else None
        if failed.issuperset(tokens):
            return
        if batch is not None:
            self._executor.admit(event.slot, without(batch, [self._index[name] for name in failed]))
            self._notice(self._executor.completed_slots())
        self._executor.issue(event, tuple(tokens))

    def _failed(self) -> frozenset[str]:
        return frozenset(name for name, adapter in self._progress.adapters.items() if adapter.status == "failed")

    def _notice(self, slots: list[int]) -> None:
        """Counts slots that are through and reads the results of steps that came with them."""
        self._meter.slots_done(slots)
        for slot in slots:
            while self._taken and self._taken[0].slots_done <= slot + 1:
                self._look()
            self._log(slot + 1)
        self._hooks.finished()

    def _drain(self) -> None:
        self._executor.wait_all()
        self._notice(self._executor.completed_slots())
        while self._taken:
            self._look()

    def _compile(self) -> None:
        slot = self._progress.slot
        self._emit(PhaseBegun(slot=slot, text="compiling the training step"))
        began = time.perf_counter()
        self._executor.warm_up(self._batches.empty())
        seconds = round(time.perf_counter() - began, 3)
        self._emit(ProgramCompiled(slot=slot, program="training step", seconds=seconds))
        self._meter.pause()

    def _step(self, name: str, slot: int) -> None:
        number = self._batch_of[slot, name]
        lr = float(self._rates[name][number])
        settings = self._config.adapters[self._index[name]].optim
        result = self._executor.step(name, hyper(settings, lr))
        self._steps_since_save += 1
        taken = Taken(
            adapter=name,
            step=number + 1,
            lr=lr,
            loss_tokens=self._batches.loss_tokens[name, number],
            slots_done=slot + 1,
            result=result,
        )
        self._taken.append(taken)
        last = number + 1 == self._progress.adapters[name].num_steps
        if self._evaluated(name, number + 1) and not last:  # needs the weights of exactly this step; the last ones stay
            while self._taken:
                self._look()

    def _look(self) -> None:
        """Reads the result of the oldest step that nobody has looked at; waits for it."""
        step = self._taken.popleft()
        adapter = self._progress.adapters[step.adapter]
        if adapter.status == "failed":  # the devices had dropped it already
            return
        with self._executor.blaming(None, step.slots_done - 1, [step.adapter]):
            loss, norm, metrics = step.result.loss, step.result.grad_norm, step.result.metrics
        if not step.result.healthy:
            self._executor.put_back(step.adapter, step.result)
            adapter.status = "failed"
            adapter.reason = f"{self._culprit(step)} at step {step.step}, slot {step.slots_done - 1}"
            self._meter.drop(step.adapter, step.slots_done)
            self._emit(
                AdapterFailed(
                    slot=step.slots_done,
                    adapter=step.adapter,
                    step=step.step,
                    reason=adapter.reason,
                    kept_step=adapter.step,
                )
            )
            self._hooks.finish(step.adapter, step.slots_done)
            return
        adapter.step = step.step
        own = self._config.adapters[self._index[adapter.name]].objective.chosen.objective.metrics
        self._emit(
            StepTaken(
                slot=step.slots_done,
                adapter=step.adapter,
                step=step.step,
                loss=loss,
                grad_norm=norm,
                lr=step.lr,
                loss_tokens=step.loss_tokens,
                metrics={name: metrics[name] for name in own},
            )
        )
        if self._evaluated(adapter.name, step.step):
            self._hooks.evaluate(adapter.name, step.step, step.slots_done)
            self._meter.pause()
        if step.step == adapter.num_steps:
            adapter.status = "done"
            self._hooks.finish(adapter.name, step.slots_done)

    def _evaluated(self, name: str, step: int) -> bool:
        """Tells whether the adapter is evaluated after this step."""
        every = self._config.train.eval_every_steps
        last = step == self._progress.adapters[name].num_steps
        return self._prepared.adapters[name].eval is not None and (last or bool(every and step % every == 0))

    def _culprit(self, step: Taken) -> str:
        last = len(self._executor.stages) - 1
        bad = self._executor.not_finite(step.adapter, step.result)
        return bad or "loss not finite" + (f" (stage {last})" if last else "")

    def _anybody_left(self) -> bool:
        """Whether an adapter still trains, or will again; processes find that out at the same slot."""
        return bool(self._changes) or any(a.status == "running" for a in self._progress.adapters.values())

    def _pause_due(self, slot: int) -> bool:
        if not self._anybody_left() or (self._changes and self._changes[0].slot <= slot):
            return True
        if self._config.train.on_failed == "replan" and not self._failed().issubset(dict(self._plan.stopped)):
            return True
        save = self._config.save
        if save.every_steps is not None and self._steps_since_save >= save.every_steps:
            return True
        wanted = self._stop.is_set() or self._hooks.wants_revision()
        wanted |= save.every_minutes is not None and time.monotonic() - self._saved_at > 60 * save.every_minutes
        return any_process(wanted) if slot % ASK_EVERY == 0 or is_alone() else False

    def _save(self) -> None:
        self._progress.seconds = self._seconds_before + self._meter.seconds
        self._hooks.save()
        self._steps_since_save, self._saved_at = 0, time.monotonic()
        self._meter.pause()

    def _figures(self, slots_done: int) -> SlotDone:
        return SlotDone(slot=slots_done, **self._meter.snapshot(slots_done), bubble_share=self._hooks.bubble_share())

    def _log(self, slots_done: int) -> None:
        every = self._config.train.log_every_s
        if time.monotonic() - self._logged_at >= (LOG_EVERY_S if every is None else every):
            self._logged_at = time.monotonic()
            self._emit(self._figures(slots_done))


def slot_tokens(plan: Plan, prepared: Prepared) -> list[dict[str, int]]:
    """Real tokens of every adapter in every slot."""
    lengths: Mapping[str, np.ndarray] = {name: data.stream_tokens() for name, data in prepared.adapters.items()}
    result: list[dict[str, int]] = []
    for slot in plan.slots:
        tokens: dict[str, int] = {}
        for ref in slot.samples:
            tokens[ref.adapter] = tokens.get(ref.adapter, 0) + int(lengths[ref.adapter][ref.sample])
        result.append(tokens)
    return result
