"""Optimizer steps: issued once a global batch is complete, and read when its slot is done.

Meanwhile the devices compute the next microbatches. A step that is not finite changes nothing: the adapter stops with
its last good weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from lorafusion_jax.objective.batch import finished_metrics
from lorafusion_jax.report.events import AdapterFailed, Listener, StepTaken
from lorafusion_jax.session.batch_end import BatchEnds, StepResult
from lorafusion_jax.session.executor import Executor
from lorafusion_jax.session.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHooks:
    """Called when the results of steps are read.

    Attributes:
        is_urgent: (adapter, step) whether a step is read as soon as it is issued.
        on_step: (task, slots done) after a step was reported, before its task may be done.
        on_end: (task, slots done) after a task is done or has failed.
    """

    is_urgent: Callable[[str, int], bool] = lambda name, step: False
    on_step: Callable[[Task, int], None] = lambda task, slots_done: None
    on_end: Callable[[Task, int], None] = lambda task, slots_done: None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Issued:
    """An optimizer step whose result was not read yet."""

    task: Task
    step: int
    slots_done: int
    result: StepResult


class Steps:
    """Issues steps and reports their results to a listener, in the order of issue.

    Args:
        ends: steps adapters whose global batches are closed.
        tasks: by name, as the session keeps them.

    Attributes:
        listener: called with `StepTaken` and `AdapterFailed`.
        hooks: of whoever gives the slots.
        num_issued: number of all steps.
    """

    def __init__(self, executor: Executor, ends: BatchEnds, tasks: Mapping[str, Task]):
        self._executor, self._ends, self._tasks = executor, ends, tasks
        self.listener: Listener = lambda event: None
        self.hooks = StepHooks()
        self._issued: deque[_Issued] = deque()
        self.num_issued = 0

    def issue(self, name: str, slot: int) -> None:
        """Issues the step of an adapter whose global batch ends in a slot; see `settle`."""
        task = self._tasks[name]
        # The clock has the steps that were read. If one that waits is refused, the devices refuse this one, too.
        step = task.step + self.num_waiting(name) + 1
        result = self._ends.step(name, task.source.hyper(step))
        self.num_issued += 1
        self._issued.append(_Issued(task=task, step=step, slots_done=slot + 1, result=result))
        if self.hooks.is_urgent(name, step):
            self.read_all()

    def settle(self, name: str) -> None:
        """Reads the last step of an adapter, if its source judges steps, before its next batch is closed."""
        while self._tasks[name].source.judges_steps and self.num_waiting(name):
            self._read_step(self._issued.popleft())

    def num_waiting(self, name: str) -> int:
        """Number of steps of an adapter whose results were not read yet."""
        return sum(issued.task.name == name for issued in self._issued)

    def failed(self, names: Iterable[str] | None = None) -> frozenset[str]:
        """Returns those of some adapters that have failed (None: of all)."""
        tasks = self._tasks
        names = tasks if names is None else names
        return frozenset(name for name in names if name in tasks and tasks[name].status == "failed")

    def read(self, slots_done: int) -> None:
        """Reads the results of the steps in the first `slots_done` slots, which are done."""
        while self._issued and self._issued[0].slots_done <= slots_done:
            self._read_step(self._issued.popleft())

    def read_all(self) -> None:
        """Waits for all steps and reads their results."""
        while self._issued:
            self._read_step(self._issued.popleft())

    def _read_step(self, issued: _Issued) -> None:
        task, result = issued.task, issued.result
        if task.status == "failed":  # the devices have refused this step, too
            return
        # Reading waits for the devices, and a program that has failed raises here.
        with self._executor.blaming(None, issued.slots_done - 1, [task.name]):
            loss, norm = result.loss, result.grad_norm
            metrics = result.metrics if task.chosen.objective.metrics else {}
        if not result.healthy:
            self._fail(issued)
            return
        # Before anyone hears of it: listeners and hooks read the clock, and may save or export the adapter.
        task.clock.step = issued.step
        if task.source.judges_steps:
            task.source.end_step(issued.step, norm)
            return
        self.listener(
            StepTaken(
                slot=issued.slots_done,
                adapter=task.name,
                step=issued.step,
                loss=loss,
                grad_norm=norm,
                lr=float(task.source.hyper(issued.step).lr),
                loss_tokens=task.source.num_loss_tokens(issued.step),
                metrics={
                    **(finished_metrics(task.chosen, metrics) if metrics else {}),
                    **task.source.metrics(issued.step),
                },
            )
        )
        self.hooks.on_step(task, issued.slots_done)
        if task.step == task.num_steps:
            task.status = "done"
            self.hooks.on_end(task, issued.slots_done)

    def _fail(self, issued: _Issued) -> None:
        task = issued.task
        # First: whatever is read, saved or exported from now on has the last good weights.
        self._ends.put_back(task.name, issued.result)
        cause = self._ends.not_finite(task.name, issued.result) or self._loss_not_finite
        if task.source.judges_steps:
            self._ends.revive(task.name)
            task.source.end_step(issued.step, issued.result.grad_norm, refused=cause)
            return
        reason = f"{cause} at step {issued.step}, slot {issued.slots_done - 1}"
        self._end_failed(task, reason, issued.step, issued.slots_done)

    def fail(self, name: str, reason: str, slots_done: int) -> None:
        """Ends an adapter with the weights of its last step, where no slot is in flight."""
        task = self._tasks[name]
        self._end_failed(task, reason, task.step + 1, slots_done)

    def _end_failed(self, task: Task, reason: str, step: int, slots_done: int) -> None:
        task.clock.fail(reason)
        self.listener(AdapterFailed(slot=slots_done, adapter=task.name, step=step, reason=reason, kept_step=task.step))
        self.hooks.on_end(task, slots_done)

    @property
    def _loss_not_finite(self) -> str:
        last = len(self._executor.stages) - 1
        return "loss not finite" + (f" (stage {last})" if last else "")
