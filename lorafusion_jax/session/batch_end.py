"""The end of a global batch on several stages: tied rows, and the stages of other processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from jax import Array

from lorafusion_jax.session.adapter_step import BatchSummary
from lorafusion_jax.session.distant_stage import AnyStage, DistantStage
from lorafusion_jax.session.leaves import EMBED_ROWS, HEAD_ROWS, LAYERS
from lorafusion_jax.session.links import Announcement, Links
from lorafusion_jax.session.move import to_local, transfer
from lorafusion_jax.session.stage import Stage, Stepped

# The result of an optimizer step over all stages, and why it was refused.


class ClosedBatch(NamedTuple):
    """An adapter's global batch, closed on one stage."""

    stage: int
    summary: BatchSummary
    bad: Array  # number of the first leaf that is not finite, see `JoinedLeaves.first_not_finite`


class StepResult:
    """Result of an optimizer step that was issued. Reading it waits for the devices.

    Args:
        adapter: the adapter's place.
        closed: its closed global batch on every stage.
        stepped: result of the step on every stage, in order of stages.
    """

    def __init__(self, adapter: int, closed: Sequence[Future[ClosedBatch]], stepped: Sequence[Future[Stepped]]):
        self._adapter, self._closed, self._stepped = adapter, tuple(closed), tuple(stepped)

    @property
    def closed(self) -> list[ClosedBatch]:
        """In order of stages."""
        return in_order(self._closed)

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
        """Whether every stage took the step; if not, see `Executor.put_back`."""
        return all(bool(to_local(result.alive)[self._adapter]) for result in self.stepped)


def in_order(closed: Sequence[Future[ClosedBatch]]) -> list[ClosedBatch]:
    """Sorts by stage: a sum over stages must not depend on which closed first."""
    return sorted((future.result() for future in closed), key=lambda batch: batch.stage)


def not_finite(stages: Sequence[AnyStage], adapter: int, result: StepResult) -> str | None:
    """Describes what was not finite in a refused step, with stage and layers. None if it was the loss."""
    if bad := _first_bad(stages, adapter, [batch.bad for batch in result.closed]):
        return f"gradient not finite ({bad})"
    if not np.isfinite(result.loss):
        return None
    if not np.isfinite(result.grad_norm):
        return "norm of the gradient not finite"
    bad = _first_bad(stages, adapter, [stepped.bad for stepped in result.stepped])
    return f"the step would write numbers that are not finite ({bad})" if bad else None


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


class Submit(Protocol):
    """Runs work on the thread of a stage, after all work issued before."""

    def __call__[T](self, stage: int, work: Callable[[], T], /) -> Future[T]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEnd:
    """Completes what the stages of this process have closed, before the step. All processes issue the same work.

    Args:
        number: the adapter's position.
        closed: by stage of this process.
        stages: all of them, in order.
        local_stages: those of this process, by number.
        links: the ways between stages.
        submit: runs work for this batch.
    """

    number: int
    closed: Mapping[int, Future[ClosedBatch]]
    stages: tuple[AnyStage, ...]
    local_stages: Mapping[int, Stage]
    links: Links
    submit: Submit

    def of_all_stages(self) -> list[Future[ClosedBatch]]:
        """Returns the closed batch of every stage."""
        local = self._with_twins()
        if not self.links.apart:
            return list(local.values())

        def share(index: int, announcement: Announcement) -> ClosedBatch:
            stage = self.stages[index]
            if isinstance(stage, DistantStage):
                return ClosedBatch(index, *announcement.receive(stage.closed_like(self.number)))
            closed = local[index].result()
            announcement.send((closed.summary, closed.bad))
            return closed

        return [
            self.submit(index, partial(share, index, self.links.announcement(index)))
            for index in range(len(self.stages))
        ]

    def _with_twins(self) -> Mapping[int, Future[ClosedBatch]]:
        """Exchanges the gradients of trained rows of a tied table between the first and the last stage.

        Returns:
            The closed batch, with the rows in the summary of the first stage.
        """
        if self.number not in self.stages[0].with_twins:
            return self.closed
        last = len(self.stages) - 1
        links: dict[str, Any] = {}
        if self.links.apart:
            links = {EMBED_ROWS: self.links.link(0, last), HEAD_ROWS: self.links.link(last, 0)}
        ends = {name: end for name, end in ((EMBED_ROWS, 0), (HEAD_ROWS, last)) if end in self.local_stages}

        def give(name: str, index: int) -> Array:
            gradient, link = self.local_stages[index].twin_gradient(self.number, name), links.get(name)
            return gradient if link is None else link.send(gradient)

        parts = {name: self.submit(end, partial(give, name, end)) for name, end in ends.items()}

        def take(name: str, stage: Stage) -> Array:
            link = links.get(name)
            if name in parts or link is None:
                return transfer(parts[name].result(), stage.mesh)
            twin = next(iter(parts.values())).result()  # of the same shape
            return link.receive(twin, stage.mesh.everywhere)

        def join(index: int) -> ClosedBatch:
            stage, closed = self.local_stages[index], self.closed[index].result()
            of_embed, of_head = take(EMBED_ROWS, stage), take(HEAD_ROWS, stage)
            return closed._replace(summary=stage.join_twins(self.number, of_embed, of_head, closed.summary))

        join_futures = {index: self.submit(index, partial(join, index)) for index in sorted({*ends.values()})}
        return {**self.closed, **join_futures}
