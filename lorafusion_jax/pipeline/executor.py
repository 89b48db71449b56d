"""Executes events on stages: one host thread issues, devices follow, activations and gradients move between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from lorafusion_jax.data.assemble import Microbatch
from lorafusion_jax.pipeline.failures import stage_failed
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
        self._adapters: dict[int, Sequence[str]] = {}  # of the slots under way
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
            all_done = [threads.submit(stage.run_alone, to_stage(rows, stage.mesh)) for stage in self.stages]
            for stage, done in enumerate(all_done):
                with self.blaming(stage, None):
                    done.result()

    def admit(self, slot: int, rows: Microbatch) -> None:
        """Hands a microbatch in; waits until there is room for it in the queue.

        Args:
            slot: of the plan.
            rows: [replicas of this process, ...].
        """
        while len(self._running) > AHEAD:
            self._wait_oldest()
        with self.blaming(0, slot):
            self._batches[slot] = [to_stage(rows, stage.mesh) for stage in self.stages]

    def issue(self, event: Event, adapters: Sequence[str] = ()) -> None:
        """Dispatches a forward or backward pass.

        Args:
            event: of `scheduling.pipeline`.
            adapters: that are in its slot, for the message if it fails.

        Raises:
            RunError: `train.out-of-memory` or `train.stage-failed`, with stage, slot and adapters.
        """
        issued = None if self._spans is None else self._spans.issued(event)
        self._adapters[event.slot] = adapters
        with self.blaming(event.stage, event.slot, adapters):
            result = self._forward(event) if event.kind == "forward" else self._backward(event)
        if self._spans is not None and issued is not None:
            self._spans.follow(issued, result)

    def finish(self, event: Event, adapter: str) -> bool:
        """Closes an adapter's global batch on the stage of an update event; True once it is closed on all stages."""
        number = self._index[adapter]
        issued = None if self._spans is None else self._spans.issued(event)
        with self.blaming(event.stage, event.slot, [adapter]):
            closed = self.stages[event.stage].finish(number)
        if self._spans is not None and issued is not None:
            self._spans.follow(issued, closed[0].squares)
        self._finished.setdefault(number, []).append((event.stage, *closed))
        return len(self._finished[number]) == len(self.stages)

    def step(self, adapter: str, numbers: Hyper) -> StepResult:
        """Steps an adapter on all stages; the norm that clips its gradient spans them."""
        number = self._index[adapter]
        _, verdicts, finite = zip(*sorted(self._finished.pop(number), key=lambda each: each[0]), strict=True)
        for place, stage in enumerate(self.stages):
            with self.blaming(place, None, [adapter]):
                stage.step(number, [across(verdict, stage.mesh) for verdict in verdicts], numbers)
        return StepResult(verdicts, finite)

    @contextmanager
    def blaming(self, stage: int | None, slot: int | None, adapters: Sequence[str] = ()) -> Iterator[None]:
        """Turns what jax raises inside into one error.

        A failed program is met wherever its result is used next: the spans know the event that failed first. Without
        any, it is blamed on the stage, slot and adapters given here.

        Raises:
            RunError: `train.out-of-memory` or `train.stage-failed`.
        """
        try:
            yield
        except jax.errors.JaxRuntimeError as problem:
            first = None if self._spans is None else self._spans.first_failure()
            if first is not None:
                stage, slot, adapters = first.stage, first.slot, self._adapters.get(first.slot, adapters)
            raise stage_failed(problem, stage, slot, adapters) from problem

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
        with self.blaming(None, slot, self._adapters.get(slot, ())):
            result.block_until_ready()
        self._running.popleft()
        self._adapters.pop(slot, None)
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
