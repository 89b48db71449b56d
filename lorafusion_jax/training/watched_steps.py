"""Runs a plan and records one adapter's steps: the loss, the gradient, the weights at the end.

A second run can follow the first: before each step its gradient is recorded and then replaced by that of the first run.
So both compute every gradient at the same weights, and optimizers do not amplify what rounding changes in a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np

from lorafusion_jax.checkpoint.warm_start import read_warm_starts
from lorafusion_jax.report.events import RunEvent, StepTaken
from lorafusion_jax.session.base import check_mesh
from lorafusion_jax.session.batch_end import ClosedBatch
from lorafusion_jax.session.session import Session
from lorafusion_jax.session.stage import Stage
from lorafusion_jax.session.state import adapter_arrays
from lorafusion_jax.training.hooks import Hooks
from lorafusion_jax.training.job import Job
from lorafusion_jax.training.loop import PlanRun
from lorafusion_jax.training.state import AdapterProgress, Progress

type Tensors = Mapping[str, np.ndarray]  # leaf -> array of all layers
type Closed = list[Future[ClosedBatch]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """The steps of one adapter.

    Attributes:
        losses, gradients, closed: of each step.
        first, last: weights before the first and after the last step.
    """

    losses: Sequence[float]
    gradients: Sequence[Tensors]
    closed: Sequence[Closed]
    first: Tensors
    last: Tensors


class WatchedSession:
    """A session of a job that runs plans from the job's start and watches one adapter. Close it at the end."""

    def __init__(self, job: Job, name: str):
        check_mesh(job.config)
        self._job, self._name = job, name
        self._session = Session.open(job.config, job.prepared)

    def run(self, follow: Watched | None = None) -> Watched:
        """Trains by the plan of the job.

        Args:
            follow: takes the steps of this run instead of its own.
        """
        session, name, plan = self._session, self._name, self._job.plan
        session.start_all(read_warm_starts(self._job.config))
        session.finish_loading()
        progress = Progress(
            adapters={job.name: AdapterProgress(name=job.name, num_steps=job.num_batches) for job in plan.jobs}
        )
        losses: list[float] = []
        gradients: list[Tensors] = []
        batches: list[Closed] = []

        def emit(event: RunEvent) -> None:
            if isinstance(event, StepTaken) and event.adapter == name:
                losses.append(event.loss)

        def before_step(adapter: str, closed: Closed) -> Closed:
            if adapter != name:
                return closed
            step = len(gradients)
            gradients.append(self._gradient())
            batches.append(closed)
            if follow is None:
                return closed
            self._replace_gradient(follow.gradients[step])
            return follow.closed[step]

        session.take_data(self._job.config, self._job.prepared, progress.adapters)
        first = self._weights()
        session.batch_ends.before_step = before_step
        hooks = Hooks(save=lambda wait: None, evaluate=lambda *_: None, finish=lambda *_: None)
        PlanRun(self._job, session, progress, emit, hooks).run()
        losses += [np.nan] * (len(gradients) - len(losses))  # of a step that was refused
        return Watched(losses=losses, gradients=gradients, closed=batches, first=first, last=self._weights())

    def close(self) -> None:
        self._session.close()

    @property
    def _index(self) -> int:
        return self._session.index[self._name]

    def _weights(self) -> Tensors:
        return self._session.read(self._name, optimizer=False)().weights

    def _gradient(self) -> Tensors:
        index = self._index
        return adapter_arrays([part.result() for part in self._session.executor.read(lambda s: s.gradient(index))])

    def _replace_gradient(self, gradient: Tensors) -> None:
        replace = partial(_replace, index=self._index, gradient=gradient)
        for part in self._session.executor.read(replace):
            part.result()


def _replace(stage: Stage, *, index: int, gradient: Tensors) -> None:
    stage.replace_gradient(index, gradient)
