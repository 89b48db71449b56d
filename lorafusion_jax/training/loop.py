"""Executes a plan slot by slot: sum gradients, step the adapters whose global batch is complete, look one slot back.

The device always has the next microbatch queued: results of a slot are read only after the following one has been
dispatched. An adapter whose gradient is not finite keeps its last good weights and stops; nobody else notices.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.assemble import (
    Microbatch,
    assemble,
    batch_loss_tokens,
    num_segments,
    pieces_of_slot,
)
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.report.events import Event, Listener
from lorafusion_jax.training.meter import Meter
from lorafusion_jax.training.optim import hyper, learning_rates
from lorafusion_jax.training.prefetch import prefetch
from lorafusion_jax.training.programs import Programs, StepReport
from lorafusion_jax.training.state import RunState
from scheduling import Plan

LOG_EVERY_S = 2.0


class Interrupted(Exception):
    """The run was asked to stop and has saved its state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What the loop does besides training.

    Attributes:
        save: writes a checkpoint of the state.
        evaluate: (adapter, step) → held-out loss is measured and reported.
        finish: an adapter took its last step.
    """

    save: Callable[[], None]
    evaluate: Callable[[str, int], None]
    finish: Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """An optimizer step that was dispatched and not looked at yet."""

    adapter: str
    step: int
    lr: float
    loss_tokens: int
    report: StepReport


class Loop:
    """One run over a plan, from `state.slot` to the end; changes `state` in place."""

    def __init__(
        self,
        config: JobConfig,
        prepared: Prepared,
        plan: Plan,
        programs: Programs,
        frozen: Any,
        state: RunState,
        emit: Listener,
        hooks: Hooks,
    ):
        self._config, self._plan, self._programs, self._frozen = config, plan, programs, frozen
        self._prepared, self._state, self._emit, self._hooks = prepared, state, emit, hooks
        self._index = {adapter.name: index for index, adapter in enumerate(config.adapters)}
        self._loss_tokens = {
            (a.name, batch): int(count)
            for a in config.adapters
            for batch, count in enumerate(batch_loss_tokens(prepared.adapters[a.name], a.global_samples))
        }
        self._rates = {a.name: learning_rates(a.optim, state.adapters[a.name].num_steps) for a in config.adapters}
        self._completes = batches_completed(plan)
        self._segments = num_segments(max(len(slot.samples) for slot in plan.slots))
        last = {
            name: max(slot for slot, names in enumerate(self._completes) for n, _ in names if n == name)
            for name in self._index
        }
        self._meter = Meter(slot_tokens(plan, prepared), plan.capacity_tokens, last, state.slot)
        self._steps_since_save, self._saved_at, self._logged_at = 0, time.monotonic(), 0.0
        self._stop = threading.Event()

    def run(self) -> None:
        """Trains to the end of the plan.

        Raises:
            Interrupted: SIGINT or SIGTERM came; the state is saved.
        """
        taken: list[Taken] = []
        losses = None
        self._meter.pause()
        with self._interruptible():
            for batch in prefetch(self._batch, range(self._state.slot, len(self._plan.slots))):
                slot, called = self._state.slot, time.perf_counter()
                if losses is None:
                    self._emit(Event(kind="phase", slot=slot, values={"text": "compiling the training step"}))
                self._state.sums, running = self._programs.accumulate(
                    self._state.lora, self._state.sums, self._frozen, batch
                )
                if losses is not None:
                    np.asarray(losses)  # waits for the slot before, while this one computes
                    self._meter.slot_done(slot - 1)
                else:  # the first call compiles before it returns
                    self._emit(
                        Event(
                            kind="compiled",
                            slot=slot,
                            values={"program": "training step", "seconds": round(time.perf_counter() - called, 3)},
                        )
                    )
                    self._meter.pause()
                self._look_at(taken)
                taken = [
                    self._step(name, number)
                    for name, number in self._completes[slot]
                    if self._state.adapters[name].status == "running"
                ]
                losses = running
                self._state.slot = slot + 1
                self._log(slot)
                taken = self._save_if_due(taken)
                if self._stop.is_set():
                    break
            if losses is not None:
                np.asarray(losses)
                self._meter.slot_done(self._state.slot - 1)
            self._look_at(taken)
        self._state.seconds += self._meter.seconds
        self._emit(Event(kind="slot", slot=self._state.slot, values=self._meter.snapshot(self._state.slot)))
        self._hooks.save()
        if self._stop.is_set() and self._state.slot < len(self._plan.slots):
            raise Interrupted

    def _batch(self, slot: int) -> Microbatch:
        pieces = pieces_of_slot(self._plan.slots[slot].samples, self._prepared.adapters, self._index, self._loss_tokens)
        return assemble(
            pieces,
            capacity_tokens=self._plan.capacity_tokens,
            tile_tokens=self._plan.tile_tokens,
            max_segments=self._segments,
        )

    def _step(self, name: str, number: int) -> Taken:
        adapter, state = self._state.adapters[name], self._state
        assert number == adapter.step, f"{name}: the plan completes batch {number} after {adapter.step} steps"
        lr = float(self._rates[name][number])
        numbers = hyper(self._config.adapters[self._index[name]].optim, lr)
        state.lora, state.sums, state.optimizers[name], report = self._programs.update(
            self._index[name], state.lora, state.sums, state.optimizers[name], numbers
        )
        adapter.step += 1
        self._steps_since_save += 1
        return Taken(adapter=name, step=adapter.step, lr=lr, loss_tokens=self._loss_tokens[name, number], report=report)

    def _look_at(self, taken: list[Taken]) -> None:
        for step in taken:
            adapter = self._state.adapters[step.adapter]
            loss, norm, finite = float(step.report.loss), float(step.report.grad_norm), np.asarray(step.report.finite)
            if not (finite.all() and np.isfinite(loss)):
                adapter.step, adapter.status = step.step - 1, "failed"
                adapter.reason = f"{self._culprit(step.adapter, finite)} at step {step.step}"
                self._emit(
                    Event(
                        kind="adapter-failed",
                        slot=self._state.slot,
                        adapter=step.adapter,
                        step=step.step,
                        values={"reason": adapter.reason, "kept_step": adapter.step},
                    )
                )
                self._hooks.finish(step.adapter)
                continue
            self._emit(
                Event(
                    kind="step",
                    slot=self._state.slot,
                    adapter=step.adapter,
                    step=step.step,
                    values={"loss": loss, "grad_norm": norm, "lr": step.lr, "loss_tokens": step.loss_tokens},
                )
            )
            self._after(adapter, step.step)

    def _after(self, adapter, step: int) -> None:
        every = self._config.train.eval_every_steps
        last = step == adapter.num_steps
        if last or (every and step % every == 0):
            self._hooks.evaluate(adapter.name, step)
        if last:
            adapter.status = "done"
            self._hooks.finish(adapter.name)
            self._emit(Event(kind="adapter-done", slot=self._state.slot, adapter=adapter.name, step=step))
        self._meter.pause()

    def _culprit(self, name: str, finite: np.ndarray) -> str:
        own = self._programs.leaf_names(self._index[name], self._state.lora)
        bad = [leaf for leaf, good in zip(own, finite, strict=True) if not good]
        return f"gradient not finite ({bad[0]})" if bad else "loss not finite"

    def _save_if_due(self, taken: list[Taken]) -> list[Taken]:
        save = self._config.save
        due = save.every_steps is not None and self._steps_since_save >= save.every_steps
        due |= save.every_minutes is not None and time.monotonic() - self._saved_at > 60 * save.every_minutes
        if not due:
            return taken
        self._look_at(taken)
        self._hooks.save()
        self._steps_since_save, self._saved_at = 0, time.monotonic()
        self._meter.pause()
        return []

    def _log(self, slot: int) -> None:
        every = self._config.train.log_every_s
        if time.monotonic() - self._logged_at >= (LOG_EVERY_S if every is None else every):
            self._logged_at = time.monotonic()
            self._emit(Event(kind="slot", slot=slot, values=self._meter.snapshot(slot)))

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """First signal: finish the microbatch, save, stop. Second: the usual KeyboardInterrupt."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask(number, frame):
            if self._stop.is_set():
                raise KeyboardInterrupt
            self._stop.set()

        before = {kind: signal.signal(kind, ask) for kind in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)


def batches_completed(plan: Plan) -> list[list[tuple[str, int]]]:
    """Lists, per slot, the (adapter, batch) pairs whose last sample is in that slot."""
    left = Counter((ref.adapter, ref.batch) for slot in plan.slots for ref in slot.samples)
    result = []
    for slot in plan.slots:
        left.subtract((ref.adapter, ref.batch) for ref in slot.samples)
        here = dict.fromkeys((ref.adapter, ref.batch) for ref in slot.samples)
        result.append([pair for pair in here if left[pair] == 0])
    return result


def slot_tokens(plan: Plan, prepared: Prepared) -> list[dict[str, int]]:
    """Real tokens of every adapter in every slot."""
    lengths: Mapping[str, np.ndarray] = {name: data.stream_tokens() for name, data in prepared.adapters.items()}
    result: list[dict[str, int]] = []
    for slot in plan.slots:
        tokens: dict[str, int] = {}
        for ref in slot.samples:
            tokens[ref.adapter] = tokens.get(ref.adapter, 0) + int(lengths[ref.adapter][ref.sample])
        result.append(tokens)
    return result
