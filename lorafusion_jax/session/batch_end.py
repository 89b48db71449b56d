"""The end of a global batch on several stages: tied rows, and the stages of other processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from jax import Array

from lorafusion_jax.session.distant_stage import AnyStage, DistantStage
from lorafusion_jax.session.leaves import EMBED_ROWS, HEAD_ROWS
from lorafusion_jax.session.links import Announcement, Links
from lorafusion_jax.session.move import transfer
from lorafusion_jax.session.stage import Stage
from lorafusion_jax.session.step_result import ClosedBatch


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
            announcement.send((closed.summary, closed.finite))
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

        joined = {index: self.submit(index, partial(join, index)) for index in sorted({*ends.values()})}
        return {**self.closed, **joined}
