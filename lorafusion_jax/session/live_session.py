"""A live session: a base model on its devices, and places in which adapters start, train and stop.

`open` compiles. `start` and `stop` write and read arrays. `plan` plans the next slots and `run` runs them; a session
without adapters waits. One process; the mesh may have several stages and replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.config.places import Places, place_kind
from lorafusion_jax.config.references import reference_of
from lorafusion_jax.config.schema import (
    BaseSettings,
    BatchSettings,
    JobConfig,
    MeshSettings,
    TrainSettings,
)
from lorafusion_jax.config.stack import place_specs, session_config
from lorafusion_jax.data.assemble import num_segments
from lorafusion_jax.data.references import EVAL, SetReferences
from lorafusion_jax.data.sample_table import table_shape
from lorafusion_jax.data.tokenized_set import TokenizedSet
from lorafusion_jax.errors import RunError
from lorafusion_jax.report.events import Listener
from lorafusion_jax.session.adapter_state import AdapterState
from lorafusion_jax.session.assembler import (
    MOST_ADAPTERS,
    TOKENS_OF_A_SEGMENT,
    Assembler,
    Replicas,
    Shape,
    pack_set,
)
from lorafusion_jax.session.base import check_tables, has_room_for_a_state, open_base
from lorafusion_jax.session.base_cache import BaseFiles
from lorafusion_jax.session.device_copy import InParts, read_together
from lorafusion_jax.session.distant_stage import local_stages
from lorafusion_jax.session.evaluation import Evaluation, evaluate
from lorafusion_jax.session.executor import Executor
from lorafusion_jax.session.loop import Loop, SlotHooks
from lorafusion_jax.session.move import to_host
from lorafusion_jax.session.place_table import PlaceTable
from lorafusion_jax.session.places import PlaceWeights, PlaceWriter, check_state
from lorafusion_jax.session.reading import Reading
from lorafusion_jax.session.references import BASE_ALONE, ReferenceQueue, SetPass
from lorafusion_jax.session.stage import Stage
from lorafusion_jax.session.state import adapter_arrays, joined_states
from lorafusion_jax.session.steps import Steps
from lorafusion_jax.session.task import Task
from scheduling import issue_order
from scheduling.pipeline import one_forward_one_backward
from scheduling.types import Limits
from scheduling.window import Tail, Window, advance, plan_window


def first_tail(
    batch: BatchSettings, mesh: MeshSettings, num_places: int, most_segments: int, *, reproducible: bool = False
) -> Tail:
    """What the first window of a session must respect: its limits."""
    return Tail(
        limits=Limits(
            capacity_tokens=batch.largest,
            num_stages=mesh.stages,
            data_parallel=mesh.replicas,
            tile_tokens=batch.tile_tokens,
        ),
        most_segments=most_segments,
        most_adapters=1 if reproducible else min(num_places, MOST_ADAPTERS),
        reproducible=reproducible,
    )


def places_for_segments(batch: BatchSettings) -> int:
    """Segments of a microbatch of a session."""
    return num_segments(max(1, batch.largest // TOKENS_OF_A_SEGMENT)) - 1


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
        most_segments: int,
        reproducible: bool = False,
        has_room: bool = True,
    ):
        self.config, self.places, self.slot = config, places, 0
        self._has_room = has_room  # for a copy of the largest state, while all places train
        self.tasks: dict[int, Task] = {}
        self._reading = reading
        self._executor = Executor(stages, ())
        table = PlaceTable(stages[0].parts.leaves, len(places.ranks))
        self._executor.describe = table.describe
        self._index: dict[str, int] = {}
        self._executor.number_adapters(self._index)
        self._tail = first_tail(config.batch, config.mesh, len(places.ranks), most_segments, reproducible=reproducible)
        self._assembler = Assembler(config.batch.tile_tokens, self._executor.local_replicas, self._index)
        self._shape = Shape(
            capacity_tokens=config.batch.largest,
            segments=num_segments(most_segments),
            adapters=self._tail.most_adapters,
        )
        self._references = ReferenceQueue(self._executor)
        self._writer = PlaceWriter(config, places, self._executor, table)
        self._by_name: dict[str, Task] = {}
        self._steps = Steps(self._executor, self._by_name)
        hooks = SlotHooks(must_pause=self._must_pause)
        self._loop = Loop(self._executor, self._steps, self._index, hooks)
        self._pause: Callable[[], bool] = lambda: False

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
        most_segments: int | None = None,
        reproducible: bool = False,
        base_files: BaseFiles | None = None,
        on_progress: Callable[[str], None] = lambda text: None,
    ) -> LiveSession:
        """Loads a base model and compiles all programs of a session.

        Args:
            places: for adapters of any objective.
            batch: capacity (one) and tile; `global_samples` is the adapters' own.
            directory: folder of a relative `base.model`.
            most_segments: places for segments in a microbatch (None: one for 256 tokens), of which a sample of
                preferences takes two. More cost time in attention.
            reproducible: split batches in one way, and let a microbatch hold one adapter, so that an adapter does not
                depend on its company by a single bit. Microbatches are less full. Otherwise results are equal to
                rounding, because sums over a microbatch depend on the rows at which an adapter begins.
            base_files: see `open_base`.

        Raises:
            LoraFusionError: the base, the mesh or the memory do not fit; see `open_base`.
        """
        if jax.process_count() > 1:
            raise RunError("session.processes", "a live session runs in one process.", fix="one process per session")
        batch, train = batch or BatchSettings(), train or TrainSettings()
        if len(batch.sizes) > 1:
            raise RunError("session.capacities", f"a live session has one capacity, not {list(batch.sizes)}.")
        if train.router_aux:
            raise RunError("session.router-aux", "a live session has no loss of routers.", fix="train.router_aux: 0")
        check_tables()
        config = session_config(base, mesh, places, batch=batch, train=train, directory=directory)
        opened = open_base(config, None, place_specs(config, places.heads), base_files=base_files)
        stages = list(local_stages(opened.stages).values())
        most = most_segments or places_for_segments(batch)
        session = cls(
            config,
            places,
            Reading(opened),
            stages,
            most_segments=most,
            reproducible=reproducible,
            has_room=has_room_for_a_state(config, stages[0].parts.model, stages[0].remat),
        )
        try:
            session._compile(on_progress)
        except BaseException:
            session.close()
            raise
        return session

    @property
    def free(self) -> dict[str, int]:
        """Free places by class."""
        return {name: sum(p not in self.tasks for p in places) for name, places in self.places.classes.items()}

    @property
    def device(self) -> str:
        """Kind of the devices."""
        return jax.devices()[0].device_kind

    def find_place(self, spec: AdapterSpec) -> int | None:
        """Returns a free place for an adapter; None if there is none now."""
        return self.places.find(place_kind(spec), spec.rank, self.tasks.keys())

    def draw(self, task: Task) -> PlaceWeights:
        """Draws an adapter's first weights, or reads those of `lora.init_from`; from any thread.

        Those of an 8B take most of a second, in which the devices would wait if `start` drew them.
        """
        return self._writer.first_weights(task)

    def start(
        self, place: int, task: Task, state: AdapterState | None = None, first: PlaceWeights | None = None
    ) -> None:
        """Starts an adapter in a free place. Others train on; nothing compiles for known shapes of adapters.

        The first adapter of other rank, targets or optimizer compiles its own step: a second or two; the first of
        another objective the loss. An adapter whose objective compares with a reference is `preparing` at first: what
        the reference says is computed between the slots of the others.

        Args:
            state: continue from there (None: from initial weights, or `lora.init_from`).
            first: what `draw` returned (None: it is called if it is needed).

        Raises:
            RunError: `session.place`, it is taken or too small; `session.segments`.
            CheckpointError: `state.data`, the state was trained on other data; `peft.other-base`.
        """
        if place not in range(len(self.places.ranks)) or place in self.tasks or task.name in self._index:
            raise RunError("session.place", f"{task.name} cannot start in place {place}: it is taken.")
        self._writer.check(place, task, self._tail.most_segments)
        reference = reference_of(task.adapter, [task.name]) if task.references is None else None
        if first is None and (state is None or reference is not None):
            first = self._writer.first_weights(task)
        weights = first
        if state is not None:
            check_state(task, state)
            weights = PlaceWeights(spec=task.spec, leaves=state.weights, optimizer=state.optimizer)
        assert weights is not None
        compared = self._writer.reference_weights(place, task, reference, first or weights)
        self._make_room(task)
        number = self._writer.number_objective(task)
        task.restart(0 if state is None else state.step)
        self.tasks[place] = self._by_name[task.name] = task
        self._index[task.name] = place
        self._writer.write(place, task, compared or weights, number)
        if reference is None:
            return
        task.status = "preparing"

        def finish(references: SetReferences | None) -> None:
            if compared is not None:
                self._writer.write(place, task, weights, number)
            if references is not None:
                task.take_references(references)

        position = BASE_ALONE if compared is None else place
        passes = (self._pass_over(task, key, samples, position) for key, samples in task.source.sets.items())
        self._references.add(place, passes, finish)

    def _pass_over(self, task: Task, key: str, samples: TokenizedSet, position: int) -> SetPass:
        return SetPass(
            adapter=task.name,
            key=key,
            samples=samples,
            slots=self._pack(task, samples),
            shape=self._shape,
            tile_tokens=self.config.batch.tile_tokens,
            stages=self._executor.stages,
            position=position,
            state=self._writer.teacher_state(task),
            describe=self._executor.describe,
        )

    def stop(self, place: int) -> AdapterState:
        """Frees a place. Returns the state after the adapter's last step; a begun batch is dropped.

        Waits for the slots that were issued. An adapter that was still preparing has to prepare again.
        """
        self.drain()
        self._references.drop(place)
        state = self.read(place)
        self.forget(place)
        return state

    def read(self, place: int) -> AdapterState:
        """Returns the state after an adapter's last step. Waits for the slots that were issued."""
        self.drain()
        return self.start_reading(place)()

    def end_training(self, place: int) -> int:
        """Ends the training of an adapter after its last step that was issued; a begun batch is dropped.

        It keeps its place until `forget`. Others train on, also while it is read.

        Returns:
            The step that it comes to, unless the adapter fails before.
        """
        task = self.tasks[place]
        self._references.drop(place)
        if task.status in ("preparing", "running"):
            task.status = "leaving"
        return task.step + self._steps.num_waiting(task.name)

    def start_reading(self, place: int, *, optimizer: bool = True) -> Callable[[], AdapterState]:
        """Returns a function that waits for the state of an adapter, from any thread; all train on meanwhile.

        The state is that after the last step that was issued: it counts once `Task.step` has come to its step, and not
        if the adapter fails before. The devices copy it. Call the function before you start to read another state,
        because devices have memory for one. If they lack even that, this waits for the slots that were issued, and
        reads the state itself. Of an adapter that does not train any more they copy the weights alone.

        Args:
            optimizer: False: without its state, a third of the copy and of what is transferred.
        """
        assert place not in self._references, "the place may hold the weights of a reference"
        task = self.tasks[place]
        trains = task.status not in ("done", "leaving")
        if trains and not self._has_room:
            self.drain()
        step = task.step + self._steps.num_waiting(task.name)
        copies = trains and self._has_room
        parts = self._executor.read(lambda stage: self._read_stage(stage, place, task, optimizer, copies))

        def wait() -> AdapterState:
            states = [_on_host(part.result()) for part in parts]
            parts.clear()
            return AdapterState(
                step=step,
                data=task.source.digest,
                weights=adapter_arrays([leaves for leaves, _ in states]),
                optimizer=joined_states([state for _, state in states]),
            )

        if self._has_room or not trains:
            return wait
        state = wait()
        return lambda: state

    def _read_stage(self, stage: Stage, place: int, task: Task, optimizer: bool, copies: bool) -> tuple[Any, Any]:
        """Returns leaves and optimizer state of an adapter on a stage."""
        if optimizer and copies:
            return stage.copy_state(place)
        state = stage.adapter(place), stage.optimizers[task.name] if optimizer else {}
        return jax.tree.map(lambda leaf: InParts(leaf.shape, [leaf], 0), state)

    def forget(self, place: int) -> None:
        """Frees a place without reading its state. Waits for the slots that were issued while its adapter trains."""
        task = self.tasks[place]
        if task.status not in ("done", "leaving") or self._steps.num_waiting(task.name):
            self.drain()
        self._references.drop(place)
        del self.tasks[place]
        del self._index[task.name], self._by_name[task.name]
        self._executor.read_all(lambda stage: stage.optimizers.pop(task.name, None))

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

        Adapters that are preparing advance by a microbatch before each slot. The window ends when one of them is ready.

        Args:
            listener: called with `StepTaken` and `AdapterFailed`.
            pause: asked before each slot; True ends the window there.

        Returns:
            Number of slots run.
        """
        self._steps.listener, self._pause = listener, pause
        if not window.slots:
            while len(self._references) and not self._references.step() and not pause():
                pass
            return 0
        before = {name: task.cursor for name, task in self._by_name.items()}
        tasks, first = dict(self._by_name), self.slot
        events = issue_order(one_forward_one_backward(window), window.num_stages)
        with self._executor.blaming(None, None):
            later = self._loop.run(
                [event._replace(slot=first + event.slot) for event in events],
                lambda slot: window.slots[slot - first],
                lambda slot: self._assembler.slot(self._shape, window.slots[slot - first].replicas, tasks),
            )
        end = later[0].slot - first if later else len(window.slots)
        if end < len(window.slots):
            window = advance([before[cursor.job.name] for cursor in window.cursors], self._tail, window.slots[:end])
        self._tail, self.slot = window.tail, self.slot + end
        for cursor in window.cursors:
            self._by_name[cursor.job.name].cursor = cursor
        return end

    def drain(self) -> None:
        """Waits for all slots that were issued, and reads the results of their steps."""
        self._loop.drain()

    def evaluate(self, place: int) -> Evaluation | None:
        """Evaluates an adapter on its held-out data; None if it has none. Waits for the slots that were issued."""
        task = self.tasks[place]
        samples = task.source.sets.get(EVAL)
        if samples is None:
            return None
        self.drain()
        slots = self._assembler.held_out(self._shape, self._pack(task, samples), task.name, samples, task.chosen)
        return evaluate(self._executor, task.name, place, task.chosen, samples, slots)

    def close(self) -> None:
        """Ends the threads of the session."""
        self._reading.cancel()
        self._executor.close()

    def _make_room(self, task: Task) -> None:
        """Makes room for the samples of a task. It never shrinks, so that few shapes compile."""
        sets = [(task.chosen, samples) for samples in task.source.sets.values()]
        table = table_shape(self._shape.segments - 1, sets)
        if table is not None and table.rows:
            table = table._replace(rows=self._shape.capacity_tokens)
        if table is not None:
            self._shape = self._shape.with_table(table, self._writer.teacher_state(task))

    def _pack(self, task: Task, samples: TokenizedSet) -> list[Replicas]:
        """Packs a set of a task, for a pass over all of it."""
        most_samples = (self._shape.segments - 1) // task.chosen.num_segments
        return pack_set(self.config, task.name, samples, most_samples)

    def _compile(self, on_progress: Callable[[str], None]) -> None:
        """Compiles what all adapters share, and the steps of the largest adapters of each class."""
        self._writer.write_zeros()
        rows = self._assembler.padding(self._shape)
        self._executor.warm_up([rows], rows, lambda left: on_progress(f"compiling {', '.join(left)}"))
        self._reading.finish()
        self._writer.compile_classes()

    def _must_pause(self, slot: int) -> bool:
        """Whether a window ends before a slot. Its first slot is always run."""
        ready = self._references.step()
        return slot > self.slot and (ready or self._pause())


def _on_host(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    copies = iter(read_together([leaf for leaf in leaves if isinstance(leaf, InParts)]))
    return structure.unflatten([next(copies) if isinstance(leaf, InParts) else to_host(leaf) for leaf in leaves])
