"""The end of a global batch: each stage closes it, then all stages step its adapter.

All processes issue the same work in the same order, and so draw the same links: also for stages that others hold, and
for what only some of them run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jax import Array

from lorafusion_jax.optim.step import Hyper
from lorafusion_jax.session.adapter_step import BatchSummary
from lorafusion_jax.session.distant_stage import AnyStage, DistantStage
from lorafusion_jax.session.executor import Executor
from lorafusion_jax.session.leaves import EMBED_ROWS, HEAD_ROWS, LAYERS
from lorafusion_jax.session.links import Announcement
from lorafusion_jax.session.move import to_local, transfer
from lorafusion_jax.session.stage import Stage, Stepped
from scheduling.pipeline import Event


class ClosedBatch(NamedTuple):
    """An adapter's global batch, closed on one stage."""

    summary: BatchSummary
    bad: Array  # number of the first leaf that is not finite, see `JoinedLeaves.first_not_finite`


# (adapter, its closed global batch on every stage) -> the closed global batch to step with
type BeforeStep = Callable[[str, list[Future[ClosedBatch]]], list[Future[ClosedBatch]]]


class StepResult:
    """Result of an optimizer step that was issued. Reading it waits for the devices.

    Args:
        place: of the adapter.
        closed: its closed global batch on every stage.
        stepped: result of the step on every stage.
    """

    def __init__(self, place: int, closed: Sequence[Future[ClosedBatch]], stepped: Sequence[Future[Stepped]]):
        self._place, self._closed, self._stepped = place, tuple(closed), tuple(stepped)

    @property
    def closed(self) -> list[ClosedBatch]:
        """In order of stages."""
        return [future.result() for future in self._closed]

    @property
    def stepped(self) -> list[Stepped]:
        """In order of stages."""
        return [future.result() for future in self._stepped]

    @property
    def loss(self) -> float:
        return float(sum(float(to_local(batch.summary.loss)) for batch in self.closed))

    @property
    def metrics(self) -> dict[str, float]:
        """All metrics of all objectives of the run; those of other objectives are 0."""
        return {name: float(to_local(total)) for name, total in self.closed[-1].summary.metrics.items()}

    @property
    def grad_norm(self) -> float:
        return float(np.sqrt(sum(float(to_local(batch.summary.squares)) for batch in self.closed)))

    @property
    def healthy(self) -> bool:
        """Whether every stage took the step; if not, see `BatchEnds.put_back`."""
        return all(bool(to_local(result.alive)[self._place]) for result in self.stepped)


@dataclass(slots=True, kw_only=True)
class _EndingBatch:
    """An adapter's global batch whose last slot is known, until its step.

    Attributes:
        slot: the slot that completed it.
        stages: those that have closed it.
        closed: by stage of this process.
    """

    slot: int
    stages: set[int] = field(default_factory=set)
    closed: dict[int, Future[ClosedBatch]] = field(default_factory=dict)


class BatchEnds:
    """Closes global batches and steps their adapters.

    Args:
        executor: runs the work on the stages' threads.
        index: place of each adapter; it may change between slots.

    Attributes:
        before_step: called before every step that is issued.
    """

    def __init__(self, executor: Executor, index: Mapping[str, int]):
        self._executor, self._index = executor, index
        self._ending: dict[int, _EndingBatch] = {}  # by place
        self.before_step: BeforeStep = lambda adapter, closed: closed

    def close_batch(self, event: Event, adapter: str) -> bool:
        """Closes an adapter's global batch on the stage of an update event. Returns whether all stages closed it."""
        executor, place = self._executor, self._index[adapter]
        event = event._replace(adapters=(adapter,))  # batches of other adapters may end in this slot, too
        batch = self._ending.setdefault(place, _EndingBatch(slot=event.slot))
        batch.slot = event.slot
        batch.stages.add(event.stage)
        stage = executor.local_stages.get(event.stage)
        if stage is not None:

            def run() -> ClosedBatch:
                with executor.record_event(event) as record:
                    summary, bad = stage.close_batch(place)
                    # Not the gradient sums: the next backward pass may donate them before the spans have waited.
                    record(summary.squares)
                return ClosedBatch(summary, bad)

            batch.closed[event.stage] = executor.submit(event.stage, event.slot, [adapter], run)
        return len(batch.stages) == len(executor.stages)

    def step(self, adapter: str, numbers: Hyper) -> StepResult:
        """Steps an adapter on all stages. The gradient norm for clipping is over all stages."""
        executor, place = self._executor, self._index[adapter]
        batch = self._ending.pop(place)
        if place in executor.stages[0].with_twins:
            self._join_twins(place, adapter, batch)
        # In order of stages: a sum over them must not depend on which closed first.
        closed = [batch.closed[index] for index in sorted(batch.closed)]
        if executor.links.apart:
            closed = self._share(place, adapter, batch)
        closed_batches = self.before_step(adapter, closed)

        def run(index: int, announcement: Announcement | None) -> Stepped:
            stage = executor.stages[index]
            if isinstance(stage, DistantStage):
                assert announcement is not None
                return announcement.receive(stage.stepped_like(place))
            # Without the metrics, which only the last stage has: the program of a step is the same on all.
            summaries = [
                transfer(future.result().summary._replace(metrics={}), stage.mesh) for future in closed_batches
            ]
            with executor.record_event(Event("update", index, batch.slot, (adapter,)), stepping=True) as record:
                stepped = stage.step(place, summaries, numbers)
                # Not the weights: the next step may donate them before the spans have waited.
                record(stepped.alive)
            if announcement is not None:
                announcement.send((stepped.alive, stepped.bad))
            return stepped

        stepped = [
            executor.submit(index, batch.slot, [adapter], partial(run, index, announcement))
            for index, announcement in enumerate(self._announcements())
        ]
        return StepResult(place, closed, stepped)

    def put_back(self, adapter: str, result: StepResult) -> None:
        """Restores an adapter on every stage to its state before a step that some stage refused.

        Stages step without knowing the results of the others, so that no stage waits for another. Later steps of the
        adapter do not count either: after a refused step, every stage refuses all later ones.
        """
        stepped = result.stepped
        for index, stage in self._executor.local_stages.items():
            if (before := stepped[index].before) is not None:
                work = partial(stage.put_back, self._index[adapter], before)
                self._executor.submit(index, None, [adapter], work)

    def revive(self, adapter: str) -> None:
        """Lets an adapter step again after a step that was refused."""
        for index, stage in self._executor.local_stages.items():
            self._executor.submit(index, None, [adapter], partial(stage.revive, self._index[adapter]))

    def not_finite(self, adapter: str, result: StepResult) -> str | None:
        """Describes what was not finite in a refused step, with stage and layers. None if it was the loss."""
        stages, place = self._executor.stages, self._index[adapter]
        if bad := _first_bad(stages, place, [batch.bad for batch in result.closed]):
            return f"gradient not finite ({bad})"
        if not np.isfinite(result.loss):
            return None
        if not np.isfinite(result.grad_norm):
            return "norm of the gradient not finite"
        bad = _first_bad(stages, place, [stepped.bad for stepped in result.stepped])
        return f"the step would write numbers that are not finite ({bad})" if bad else None

    def _announcements(self) -> list[Announcement | None]:
        """Draws one for each stage, if there is another process to tell.

        Here and not on the stages' threads, which have no common order: all processes must draw them in the same one.
        """
        links, count = self._executor.links, len(self._executor.stages)
        return [links.announcement(index) if links.apart else None for index in range(count)]

    def _share(self, place: int, adapter: str, batch: _EndingBatch) -> list[Future[ClosedBatch]]:
        """Exchanges closed batches between processes. Returns that of every stage."""

        def share(index: int, announcement: Announcement) -> ClosedBatch:
            stage = self._executor.stages[index]
            if isinstance(stage, DistantStage):
                return ClosedBatch(*announcement.receive(stage.closed_like(place)))
            closed = batch.closed[index].result()
            announcement.send((closed.summary, closed.bad))
            return closed

        return [
            self._executor.submit(index, batch.slot, [adapter], partial(share, index, announcement))
            for index, announcement in enumerate(self._announcements())
            if announcement is not None
        ]

    def _join_twins(self, place: int, adapter: str, batch: _EndingBatch) -> None:
        """Exchanges the gradients of trained rows of a tied table between the first and the last stage.

        Afterwards the summary of the first stage counts these rows.
        """
        executor = self._executor
        last = len(executor.stages) - 1
        links: dict[str, Any] = {}
        if executor.links.apart:
            links = {EMBED_ROWS: executor.links.link(0, last), HEAD_ROWS: executor.links.link(last, 0)}
        ends = {name: end for name, end in ((EMBED_ROWS, 0), (HEAD_ROWS, last)) if end in executor.local_stages}

        def submit[T](index: int, work: Callable[[], T]) -> Future[T]:
            return executor.submit(index, batch.slot, [adapter], work)

        def give(name: str, index: int) -> Array:
            gradient, link = executor.local_stages[index].twin_gradient(place, name), links.get(name)
            return gradient if link is None else link.send(gradient)

        parts = {name: submit(end, partial(give, name, end)) for name, end in ends.items()}

        def take(name: str, stage: Stage) -> Array:
            link = links.get(name)
            if name in parts or link is None:
                return transfer(parts[name].result(), stage.mesh)
            twin = next(iter(parts.values())).result()  # of the same shape
            return link.receive(twin, stage.mesh.everywhere)

        def join(index: int, closed: Future[ClosedBatch]) -> ClosedBatch:
            stage, summary = executor.local_stages[index], closed.result().summary
            of_embed, of_head = take(EMBED_ROWS, stage), take(HEAD_ROWS, stage)
            return closed.result()._replace(summary=stage.join_twins(place, of_embed, of_head, summary))

        for index in sorted({*ends.values()}):
            batch.closed[index] = submit(index, partial(join, index, batch.closed[index]))


def _first_bad(stages: Sequence[AnyStage], adapter: int, numbers: Sequence[Array]) -> str | None:
    for index, (stage, number) in enumerate(zip(stages, numbers, strict=True)):
        names = [*stage.leaf_names(adapter), "optimizer state"]
        if to_local(number) == len(names):
            continue
        bad = names[int(to_local(number))]
        bad_layers = stage.layer_numbers(bad) if bad.startswith(LAYERS) else None
        layers = "" if bad_layers is None else f" of layers {bad_layers[0]} to {bad_layers[-1]}"
        return bad + (f"{layers}, stage {index}" if len(stages) > 1 else "")
    return None
