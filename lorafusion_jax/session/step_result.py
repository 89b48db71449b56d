"""The result of an optimizer step over all stages, and why it was refused."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
from jax import Array

from lorafusion_jax.session.adapter_step import BatchSummary
from lorafusion_jax.session.distant_stage import AnyStage
from lorafusion_jax.session.leaves import LAYERS
from lorafusion_jax.session.move import to_local
from lorafusion_jax.session.stage import Stepped


class ClosedBatch(NamedTuple):
    """An adapter's global batch, closed on one stage."""

    stage: int
    summary: BatchSummary
    finite: Array  # per leaf


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
    names = [stage.leaf_names(adapter) for stage in stages]
    if bad := _first_bad(stages, names, [to_local(result.finite) for result in result.closed]):
        return f"gradient not finite ({bad})"
    if not np.isfinite(result.loss):
        return None
    if not np.isfinite(result.grad_norm):
        return "norm of the gradient not finite"
    bad = _first_bad(
        stages,
        [[*leaf_names, "optimizer state"] for leaf_names in names],
        [to_local(result.finite) for result in result.stepped],
    )
    return f"the step would write numbers that are not finite ({bad})" if bad else None


def _first_bad(stages: Sequence[AnyStage], names: Sequence[Sequence[str]], finite: Sequence[np.ndarray]) -> str | None:
    for index, (stage, known, flags) in enumerate(zip(stages, names, finite, strict=True)):
        bad = next((name for name, good in zip(known, flags, strict=True) if not good), None)
        if bad is None:
            continue
        bad_layers = stage.layer_numbers(bad) if bad.startswith(LAYERS) else None
        layers = "" if bad_layers is None else f" of layers {bad_layers[0]} to {bad_layers[-1]}"
        return bad + (f"{layers}, stage {index}" if len(stages) > 1 else "")
    return None
