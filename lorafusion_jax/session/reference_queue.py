"""Computes what the references of tasks say of their samples, a microbatch at a time, while other tasks train."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np
from jax import Array

from lorafusion_jax.data.assemble import Microbatch
from lorafusion_jax.data.references import STATES, SetReferences, sets_of
from lorafusion_jax.data.sample_table import State
from lorafusion_jax.data.tokenized_set import TokenizedSet
from lorafusion_jax.session.assembler import Assembler, Replicas, Shape
from lorafusion_jax.session.executor import Executor
from lorafusion_jax.session.references import run_set
from lorafusion_jax.session.stage import Stage
from lorafusion_jax.session.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """A task without references.

    Args:
        place: its place.
        passes: computes them, a microbatch at each step.
        finish: called when they are complete, or no longer wanted (None).
    """

    place: int
    passes: Generator[None, None, SetReferences]
    finish: Callable[[SetReferences | None], None]


class ReferenceQueue:
    """Tasks that wait for their references, in order of arrival."""

    def __init__(self, executor: Executor, assembler: Assembler):
        self._executor, self._assembler = executor, assembler
        self._waiting: deque[_Waiting] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, place: int) -> bool:
        return any(waiting.place == place for waiting in self._waiting)

    def add(
        self,
        task: Task,
        place: int,
        weights: int,
        shape: Shape,
        pack: Callable[[TokenizedSet], list[Replicas]],
        state: State | None,
        finish: Callable[[SetReferences | None], None],
    ) -> None:
        """Adds a task.

        Args:
            weights: place of the reference's weights; -1: the base alone.
            shape: of the microbatches.
            pack: packs a set of the task.
            state: of a teacher's tokens, if the objective compares distributions.
        """
        self._waiting.append(
            _Waiting(place=place, passes=self._passes(task, weights, shape, pack, state), finish=finish)
        )

    def step(self) -> bool:
        """Issues one microbatch. Returns whether a task is complete now."""
        if not self._waiting:
            return False
        first = self._waiting[0]
        try:
            next(first.passes)
        except StopIteration as done:
            self._waiting.popleft()
            first.finish(done.value)
            return True
        return False

    def drop(self, place: int) -> None:
        """Forgets the task of a place."""
        for waiting in [waiting for waiting in self._waiting if waiting.place == place]:
            self._waiting.remove(waiting)
            waiting.passes.close()
            waiting.finish(None)

    def _passes(
        self,
        task: Task,
        weights: int,
        shape: Shape,
        pack: Callable[[TokenizedSet], list[Replicas]],
        state: State | None,
    ) -> Generator[None, None, SetReferences]:
        run = Stage.token_logprobs if state is None else Stage.states

        def issue(rows: Microbatch) -> Callable[[], Array]:
            return self._executor.run_forward(run, self._executor.describe(rows), [task.name]).result

        made: dict[str, np.ndarray] = {}
        for key, samples in sets_of(task.data).items():
            made[key if state is None else f"{key}{STATES}"] = yield from run_set(
                samples,
                pack(samples),
                lambda replicas, samples=samples: self._assembler.without_objective(shape, replicas, samples, weights),
                issue,
                state,
                len(self._executor.stages),
            )
        return made
