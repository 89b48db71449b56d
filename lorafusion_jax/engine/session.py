"""A live session: a base model on its devices, and places in which adapters start, train and stop.

`open` compiles. `start` and `stop` write and read arrays. `plan` plans the next slots and `run` runs them; a session
without adapters waits. One process; the mesh may have several stages and replicas.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.table import adapter_kind
from lorafusion_jax.checkpoint.warm_start import read_warm_starts, start_from
from lorafusion_jax.config.schema import BaseSettings, BatchSettings, JobConfig, MeshSettings, TrainSettings
from lorafusion_jax.config.specs import adapter_specs
from lorafusion_jax.data.assemble import Microbatch, num_segments
from lorafusion_jax.engine.microbatches import Assembler, Shape
from lorafusion_jax.engine.places import Places, PlaceTable, place_name, session_config
from lorafusion_jax.engine.state import AdapterState
from lorafusion_jax.engine.task import Task
from lorafusion_jax.errors import CheckpointError, RunError
from lorafusion_jax.optim.step import hyper
from lorafusion_jax.pipeline.base import check_tables, open_base
from lorafusion_jax.pipeline.base_cache import BaseFiles
from lorafusion_jax.pipeline.batches import mask_adapters
from lorafusion_jax.pipeline.evaluation import Evaluation
from lorafusion_jax.pipeline.executor import Executor, StepResult
from lorafusion_jax.pipeline.move import to_local
from lorafusion_jax.pipeline.reading import Reading
from lorafusion_jax.pipeline.stage import Stage
from lorafusion_jax.pipeline.state import adapter_arrays, joined_states, state_of_stage
from lorafusion_jax.report.events import AdapterFailed, Listener, StepTaken
from lorafusion_jax.training.prefetch import prefetch
from scheduling import issue_order
from scheduling.pipeline import Event, one_forward_one_backward
from scheduling.types import Limits
from scheduling.window import Tail, Window, advance, plan_window

TOKENS_OF_A_SAMPLE = 256  # places for samples of a microbatch: one for as many tokens
MOST_ADAPTERS = 8  # in one microbatch: its cost grows with this number


@dataclass(frozen=True, slots=True, kw_only=True)
class _Issued:
    """An optimizer step whose result was not read yet."""

    place: int
    task: Task
    step: int
    slot: int
    result: StepResult


class LiveSession:
    """Adapters in the places of a warm base model. Methods are called from one thread.

    Attributes:
        places: the places.
        tasks: place → its adapter.
        slot: number of slots run so far.
    """

    def __init__(
        self,
        config: JobConfig,
        places: Places,
        reading: Reading,
        stages: list[Stage],
        *,
        most_samples: int,
        reproducible: bool = False,
    ):
        self.config, self.places, self.slot = config, places, 0
        self.tasks: dict[int, Task] = {}
        self._reading, self._stages = reading, stages
        self._executor = Executor(stages, [place_name(place) for place in range(len(places.ranks))])
        self._table = PlaceTable(stages[0].parts.columns, len(places.ranks))
        self._index: dict[str, int] = {}
        self._tail = Tail(
            limits=Limits(
                capacity_tokens=config.batch.largest,
                num_stages=config.mesh.stages,
                data_parallel=config.mesh.replicas,
                tile_tokens=config.batch.tile_tokens,
            ),
            most_samples=most_samples,
            most_adapters=min(len(places.ranks), MOST_ADAPTERS),
            whole=reproducible,
        )
        self._assembler = Assembler(config, self._shape(), self._table, self._index)
        self._issued: deque[_Issued] = deque()
        self._compiled: set[tuple] = set()
        self._emit: Listener = lambda event: None

    @classmethod
    def open(
        cls,
        base: BaseSettings,
        mesh: MeshSettings,
        places: Places,
        *,
        batch: BatchSettings | None = None,
        train: TrainSettings | None = None,
        directory: str = ".",
        most_samples: int | None = None,
        reproducible: bool = False,
        base_files: BaseFiles | None = None,
        on_progress: Callable[[str], None] = lambda text: None,
    ) -> LiveSession:
        """Loads a base model and compiles all programs of a session.

        Args:
            places: for adapters of supervised fine-tuning.
            batch: capacity (one) and tile; `global_samples` is the adapters' own.
            directory: folder of a relative `base.model`.
            most_samples: places for samples in a microbatch (None: one for 256 tokens). More cost time in attention.
            reproducible: split batches in one way, so that an adapter does not depend on its company by a single bit.
                Microbatches are less full. Otherwise results are equal to rounding.
            base_files: see `open_base`.

        Raises:
            LoraFusionError: the base, the mesh or the memory do not fit; see `open_base`.
        """
        if jax.process_count() > 1:
            raise RunError("session.processes", "a live session runs in one process.", fix="one process per session")
        batch, train = batch or BatchSettings(), train or TrainSettings()
        if len(batch.sizes) > 1:
            raise RunError("session.capacities", f"a live session has one capacity, not {list(batch.sizes)}.")
        check_tables()
        config = session_config(base, mesh, places, batch=batch, train=train, directory=directory)
        opened = open_base(config, None, adapter_specs(config), base_files=base_files)
        most = most_samples or max(1, batch.largest // TOKENS_OF_A_SAMPLE)
        session = cls(config, places, Reading(opened), opened.stages, most_samples=most, reproducible=reproducible)
        try:
            session._compile(on_progress)
        except BaseException:
            session.close()
            raise
        return session

    @property
    def free(self) -> dict[int, int]:
        """Free places by rank."""
        free = [rank for place, rank in enumerate(self.places.ranks) if place not in self.tasks]
        return {rank: free.count(rank) for rank in self.places.classes}

    @property
    def device(self) -> str:
        """Kind of the devices."""
        return jax.devices()[0].device_kind

    def find_place(self, spec: AdapterSpec) -> int | None:
        """Returns a free place for an adapter; None if there is none now."""
        return self.places.find(spec, self.tasks.keys())

    def start(self, place: int, task: Task, state: AdapterState | None = None) -> None:
        """Starts an adapter in a free place. Others train on; nothing compiles for known shapes of adapters.

        The first adapter of other rank, targets or optimizer compiles its own step: a second or two.

        Args:
            state: continue from there (None: from initial weights, or `lora.init_from`).

        Raises:
            RunError: `session.place`, it is taken or too small.
            CheckpointError: `state.data`, the state was trained on other data; `peft.other-base`.
        """
        self._check_start(place, task)
        if state is None:
            first = {task.name: self._stages[0].parts.first_weights(task.spec)}
            weights = start_from(first, read_warm_starts(task.config), [task.spec])[task.name]
        else:
            _check_state(task, state)
            weights = state.weights
        task.restart(0 if state is None else state.step)
        self._table.assign(place, task.spec)
        self.tasks[place], self._index[task.name] = task, place
        optimizer = None if state is None else state.optimizer
        fresh = state is None and task.adapter.lora.init_from is None
        for done in self._executor.read(lambda stage: self._write(stage, place, task, weights, optimizer, fresh)):
            with self._executor.blaming(None, None, [task.name]):
                done.result()

    def stop(self, place: int) -> AdapterState:
        """Frees a place. Returns the state after the adapter's last step; a begun batch is dropped.

        Waits for the slots that were issued.
        """
        state = self.read(place)
        self.forget(place)
        return state

    def read(self, place: int) -> AdapterState:
        """Returns the state after an adapter's last step. Waits for the slots that were issued."""
        self.drain()
        task = self.tasks[place]
        parts = _results(self._executor.read(lambda stage: (stage.adapter(place), stage.optimizers[task.name])))
        weights = adapter_arrays([own for own, _ in parts])
        # Copies: a host array may be a view of a device array, which the next step overwrites.
        optimizer = jax.tree.map(np.array, joined_states([state for _, state in parts]))
        return AdapterState(step=task.step, data=task.data.digest, weights=weights, optimizer=optimizer)

    def forget(self, place: int) -> None:
        """Frees a place without reading its state."""
        self.drain()
        task = self.tasks.pop(place)
        del self._index[task.name]
        _results(self._executor.read(lambda stage: stage.optimizers.pop(task.name, None)))

    def plan(self, horizon: int) -> Window:
        """Plans the next slots of all adapters that run; empty if there are none."""
        running = [task.cursor for task in self.tasks.values() if task.status == "running"]
        return plan_window(running, self._tail, horizon)

    def run(
        self,
        window: Window,
        listener: Listener = lambda event: None,
        pause: Callable[[], bool] = lambda: False,
    ) -> int:
        """Runs a window from `plan`. The devices may still work when it returns; see `drain`.

        Args:
            listener: called with `StepTaken` and `AdapterFailed`.
            pause: asked before each slot; True ends the window there.

        Returns:
            Number of slots run.
        """
        self._emit = listener
        before = {task.name: task.cursor for task in self.tasks.values()}
        todo = issue_order(one_forward_one_backward(window), window.num_stages)
        entering = [event.slot for event in todo if event.kind == "forward" and event.stage == 0]
        by_name = {task.name: task for task in self.tasks.values()}
        batches = prefetch(lambda slot: self._assembler.slot(window.slots[slot].replicas, by_name), entering)
        end = len(window.slots)
        failed: dict[int, frozenset[int]] = {}
        try:
            with self._executor.blaming(None, None):
                for event in todo:
                    if event.slot >= end:
                        continue
                    if event.kind == "forward" and event.stage == 0:
                        if event.slot and pause():
                            end = event.slot
                            continue
                        failed[event.slot] = self._failed()
                    self._run_event(event, window, batches, failed[event.slot])
        finally:
            batches.close()
        if end < len(window.slots):
            window = advance([before[cursor.job.name] for cursor in window.cursors], self._tail, window.slots[:end])
        self._tail, self.slot = window.tail, self.slot + end
        for cursor in window.cursors:
            by_name[cursor.job.name].cursor = cursor
        return end

    def drain(self) -> None:
        """Waits for all slots that were issued, and reads the results of their steps."""
        self._executor.wait_all()
        self._executor.completed_slots()
        self._read_steps(self.slot)

    def evaluate(self, place: int) -> Evaluation | None:
        """Evaluates an adapter on its held-out data; None if it has none. Waits for the slots that were issued."""
        self.drain()
        task = self.tasks[place]
        if task.data.eval is None:
            return None
        loss, tokens = 0.0, int(task.data.eval.loss_mask.sum())
        with self._executor.blaming(None, None, [task.name]):
            for rows in self._assembler.held_out(task):
                totals = self._executor.evaluate(rows, [task.name]).result()
                loss += float(to_local(totals["loss"])[place])
        return Evaluation(loss=loss / max(tokens, 1), tokens=tokens, metrics={})

    def close(self) -> None:
        """Ends the threads of the session."""
        self._reading.cancel()
        self._executor.close()

    def _shape(self) -> Shape:
        batch = self.config.batch
        return Shape(
            capacity_tokens=batch.largest,
            tile_tokens=batch.tile_tokens,
            segments=num_segments(self._tail.most_samples),
            adapters=self._tail.most_adapters,
            replicas=self.config.mesh.replicas,
        )

    def _compile(self, on_progress: Callable[[str], None]) -> None:
        """Compiles what all adapters share, and the steps of the largest adapters of each class."""
        shapes = self._stages[0].parts.own_shapes()
        zeros = {
            name: {leaf: np.zeros(shape, np.float32) for leaf, shape in own.items()} for name, own in shapes.items()
        }
        for stage in self._stages:
            stage.start(zeros)
        rows = self._assembler.empty()
        self._executor.warm_up([rows], rows, lambda left: on_progress(f"compiling {', '.join(left)}"))
        self._reading.finish()
        for rank in self.places.classes:
            place = self.places.ranks.index(rank)
            name = place_name(place)
            for stage in self._stages:
                stage.write(place, zeros[name])
                stage.adapter(place)
            self._compiled.add(_kind(adapter_specs(self.config)[place], self.config))
        for stage in self._stages:
            stage.optimizers.clear()

    def _check_start(self, place: int, task: Task) -> None:
        if place not in range(len(self.places.ranks)) or place in self.tasks or task.name in self._index:
            raise RunError("session.place", f"{task.name} cannot start in place {place}: it is taken.")
        why = self.places.refuses(task.spec)
        if why or task.spec.rank > self.places.ranks[place]:
            raise RunError(
                "session.place",
                f"{task.name} does not fit into place {place}.",
                why=why or f"rank {task.spec.rank} is above {self.places.ranks[place]}",
            )
        if task.adapter.objective.chosen.of_samples:
            raise RunError("session.objective", f"{task.name}: a live session trains objectives of tokens only (sft).")

    def _write(
        self, stage: Stage, place: int, task: Task, weights: Mapping[str, np.ndarray], optimizer: Any, fresh: bool
    ) -> None:
        stage.assign(place, task.adapter, task.spec)
        stage.write(place, weights, None if optimizer is None else state_of_stage(stage, optimizer))
        if fresh and adapter_kind(task.spec.kind).start is not None:
            stage.start_from_base(place)
        kind = _kind(task.spec, task.config)
        if kind not in self._compiled:
            stage.compile_steps(len(self._stages), place)
            stage.adapter(place)
            if stage is self._stages[-1]:
                self._compiled.add(kind)

    def _run_event(self, event: Event, window: Window, batches: Iterator[Microbatch], failed: frozenset[int]) -> None:
        names = dict.fromkeys(ref.adapter for ref in window.slots[event.slot].samples)
        event = event._replace(slot=self.slot + event.slot)
        if event.kind == "update":
            for name in event.adapters:
                if (place := self._index[name]) not in failed and self._executor.close_batch(event, place_name(place)):
                    self._step(place, event.slot)
            return
        batch = next(batches) if event.kind == "forward" and event.stage == 0 else None
        if failed.issuperset(self._index[name] for name in names):
            return
        if batch is not None:
            self._executor.admit(event.slot, mask_adapters(batch, failed))
            for slot in self._executor.completed_slots():
                self._read_steps(slot + 1)
        self._executor.issue(event, tuple(names))

    def _step(self, place: int, slot: int) -> None:
        """Issues the step of an adapter whose global batch is complete."""
        task = self.tasks[place]
        waiting = sum(issued.place == place for issued in self._issued)
        number = task.step + waiting
        result = self._executor.step(place_name(place), hyper(task.adapter.optim, float(task.rates[number])))
        self._issued.append(_Issued(place=place, task=task, step=number + 1, slot=slot, result=result))

    def _read_steps(self, slots_done: int) -> None:
        while self._issued and self._issued[0].slot < slots_done:
            self._read_step(self._issued.popleft())

    def _read_step(self, issued: _Issued) -> None:
        task, result = issued.task, issued.result
        if task.status == "failed":  # the devices have refused this step, too
            return
        with self._executor.blaming(None, issued.slot, [task.name]):
            loss, norm, healthy = result.loss, result.grad_norm, result.healthy
        if not healthy:
            self._fail(issued)
            return
        task.step = issued.step
        self._emit(
            StepTaken(
                slot=issued.slot + 1,
                adapter=task.name,
                step=issued.step,
                loss=loss,
                grad_norm=norm,
                lr=float(task.rates[issued.step - 1]),
                loss_tokens=task.loss_tokens[issued.step - 1],
            )
        )
        if task.step == task.num_steps:
            task.status = "done"

    def _fail(self, issued: _Issued) -> None:
        task, name = issued.task, place_name(issued.place)
        self._executor.put_back(name, issued.result)
        cause = self._executor.not_finite(name, issued.result) or "loss not finite"
        task.status, task.reason = "failed", f"{cause} at step {issued.step}"
        self._emit(
            AdapterFailed(
                slot=issued.slot + 1, adapter=task.name, step=issued.step, reason=task.reason, kept_step=task.step
            )
        )

    def _failed(self) -> frozenset[int]:
        return frozenset(place for place, task in self.tasks.items() if task.status == "failed")


def _kind(spec: AdapterSpec, config: JobConfig) -> tuple:
    """Adapters of one kind share the programs of their steps."""
    optim = next((a.optim for a in config.adapters if a.name == spec.name), config.adapters[0].optim)
    return spec.rank, spec.targets, optim.name, optim.clip > 0


def _check_state(task: Task, state: AdapterState) -> None:
    if state.data != task.data.digest:
        raise CheckpointError(
            "state.data",
            f"the state of {task.name} was trained on other data, or in another order.",
            fix="restore the data, or start the adapter from the beginning",
        )


def _results[T](futures: list[Future[T]]) -> list[T]:
    return [done.result() for done in futures]
