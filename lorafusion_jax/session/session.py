"""A session: a base model on its devices, its compiled programs, and a place for each adapter.

Only the session and its parts use devices. A run opens one with the adapters of its job; others may join, and those
that have ended keep their places. A service opens one with free places, in which adapters start and stop. One loop runs
slots of either: of a plan (`Batches`) or of windows (`WindowPlanner`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.checkpoint.warm_start import read_warm_starts
from lorafusion_jax.config.join import select_adapters
from lorafusion_jax.config.places import Places
from lorafusion_jax.config.references import reference_of
from lorafusion_jax.config.schema import BaseSettings, BatchSettings, JobConfig, MeshSettings, TrainSettings
from lorafusion_jax.config.stack import Stack, place_specs, session_config, session_stack, stack_of
from lorafusion_jax.data.assemble import Microbatch
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.data.references import EVAL
from lorafusion_jax.data.tokenized_set import TokenizedSet
from lorafusion_jax.errors import CheckpointError, RunError
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.peft.folder import Arrays
from lorafusion_jax.session.adapter_state import AdapterState
from lorafusion_jax.session.ahead import Ahead
from lorafusion_jax.session.assembler import Assembler, first_tail, places_for_segments
from lorafusion_jax.session.base import check_tables, has_room_for_a_state, memory_warning, open_base
from lorafusion_jax.session.base_cache import BaseFiles
from lorafusion_jax.session.calls import Capacity
from lorafusion_jax.session.distant_stage import AnyStage
from lorafusion_jax.session.evaluation import Evaluation, HeldOut, evaluate
from lorafusion_jax.session.executor import Executor
from lorafusion_jax.session.facts import Facts
from lorafusion_jax.session.first_weights import starting_weights, starts_from_base
from lorafusion_jax.session.free_places import FreePlaces
from lorafusion_jax.session.growth import grow_stages
from lorafusion_jax.session.loading import load_and_compile
from lorafusion_jax.session.loop import Loop
from lorafusion_jax.session.place_table import PlaceTable
from lorafusion_jax.session.places import PlaceWeights, PlaceWriter, check_state
from lorafusion_jax.session.processes import is_alone
from lorafusion_jax.session.reading import Reading, Times
from lorafusion_jax.session.references import (
    BASE_ALONE,
    ReferenceQueue,
    References,
    SetPass,
    open_passes,
    reference_passes,
)  # fmt: skip
from lorafusion_jax.session.release import release_unused
from lorafusion_jax.session.snapshot import Snapshot, Snapshots
from lorafusion_jax.session.spans import Spans
from lorafusion_jax.session.state import load_states, read_adapter
from lorafusion_jax.session.steps import Steps
from lorafusion_jax.session.stream import stream_task
from lorafusion_jax.session.task import AdapterProgress, Task, tasks_of
from scheduling import Slot
from scheduling.pipeline import Event

# jax's caches keep traces of all shapes, 3 MB for every addition. They belong to the whole process, so they are cleared
# seldom.
ADDITIONS_IN_CACHES = 16


class Session:
    """Adapters on the stages of a pipeline. Methods are called from one thread, unless they say otherwise.

    Of a job: call `open`, `start_all`, `load_states` to go on, and then `finish_loading`; `add` adds adapters. With
    free places: call `open_places`; `start` and `stop` adapters. Adapters that are not in a microbatch do not change.

    Args:
        stages: of the base model.
        tasks: of a job, which `start_all` starts; none if adapters start one by one.
        reading: reads the base (None: the stages have it).
        spans: records when events run (None: not recorded).
        stack: which adapter is where (None: as the job says).
        free_places: of a session that has them.

    Attributes:
        config: of the job, or of its places.
        tasks: its adapters by name, in order of arrival.
        index: place of each adapter.
        executor: runs events.
        steps, loop: issue steps and slots; their hooks belong to whoever gives the slots.
        references: adapters whose references are computed between slots.
        assembler: makes microbatches of the tasks.
    """

    def __init__(
        self,
        config: JobConfig,
        stages: Sequence[AnyStage],
        tasks: Mapping[str, Task],
        *,
        reading: Reading | None = None,
        spans: Spans | None = None,
        stack: Stack | None = None,
        free_places: FreePlaces | None = None,
        copies_states: bool = True,
    ):
        self._reading, self._spans, self._additions = reading, spans, 0
        self._copies_states = copies_states  # for a copy of the largest state, while all train
        self._unstarted: list[int] = []  # places of adapters whose initial values may depend on the base
        self.tasks, self.index = dict(tasks), dict[str, int]()
        self.executor = Executor(stages, (), spans)
        self.executor.number_adapters(self.index)
        self.assembler = Assembler(config.batch.tile_tokens, self.executor.local_replicas, self.index)
        self.steps = Steps(self.executor, self.tasks)
        self.loop = Loop(self.executor, self.steps, self.index)
        self.references = ReferenceQueue(self.executor)
        self._free_places = free_places
        self._arrange(config, stack_of(config) if stack is None else stack)

    def _arrange(self, config: JobConfig, stack: Stack) -> None:
        """Tells all parts of the session which adapters there are, and where, on new stages."""
        self.config, self._stack, self._held_out = config, stack, None
        self.index |= stack.index
        self._snapshots = Snapshots(self.stages, self.executor.links)
        if not stack.stand_ins:
            return
        table = PlaceTable(self.stages[0].parts.leaves, len(stack.config.adapters))
        for name, place in stack.index.items():
            table.assign(place, self.tasks[name].spec, stack.number_of(self.tasks[name].chosen))
        self.executor.describe = table.describe
        self._writer = PlaceWriter(config, stack, self.executor, table, compiles=self._free_places is not None)

    @classmethod
    def open(
        cls,
        config: JobConfig,
        prepared: Prepared,
        specs: Sequence[AdapterSpec] | None = None,
        later: JobConfig | None = None,
        base_files: BaseFiles | None = None,
    ) -> Session:
        """Checks the base model of a job and starts to read it onto its devices.

        Args:
            specs: the adapters (None: those of the job).
            later: the job with all adapters that will join later.
            base_files: see `open_base`.

        Raises:
            LoraFusionError: see `open_base` and `check_tables`.
        """
        check_tables()
        base = open_base(config, prepared, specs, later, base_files)
        return cls(
            config, base.stages, tasks_of(config, prepared), reading=Reading(base), spans=Spans(len(base.stages))
        )

    @classmethod
    def open_places(
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
        row_targets: int = 0,
        base_files: BaseFiles | None = None,
        on_progress: Callable[[str], None] = lambda text: None,
    ) -> Session:
        """Loads a base model and compiles all programs of a session with free places.

        Args:
            places: for adapters of any objective.
            batch: capacities and tile; `global_samples` is the adapters' own. Each slot takes the smallest capacity
                that holds it.
            train: `router_aux` is that of all adapters.
            directory: folder of a relative `base.model`.
            most_segments: places for segments in a microbatch (None: one for 256 tokens), of which a sample of
                preferences takes two. More cost time in attention.
            reproducible: split batches in one way, and let a microbatch hold one adapter, so that an adapter does not
                depend on its company by a single bit. Microbatches are less full. Otherwise results are equal to
                rounding, because sums over a microbatch depend on the rows at which an adapter begins.
            row_targets: targets at a position of clients' rows, for which programs compile now (0: there are no such
                rows yet).
            base_files: see `open_base`.

        Raises:
            LoraFusionError: the base, the mesh or the memory do not fit; see `open_base`.
        """
        if jax.process_count() > 1:
            raise RunError(
                "session.processes",
                "a live session runs in one process.",
                why="adapters start and stop when users ask, and all processes would have to do so at the same slot",
                fix="one process per session, on the devices of one host; `lorafusion train` runs on several",
            )
        batch, train = batch or BatchSettings(), train or TrainSettings()
        check_tables()
        config = session_config(base, mesh, places, batch=batch, train=train, directory=directory)
        opened = open_base(config, None, place_specs(config, places.heads), base_files=base_files)
        most = most_segments or places_for_segments(batch)
        tail = first_tail(batch, mesh, len(places.ranks), most, reproducible=reproducible)
        session = cls(
            config,
            opened.stages,
            {},
            reading=Reading(opened),
            stack=session_stack(config, places),
            free_places=FreePlaces(config, places, tail, row_targets),
            copies_states=has_room_for_a_state(config, opened.stages[0].parts.model, opened.stages[0].remat),
        )
        try:
            session._writer.write_zeros()
            session.finish_loading(session.free_places.padding(session.assembler), on_progress)
            session._writer.compile_classes()
        except BaseException:
            session.close()
            raise
        return session

    def finish_loading(
        self,
        rows: Sequence[Microbatch] = (),
        on_progress: Callable[[str], None] = lambda text: None,
        ahead: Ahead | None = None,
    ) -> dict[str, Times]:
        """Waits for the base model and compiles meanwhile.

        Args:
            rows: a microbatch of padding of each capacity, as training will have them; none: nothing is compiled.
            on_progress: called with what is running, whenever that changes.
            ahead: processes that compile programs of layers meanwhile.

        Returns:
            Start and end, by `time.perf_counter`, of reading the base ("base") and of each compilation.

        Raises:
            CheckpointError: a file of the model is broken.
            RunError: a stage failed.
        """
        ahead = Ahead() if ahead is None else ahead
        held_out = self.assembler.padding(self._sets.sets_shape) if rows and self._sets.evaluates else None
        times = load_and_compile(self.config, self.executor, self.reading, rows, held_out, ahead, on_progress)
        self._start_from_base()
        return times

    @property
    def reading(self) -> Reading:
        """The base model: where it comes from, and whether its cache is written."""
        assert self._reading is not None
        return self._reading

    @property
    def spans(self) -> Spans:
        """When events ran; of a session that records them."""
        assert self._spans is not None
        return self._spans

    def start_all(self, weights: Mapping[int, Arrays]) -> None:
        """Starts every adapter from its initial weights, or from those given here.

        Args:
            weights: weights of some adapters by their number in the job, from `read_warm_starts`.
        """
        parts, occupied = self.stages[0].parts, dict(self.stages[0].occupied)
        specs = [occupied[self.index[name]] for name in self.names]
        lora = starting_weights(parts.leaves, specs, weights)
        for stage in self.executor.local_stages.values():
            stage.start(lora)
        self._unstarted = [self.index[name] for number, name in enumerate(self.names) if number not in weights]

    def _start_from_base(self) -> None:
        """Sets the initial values that depend on the base, which is on the devices now."""
        specs = dict(self.stages[0].occupied)
        for index in self._unstarted:
            spec = specs[index]
            if starts_from_base(spec):
                for stage in self.executor.local_stages.values():
                    stage.start_from_base(index)
        self._unstarted = []

    @property
    def stages(self) -> tuple[AnyStage, ...]:
        """The stages, with the current weights; others after `add`."""
        return self.executor.stages

    @property
    def names(self) -> list[str]:
        """Names of the adapters, in the order in which they came."""
        return list(self.tasks)

    def add(
        self,
        config: JobConfig,
        prepared: Prepared,
        weights: Mapping[int, Arrays],
        clocks: Mapping[str, AdapterProgress] | None = None,
    ) -> None:
        """Adds the last adapters of a job and starts them. Collective over processes.

        The state of the others stays bitwise equal. No work may be in flight. Adapters in free places compile nothing
        that is known of their shapes. For others every program compiles again, because the arrays of all adapters
        change their shapes.

        Args:
            config, prepared: of all adapters, the present ones first.
            weights: weights of new adapters by their number in the job, as in `start_all`.
            clocks: progress of the new adapters.
        """
        names = [adapter.name for adapter in config.adapters]
        assert names[: len(self.names)] == self.names
        self.executor.wait_dispatched()
        starts = {names[number]: arrays for number, arrays in weights.items()}
        tasks = tasks_of(select_adapters(config, names[len(self.names) :]), prepared, clocks)
        stack, grows = stack_of(config), self.needs_room(config)
        if not grows:
            self.config, self._held_out = config, None
            for name, task in tasks.items():
                self._put(stack.index[name], task, self._writer.first_weights(task, starts.get(name)))
            return
        by_place = {stack.index[name]: arrays for name, arrays in starts.items()}
        self.executor.replace_stages(grow_stages(self.stages, self.executor.links, config, by_place))
        self.tasks |= tasks
        self._arrange(config, stack)
        self._unstarted = [self.index[name] for name in tasks if name not in starts]
        self._start_from_base()
        self._additions += 1
        release_unused(caches=self._additions % ADDITIONS_IN_CACHES == 0)

    def needs_room(self, config: JobConfig) -> bool:
        """Whether adapters of a job do not all fit into places, so that adding them compiles every program."""
        return len(stack_of(config).config.adapters) > len(self._stack.config.adapters)

    def _put(self, place: int, task: Task, weights: PlaceWeights) -> int:
        """Writes an adapter into a free place. Returns the number of its objective."""
        number = self._writer.number_objective(task)
        self.tasks[task.name], self.index[task.name] = task, place
        self._writer.write(place, task, weights, number)
        return number

    def lacks_memory(self, config: JobConfig) -> str | None:
        """Returns why the devices cannot hold the adapters of a job; None if they can, or if it is unknown."""
        return memory_warning(config, self._model, self.stages[0].remat)

    @property
    def free_places(self) -> FreePlaces:
        """The free places, of a session that has them: their sizes, and the microbatches of what starts in them."""
        assert self._free_places is not None
        return self._free_places

    @property
    def places(self) -> Places:
        """How large adapters may be, in a session with free places."""
        return self.free_places.places

    @property
    def free(self) -> dict[str, int]:
        """Free places by class."""
        return self.free_places.free(self.index.values())

    def find_place(self, spec: AdapterSpec) -> int | None:
        """Returns a free place for an adapter; None if there is none now."""
        return self.free_places.find(spec, self.index.values())

    def draw(self, task: Task) -> PlaceWeights:
        """Draws an adapter's first weights, or reads those of `lora.init_from`; from any thread.

        Those of an 8B take most of a second, in which the devices would wait if `start` drew them.
        """
        return self._writer.first_weights(task, read_warm_starts(task.config).get(0))

    def start(
        self,
        place: int,
        task: Task,
        state: AdapterState | None = None,
        first: PlaceWeights | None = None,
        *,
        sums: bool = False,
    ) -> None:
        """Starts an adapter in a free place. Others train on; nothing compiles for known shapes of adapters.

        The first adapter of other rank, targets or optimizer compiles its own step: a second or two; the first of
        another objective the loss. An adapter whose objective compares with a reference is `preparing` at first: what
        the reference says is computed between the slots of the others.

        Args:
            state: continue from there (None: from initial weights, or `lora.init_from`).
            first: what `draw` returned (None: it is called if it is needed).
            sums: continue the global batch that the state has begun; otherwise its samples run again.

        Raises:
            RunError: `session.place`, it is taken or too small; `session.segments`.
            CheckpointError: `state.data`, the state was trained on other data; `peft.other-base`.
        """
        if place not in range(len(self.places.ranks)) or place in self.index.values() or task.name in self.index:
            raise RunError("session.place", f"{task.name} cannot start in place {place}: it is taken.")
        if (factor := task.config.train.router_aux) != self.config.train.router_aux:
            raise RunError(
                "session.router-aux",
                "the loss of routers has one factor in a session.",
                why=f"train.router_aux is {factor:g} for {task.name} and {self.config.train.router_aux:g} here",
                fix="a session that was opened with the job's train.router_aux",
            )
        self._writer.check(place, task, self.free_places.tail.most_segments)
        reference = reference_of(task.adapter, [task.name]) if task.references is None else None
        if first is None and (state is None or reference is not None):
            first = self.draw(task)
        weights = first
        if state is not None:
            check_state(task, state)
            weights = PlaceWeights(spec=task.spec, leaves=state.weights, optimizer=state.optimizer)
        assert weights is not None
        compared = self._writer.reference_weights(place, task, reference, first or weights)
        self.make_room(task)
        task.restart(0 if state is None else state.step)
        number = self._put(place, task, compared or weights)
        if sums and state is not None:
            self._write_sums(task, place, state)
        if reference is None:
            return
        task.status = "preparing"

        def take(references: References | None) -> None:
            if compared is not None:
                self._writer.write(place, task, weights, number)
            if references is not None:
                task.take_references(references[task.name])

        position = BASE_ALONE if compared is None else place
        passes = (self._pass_over(task, key, samples, position) for key, samples in task.source.sets.items())
        self.references.add(task.name, passes, take)

    def new_stream(
        self, name: str, *, rank: int, alpha: float = 32.0, seed: int = 0, targets: str | list[str] = "all-linear",
        owner: str = "",
    ) -> Task:  # fmt: skip
        """Returns the task of a training client, whose source is a `Stream`; `start` starts it.

        Args:
            alpha: the low-rank product is scaled by alpha / rank.
            targets: projections.
            owner: shares its turns between its adapters (empty: this adapter is an owner).

        Raises:
            ConfigError, ErrorList: the adapter is invalid.
        """
        tail, adapter = self.free_places.tail, {"rank": rank, "alpha": alpha, "seed": seed, "targets": targets}
        tokens = tail.limits.tiles * tail.limits.tile_tokens
        capacity = Capacity(tokens=tokens, vocab_size=self._model.vocab_size)
        return stream_task(self.config, name, capacity, owner=owner, calls_alone=tail.reproducible, **adapter)

    def restore(self, name: str, state: AdapterState, *, optimizer: bool = True) -> None:
        """Replaces the state of an adapter that trains, after all work issued so far.

        Args:
            optimizer: False: the optimizer begins anew, and sums of the state are left out.

        Raises:
            CheckpointError: `state.data`, or `state.shapes`, it belongs to an adapter of other rank or targets.
        """
        task, place = self.tasks[name], self.index[name]
        check_state(task, state)
        shapes = self.stages[0].parts.leaves.own_shapes([(place, task.spec)])[name]
        if {leaf: array.shape for leaf, array in state.weights.items()} != shapes:
            raise CheckpointError(
                "state.shapes",
                f"the state does not fit {name}.",
                why="its rank, its targets or its base differ",
                fix="a client with the rank and targets of the state",
            )
        self.steps.settle(name)
        weights = PlaceWeights(spec=task.spec, leaves=state.weights, optimizer=state.optimizer if optimizer else None)
        task.clock.step = state.step if optimizer else 0
        self._writer.write(place, task, weights, self._writer.number_objective(task))
        task.source.take_sums(exist=False)
        if optimizer:
            self._write_sums(task, place, state)

    def _write_sums(self, task: Task, place: int, state: AdapterState) -> None:
        if state.sums:
            self.executor.read_all(lambda stage: stage.write_sums(place, state.sums, state.totals))
            task.source.take_sums(exist=True)

    def _pass_over(self, task: Task, key: str, samples: TokenizedSet, position: int) -> SetPass:
        return SetPass(
            adapter=task.name,
            key=key,
            samples=samples,
            slots=self.free_places.pack(task, samples),
            shape=self.free_places.sets_shape,
            tile_tokens=self.config.batch.tile_tokens,
            stages=self.executor.stages,
            position=position,
            state=self._writer.teacher_state(task),
            describe=self.executor.describe,
        )

    def stop(self, name: str) -> AdapterState:
        """Frees a place. Returns the state after the adapter's last step; a begun batch is dropped.

        Waits for the slots that were issued. An adapter that was still preparing has to prepare again.
        """
        self.drain()
        self.references.drop(name)
        state = self.read(name)()
        self.forget(name)
        return state

    def end_training(self, name: str) -> int:
        """Ends the training of an adapter after its last step that was issued; a begun batch is dropped.

        It keeps its place until `forget`. Others train on, also while it is read.

        Returns:
            The step that it comes to, unless the adapter fails before.
        """
        task = self.tasks[name]
        self.references.drop(name)
        if task.status in ("preparing", "running"):
            task.status = "leaving"
        return task.step + self.steps.num_waiting(name)

    def pause(self, name: str) -> None:
        """Gives an adapter no slots until `resume`, between two windows. A begun batch waits with its sums."""
        self._change(name, "running").pause()

    def resume(self, name: str) -> None:
        """Continues an adapter that is paused."""
        self._change(name, "paused").resume()

    def cancel(self, name: str, reason: str) -> None:
        """Ends an adapter at once, between two windows; a begun batch is left without its step."""
        self._change(name, "running", "paused").cancel(reason)

    def finish(self, name: str, reason: str = "") -> int:
        """Ends an adapter after the batch that it has begun, between two windows. Returns its last step."""
        self._change(name, "running")
        task = self.tasks[name]
        begun = task.cursor is not None and bool(task.cursor.done)
        step = task.step + self.steps.num_waiting(name) + begun
        task.end_at(step, reason)
        return step

    def _change(self, name: str, *statuses: str) -> AdapterProgress:
        clock = self.tasks[name].clock
        if clock.status not in statuses:
            raise RunError("session.status", f"{name} is {clock.status}.", why=f"only for one that is {statuses[0]}")
        return clock

    def read(self, name: str, *, optimizer: bool = True, sums: bool = False) -> Callable[[], AdapterState]:
        """Returns a function that waits for the state of an adapter, from any thread; all train on meanwhile.

        The state is that after the last step that was issued: it counts once `Task.step` has come to its step, and not
        if the adapter fails before. The devices copy it. Call the function before you start to read another state,
        because devices have memory for one. If they lack even that, this waits for the slots that were issued, and
        reads the state itself. Of an adapter that does not train any more they copy the weights alone.

        Args:
            optimizer: False: without its state, a third of the copy and of what is transferred.
            sums: with what a begun global batch has summed up; without, its samples run again.
        """
        assert name not in self.references, "the place may hold the weights of a reference"
        task, place = self.tasks[name], self.index[name]
        trains = task.status not in ("done", "leaving")
        if trains and not self._copies_states:
            self.drain()
        step = task.step + self.steps.num_waiting(name)
        parts = read_adapter(
            self.executor, place, name, optimizer=optimizer, sums=sums, copies=trains and self._copies_states
        )

        def wait() -> AdapterState:
            return AdapterState(step=step, data=task.source.digest, **parts())

        if is_alone() and (self._copies_states or not trains):
            return wait
        state = wait()  # with several processes it may be collective, so it cannot run in the background
        return lambda: state

    def forget(self, name: str) -> None:
        """Frees a place without reading its state. Waits for the slots that were issued while its adapter trains."""
        if self.tasks[name].status not in ("done", "leaving") or self.steps.num_waiting(name):
            self.drain()
        self.references.drop(name)
        self.tasks.pop(name).source.close()
        del self.index[name]
        self.executor.read_all(lambda stage: stage.optimizers.pop(name, None))

    def run(
        self, events: Sequence[Event], slot_of: Callable[[int], Slot], assemble: Callable[[int], Microbatch]
    ) -> list[Event]:
        """Runs slots until a pause is due; see `Loop.run`. The devices may still work when it returns."""
        with self.executor.blaming(None, None):
            return self.loop.run(events, slot_of, assemble)

    def drain(self) -> None:
        """Waits for all slots that were issued, and reads the results of their steps."""
        self.loop.drain()

    def evaluate(self, name: str) -> Evaluation | None:
        """Evaluates an adapter, after all work issued so far, on its held-out data; None if it has none."""
        task = self.tasks[name]
        samples = task.source.sets.get(EVAL)
        if samples is None:
            return None
        sets = self._sets
        rows = self.assembler.held_out(sets.sets_shape, sets.pack(task, samples), name, samples, task.chosen)
        return evaluate(self.executor, self.index[name], task, samples, rows)

    @property
    def _sets(self) -> FreePlaces | HeldOut:
        """How sets of samples are packed."""
        if self._free_places is None and self._held_out is None:
            self._held_out = HeldOut(self.config, self.tasks)
        sets = self._free_places or self._held_out
        assert sets is not None
        return sets

    def make_room(self, task: Task) -> None:
        """Makes room in microbatches for the samples of a task."""
        self.free_places.make_room(task, self._writer.teacher_state(task))

    def compile_reads(self) -> None:
        """Compiles `read` and `snapshot`, so that they do not delay the run: 0.3 to 0.7 s on a CPU."""
        with self.executor.blaming(None, None):
            self._snapshots.compile()
            for part in self.executor.read(
                lambda stage: [stage.adapter(adapter) for adapter in stage.one_of_every_kind()]
            ):
                part.result()

    def compute_references(
        self, prepared: Prepared, names: Sequence[str], on_progress: Callable[[str], None] = lambda text: None
    ) -> References:
        """Computes what the references of these adapters say of their samples. Waits; collective over processes.

        The adapters, and those that are their references, must be at their first step.
        """
        self.executor.wait_dispatched()
        with self.executor.blaming(None, None):
            passes = reference_passes(self.config, prepared, self.stages, names, self.executor.describe)
            return self.references.compute(passes, on_progress)

    def open_passes(
        self, new: JobConfig, prepared: Prepared, names: Sequence[str], weights: Mapping[int, Arrays]
    ) -> list[SetPass]:
        """Makes the passes that compute the references of adapters before these join. Waits.

        They run on stages of their own on the same base, so that training may go on meanwhile. One process compiles
        them here, and may do so in any thread; several compile them with the first microbatch, all at once.

        Args:
            new: the adapters that are about to join.
            names: those of them that need references.
            weights: as in `start`, by number in `new`.
        """
        return open_passes(self.stages, new, prepared, names, weights)

    def take_data(
        self, config: JobConfig, prepared: Prepared, clocks: Mapping[str, AdapterProgress] | None = None
    ) -> None:
        """Replaces the data of the adapters: samples that have references now, or more of them.

        Args:
            clocks: progress of the adapters (None: as it is).
        """
        clocks = {name: task.clock for name, task in self.tasks.items()} if clocks is None else clocks
        self.tasks |= tasks_of(select_adapters(config, self.names), prepared, clocks)
        self._held_out = None

    def snapshot(self) -> Snapshot:
        """Copies the current trainable state. Collective over processes.

        Training may continue at once: arrays that it overwrites or donates are copied.
        """
        self.executor.wait_dispatched()
        with self.executor.blaming(None, None):
            progress = {name: (task.step, task.source.digest) for name, task in self.tasks.items()}
            return self._snapshots.take(dict(self.index), progress)

    def load_states(self, states: Mapping[str, AdapterState]) -> None:
        """Continues from the states of a `snapshot`, on this or another layout.

        Raises:
            ValueError: they are not those of these adapters.
        """
        load_states(self.stages, states)
        self._unstarted = []

    def close(self) -> None:
        """Ends the threads of the session."""
        if self._reading is not None:
            self._reading.cancel()
        if self._spans is not None:
            self._spans.stop()
        if self._free_places is not None:  # the work of a run may wait for a process that is lost
            self.executor.close()

    @property
    def facts(self) -> Facts:
        """Figures of the session as it is now."""
        return Facts(self.config, self.executor)

    @property
    def _model(self) -> ModelConfig:
        return ModelConfig.from_hf(base_directory(self.config))
