"""The optimizer steps of a live session: issued when a global batch is complete, read when its slot is."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from lorafusion_jax.config.stack import place_name
from lorafusion_jax.objective.batch import finished_metrics
from lorafusion_jax.optim.step import hyper
from lorafusion_jax.report.events import AdapterFailed, Listener, StepTaken
from lorafusion_jax.session.executor import Executor, StepResult
from lorafusion_jax.session.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class _Issued:
    """An optimizer step whose result was not read yet."""

    place: int
    task: Task
    step: int
    slot: int
    result: StepResult


class Steps:
    """Issues steps and reports their results to a listener, in the order of issue.

    Args:
        tasks: place → its adapter, as the session keeps it.
    """

    def __init__(self, executor: Executor, tasks: Mapping[int, Task]):
        self._executor, self._tasks = executor, tasks
        self._issued: deque[_Issued] = deque()
        self.listener: Listener = lambda event: None

    def issue(self, place: int, slot: int) -> None:
        """Issues the step of an adapter whose global batch is complete."""
        task = self._tasks[place]
        number = task.step + self.waiting(place)
        result = self._executor.step(place_name(place), hyper(task.adapter.optim, float(task.rates[number])))
        self._issued.append(_Issued(place=place, task=task, step=number + 1, slot=slot, result=result))

    def waiting(self, place: int) -> int:
        """Number of steps of an adapter whose results were not read yet."""
        return sum(issued.place == place for issued in self._issued)

    def read(self, slots_done: int) -> None:
        """Reads the results of steps in slots below `slots_done`."""
        while self._issued and self._issued[0].slot < slots_done:
            self._read_step(self._issued.popleft())

    def failed(self) -> frozenset[int]:
        """Places of failed adapters."""
        return frozenset(place for place, task in self._tasks.items() if task.status == "failed")

    def _read_step(self, issued: _Issued) -> None:
        task, result = issued.task, issued.result
        if task.status == "failed":  # the devices have refused this step, too
            return
        with self._executor.blaming(None, issued.slot, [task.name]):
            loss, norm, healthy = result.loss, result.grad_norm, result.healthy
            metrics = result.metrics if task.chosen.of_samples else {}
        if not healthy:
            self._fail(issued)
            return
        task.step = issued.step
        self.listener(
            StepTaken(
                slot=issued.slot + 1,
                adapter=task.name,
                step=issued.step,
                loss=loss,
                grad_norm=norm,
                lr=float(task.rates[issued.step - 1]),
                loss_tokens=task.loss_tokens[issued.step - 1],
                metrics=finished_metrics(task.chosen, metrics),
            )
        )
        if task.step == task.num_steps:
            task.status = "done"

    def _fail(self, issued: _Issued) -> None:
        task, name = issued.task, place_name(issued.place)
        self._executor.put_back(name, issued.result)
        cause = self._executor.not_finite(name, issued.result) or "loss not finite"
        task.status, task.reason = "failed", f"{cause} at step {issued.step}"
        self.listener(
            AdapterFailed(
                slot=issued.slot + 1, adapter=task.name, step=issued.step, reason=task.reason, kept_step=task.step
            )
        )
