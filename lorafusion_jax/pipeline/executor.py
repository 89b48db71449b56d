"""Executes events on stages: one host thread issues, devices follow, activations and gradients move between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from lorafusion_jax.data.assemble import Microbatch
from lorafusion_jax.errors import RunError
from lorafusion_jax.pipeline.move import across, local, to_stage
from lorafusion_jax.pipeline.optim import Hyper
from lorafusion_jax.pipeline.programs import Verdict
from lorafusion_jax.pipeline.spans import Spans
from lorafusion_jax.pipeline.stage import Stage
from scheduling.pipeline import Event

AHEAD = 1  # slots queued beyond those in the pipeline: the device never waits for the host, memory stays bounded


class StepResult(NamedTuple):
    """An optimizer step that was issued; reading it waits for the devices."""

    verdicts: tuple[Verdict, ...]
    finite: tuple[Array, ...]  # per stage, per leaf

    @property
    def loss(self) -> float:
        return float(sum(float(local(verdict.loss)) for verdict in self.verdicts))

    @property
    def grad_norm(self) -> float:
        return float(np.sqrt(sum(float(local(verdict.squares)) for verdict in self.verdicts)))

    @property
    def healthy(self) -> bool:
        return bool(all(local(verdict.finite) == 1 for verdict in self.verdicts) and np.isfinite(self.loss))


class Executor:
    """Issues the events of a plan in an order in which one thread can.

    Args:
        stages: in order.
        names: of the adapters, in stacking order.
        spans: records when each event ran.
    """

    def __init__(self, stages: Sequence[Stage], names: Sequence[str], spans: Spans | None = None):
        self.stages, self._spans = tuple(stages), spans
        self._index = {name: number for number, name in enumerate(names)}
        self._batches: dict[int, list[Any]] = {}  # slot -> per stage
        self._arrived: dict[tuple[str, int, int], Array] = {}  # (kind, stage, slot) -> input
        self._running: deque[tuple[int, Array]] = deque()  # slots and a result of their last event
        self._through: list[int] = []  # finished slots that nobody has asked for yet
        self._finished: dict[int, list[tuple[int, Verdict, Array]]] = {}  # adapter -> (stage, …) of each

    @property
    def local_replicas(self) -> list[int]:
        """Replicas whose microbatches this process hands in."""
        return self.stages[0].mesh.local_replicas

    def warm_up(self, rows: Microbatch) -> None:
        """Compiles forward and backward of all stages side by side, by running an empty microbatch on each of them.

        A microbatch without samples adds zero to every sum, so nothing changes.

        Args:
            rows: padding only, [replicas of this process, ...].
        """
        with ThreadPoolExecutor(len(self.stages), "compile") as threads:
            for done in [threads.submit(stage.run_alone, to_stage(rows, stage.mesh)) for stage in self.stages]:
                done.result()

    def admit(self, slot: int, rows: Microbatch) -> None:
        """Hands a microbatch in; waits until there is room for it in the queue.

        Args:
            slot: of the plan.
            rows: [replicas of this process, ...].
        """
        while len(self._running) > AHEAD:
            self._wait_oldest()
        try:
            self._batches[slot] = [to_stage(rows, stage.mesh) for stage in self.stages]
        except jax.errors.JaxRuntimeError as problem:
            raise stage_failed(problem, 0, slot, ()) from problem

    def issue(self, event: Event, adapters: Sequence[str] = ()) -> None:
        """Dispatches a forward or backward pass.

        Args:
            event: of `scheduling.pipeline`.
            adapters: that are in its slot, for the message if it fails.

        Raises:
            RunError: `train.out-of-memory` or `train.stage-failed`, with stage, slot and adapters.
        """
        mark = None if self._spans is None else self._spans.issued(event)
        try:
            result = self._forward(event) if event.kind == "forward" else self._backward(event)
        except jax.errors.JaxRuntimeError as problem:
            raise stage_failed(problem, event.stage, event.slot, adapters) from problem
        if self._spans is not None:
            self._spans.follow(mark, result)

    def finish(self, event: Event, adapter: str) -> bool:
        """Closes an adapter's global batch on the stage of an update event; True once it is closed on all stages."""
        number = self._index[adapter]
        mark = None if self._spans is None else self._spans.issued(event)
        closed = self.stages[event.stage].finish(number)
        if self._spans is not None:
            self._spans.follow(mark, closed[0].squares)
        self._finished.setdefault(number, []).append((event.stage, *closed))
        return len(self._finished[number]) == len(self.stages)

    def step(self, adapter: str, numbers: Hyper) -> StepResult:
        """Steps an adapter on all stages; the norm that clips its gradient spans them."""
        number = self._index[adapter]
        _, verdicts, finite = zip(*sorted(self._finished.pop(number), key=lambda each: each[0]), strict=True)
        for stage in self.stages:
            stage.step(number, [across(verdict, stage.mesh) for verdict in verdicts], numbers)
        return StepResult(verdicts, finite)

    def finished_slots(self) -> list[int]:
        """Slots that were found to be through since the last call, in order."""
        slots, self._through = self._through, []
        return slots

    def wait_all(self) -> None:
        """Waits until everything issued is through."""
        while self._running:
            self._wait_oldest()

    def not_finite(self, adapter: str, result: StepResult) -> str | None:
        """Name of the first leaf of an adapter whose gradient was not finite, with its layers."""
        spec = self.stages[0].spec(self._index[adapter])
        for stage, finite in zip(self.stages, result.finite, strict=True):
            bad = [n for n, good in zip(stage.leaf_names(spec), local(finite), strict=True) if not good]
            if bad:
                return (
                    bad[0] if len(self.stages) == 1 else f"{bad[0]} of layers {stage.layers[0]} to {stage.layers[-1]}"
                )
        return None

    def evaluate(self, rows: Microbatch) -> Array:
        """Σ weight · token loss of each adapter in a held-out microbatch, [A] on the last stage; does not wait."""
        x: Array | None = None
        for stage in self.stages:
            x = None if x is None else across(x, stage.mesh)
            x = stage.evaluate(to_stage(rows, stage.mesh), x)
        assert x is not None
        return x

    def _wait_oldest(self) -> None:
        slot, result = self._running[0]
        try:
            result.block_until_ready()
        except jax.errors.JaxRuntimeError as problem:
            raise stage_failed(problem, None, slot, ()) from problem
        self._running.popleft()
        self._through.append(slot)

    def _forward(self, event: Event) -> Array:
        stage = self.stages[event.stage]
        batch = self._batches[event.slot][event.stage]
        x = self._arrived.pop(("forward", event.stage, event.slot), None)
        result = stage.forward(event.slot, batch, x)
        if event.stage + 1 < len(self.stages):
            self._arrived["forward", event.stage + 1, event.slot] = across(result, self.stages[event.stage + 1].mesh)
        else:
            del self._batches[event.slot]
        return result

    def _backward(self, event: Event) -> Array:
        dy = self._arrived.pop(("backward", event.stage, event.slot), None)
        dx = self.stages[event.stage].backward(event.slot, dy)
        if event.stage:
            self._arrived["backward", event.stage - 1, event.slot] = across(dx, self.stages[event.stage - 1].mesh)
        else:
            self._running.append((event.slot, dx))
        return dx


def stage_failed(problem: Exception, stage: int | None, slot: int, adapters: Sequence[str]) -> RunError:
    """One error for whatever a device reports."""
    text = str(problem)
    where = f"slot {slot}" if stage is None else f"stage {stage}, slot {slot}"
    who = f" ({', '.join(adapters)})" if adapters else ""
    if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return RunError(
            "train.out-of-memory",
            f"the device has no memory left at {where}{who}.",
            why=text.splitlines()[0][:300],
            fix="lower batch.capacity_tokens, set train.keep: nothing, or use more mesh.stages; then lorafusion resume",
        )
    return RunError(
        "train.stage-failed",
        f"the device failed at {where}{who}.",
        why=text.splitlines()[0][:300] if text else type(problem).__name__,
        fix="lorafusion resume goes on from the last checkpoint",
    )
