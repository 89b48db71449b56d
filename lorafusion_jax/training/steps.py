"""Takes optimizer steps: issues them once a global batch is complete, and reads their results when its slot is done.

Meanwhile the devices compute the next microbatches. A step that is not finite changes nothing: the adapter stops with
its last good weights.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from lorafusion_jax.objective.batch import finished_metrics
from lorafusion_jax.optim.step import hyper
from lorafusion_jax.report.events import AdapterFailed, Listener, StepTaken
from lorafusion_jax.session.executor import Executor, StepResult
from lorafusion_jax.training.hooks import Hooks
from lorafusion_jax.training.job import Job
from lorafusion_jax.training.meter import EVALUATING, Meter
from lorafusion_jax.training.plan_tables import PlanTables
from lorafusion_jax.training.selection import Selection
from lorafusion_jax.training.state import AdapterProgress, Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedStep:
    """An optimizer step that was issued and whose result was not read yet."""

    adapter: str
    step: int
    lr: float
    loss_tokens: int
    slots_done: int
    result: StepResult


class Steps:
    """Takes the optimizer steps of a run and reports their results. Updates `progress` in place.

    Attributes:
        since_save: number of steps issued since the last save; the loop resets it.
    """

    def __init__(
        self,
        job: Job,
        tables: PlanTables,
        executor: Executor,
        progress: Progress,
        meter: Meter,
        emit: Listener,
        hooks: Hooks,
    ):
        self._job, self._tables, self._executor = job, tables, executor
        self._progress, self._meter, self._emit, self._hooks = progress, meter, emit, hooks
        self._selection = Selection(job, progress)
        self._issued: deque[IssuedStep] = deque()
        self.since_save = 0

    def take(self, name: str, slot: int) -> None:
        """Issues the step of an adapter whose global batch ends in a slot."""
        tables, number = self._tables, self._tables.batch_of[slot, name]
        lr = float(tables.rates[name][number])
        result = self._executor.step(name, hyper(self._job.config.adapter(name).optim, lr))
        self.since_save += 1
        issued = IssuedStep(
            adapter=name,
            step=number + 1,
            lr=lr,
            loss_tokens=tables.batches.loss_tokens[name, number],
            slots_done=slot + 1,
            result=result,
        )
        self._issued.append(issued)
        last = number + 1 == self._progress.adapters[name].num_steps
        # An evaluation needs the weights of this step; those of the last step stay. What decides about other adapters
        # is read at once, so that it is read at the same slot in every run.
        if self._needs_evaluation(name, number + 1) and (not last or self._selection.stops_adapters):
            self.read_all()

    def read_until(self, slots_done: int) -> None:
        """Reads the results of the steps in the first `slots_done` slots, which are done."""
        while self._issued and self._issued[0].slots_done <= slots_done:
            self._read_next()

    def read_all(self) -> None:
        """Waits for all steps and reads their results."""
        while self._issued:
            self._read_next()

    def evaluate(self, name: str, step: int, slots_done: int) -> None:
        """Evaluates an adapter. The meter counts the time as a pause."""
        with self._meter.paused(EVALUATING):
            metrics = self._hooks.evaluate(name, step, slots_done)
        if metrics is not None and self._selection.take(name, step, metrics):
            self._hooks.keep_best(name, slots_done)

    def evaluates_between(self, step: int) -> bool:
        """Whether an adapter is evaluated after this step, even if it is not its last."""
        return self._selection.evaluates_between(step)

    def _read_next(self) -> None:
        step = self._issued.popleft()
        adapter = self._progress.adapters[step.adapter]
        if adapter.status == "failed":  # the devices have refused this step, too
            return
        with self._executor.blaming(None, step.slots_done - 1, [step.adapter]):
            loss, norm, metrics = step.result.loss, step.result.grad_norm, step.result.metrics
        if not step.result.healthy:
            self._fail(adapter, step)
            return
        adapter.step = step.step
        chosen = self._job.config.adapter(adapter.name).objective.chosen
        self._emit(
            StepTaken(
                slot=step.slots_done,
                adapter=step.adapter,
                step=step.step,
                loss=loss,
                grad_norm=norm,
                lr=step.lr,
                loss_tokens=step.loss_tokens,
                metrics=finished_metrics(chosen, metrics),
            )
        )
        if self._needs_evaluation(adapter.name, step.step):
            self.evaluate(adapter.name, step.step, step.slots_done)
        if step.step == adapter.num_steps:
            adapter.status = "done"
            self._hooks.finish(adapter.name, step.slots_done)

    def _fail(self, adapter: AdapterProgress, step: IssuedStep) -> None:
        self._executor.put_back(step.adapter, step.result)
        adapter.status = "failed"
        adapter.reason = f"{self._failure_cause(step)} at step {step.step}, slot {step.slots_done - 1}"
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

    def _needs_evaluation(self, name: str, step: int) -> bool:
        """Whether the adapter is evaluated after this step."""
        last = step == self._progress.adapters[name].num_steps
        return self._job.prepared.adapters[name].eval is not None and (last or self.evaluates_between(step))

    def _failure_cause(self, step: IssuedStep) -> str:
        last = len(self._executor.stages) - 1
        bad = self._executor.not_finite(step.adapter, step.result)
        return bad or "loss not finite" + (f" (stage {last})" if last else "")
