"""An open session: a base model on its devices, its compiled programs, and the loop that runs slots on them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Self

import jax

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.config.places import Places, place_kind
from lorafusion_jax.config.schema import BaseSettings, BatchSettings, JobConfig, MeshSettings, TrainSettings
from lorafusion_jax.config.stack import Stack, place_specs, session_config, session_stack, stack_of
from lorafusion_jax.data.assemble import Microbatch, num_segments
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.data.sample_table import State, table_shape
from lorafusion_jax.data.tokenized_set import TokenizedSet
from lorafusion_jax.errors import RunError
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.peft.folder import Arrays
from lorafusion_jax.planning.held_out import size_of_set
from lorafusion_jax.session.adapter_state import AdapterState
from lorafusion_jax.session.ahead import Ahead
from lorafusion_jax.session.assembler import Assembler, Replicas, Shape, first_tail, refs_of_set
from lorafusion_jax.session.bank import Bank
from lorafusion_jax.session.base import Facts, check_tables, has_room_for_a_state, open_base
from lorafusion_jax.session.base_cache import BaseFiles
from lorafusion_jax.session.batch_end import BatchEnds
from lorafusion_jax.session.distant_stage import AnyStage
from lorafusion_jax.session.evaluation import HeldOut
from lorafusion_jax.session.executor import Executor
from lorafusion_jax.session.first_weights import starting_weights, starts_from_base
from lorafusion_jax.session.judges import Judge
from lorafusion_jax.session.loop import Loop
from lorafusion_jax.session.places import PlaceTable, PlaceWriter
from lorafusion_jax.session.reading import Reading, Times, load_and_compile
from lorafusion_jax.session.references import ReferenceQueue, RolloutReference
from lorafusion_jax.session.snapshot import Snapshot, Snapshots
from lorafusion_jax.session.spans import Spans
from lorafusion_jax.session.state import load_states
from lorafusion_jax.session.steps import Steps
from lorafusion_jax.session.task import Task, tasks_of
from scheduling import Slot
from scheduling.pipeline import Event
from scheduling.window import Tail


class OpenSession:
    """What a session needs whatever adapters it has: see `Session`.

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
        executor: runs passes.
        batch_ends: closes global batches and steps adapters.
        steps, loop: issue steps and slots; their hooks belong to whoever gives the slots.
        references: adapters whose references are computed between slots.
        assembler: makes microbatches of the tasks.
        is_paged: whether adapters take turns in places, see `Session.holds`.
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
        self._bank = Bank()
        self._unstarted: list[int] = []  # places of adapters whose initial values may depend on the base
        self.tasks: dict[str, Task] = dict(tasks)
        # One object for good: the assembler, the loop and the ends of batches read it, and places change between slots.
        self.index: dict[str, int] = {}
        self.executor = Executor(stages, spans)
        self.batch_ends = BatchEnds(self.executor, self.index)
        self.assembler = Assembler(config.batch.tile_tokens, self.executor.local_replicas, self.index)
        self.steps = Steps(self.executor, self.batch_ends, self.tasks)
        self.loop = Loop(self.executor, self.batch_ends, self.steps, self.index)
        self.references = ReferenceQueue(self.executor)
        self._rollout_references: dict[str, tuple[Sequence[AnyStage], RolloutReference]] = {}
        self._judges: dict[str, tuple[Sequence[AnyStage], Judge]] = {}  # of PEFT folders
        self._free_places = free_places
        self._arrange(config, stack_of(config) if stack is None else stack)

    def _arrange(self, config: JobConfig, stack: Stack) -> None:
        """Tells all parts of the session which adapters there are, and where, on new stages."""
        self.config, self._stack, self._held_out = config, stack, None
        self.is_paged = stack.paged
        self.index |= stack.index
        self._snapshots = Snapshots(self.stages, self.executor.links)
        if not stack.stand_ins:
            return
        table = PlaceTable(self.stages[0].parts.leaves, len(stack.config.adapters))
        for name, place in stack.index.items():
            table.assign(place, self.tasks[name].spec, stack.number_of(self.tasks[name].chosen))
        self.executor.describe = table.describe
        compiles = self._free_places is not None or stack.paged
        self._writer = PlaceWriter(config, stack, self.executor, table, compiles=compiles)

    @classmethod
    def open(
        cls,
        config: JobConfig,
        prepared: Prepared,
        specs: Sequence[AdapterSpec] | None = None,
        later: JobConfig | None = None,
        base_files: BaseFiles | None = None,
    ) -> Self:
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
        reproducible: bool = False,
        row_targets: int = 0,
        on_progress: Callable[[str], None] = lambda text: None,
    ) -> Self:
        """Loads a base model and compiles all programs of a session with free places.

        Args:
            places: for adapters of any objective.
            batch: capacities and tile; `global_samples` is the adapters' own. Each slot takes the smallest capacity
                that holds it.
            train: `router_aux` is that of all adapters.
            directory: folder of a relative `base.model`.
            reproducible: split batches in one way, and let a microbatch hold one adapter, so that an adapter does not
                depend on its company by a single bit. Microbatches are less full. Otherwise results are equal to
                rounding, because sums over a microbatch depend on the rows at which an adapter begins.
            row_targets: targets at a position of clients' rows, for which programs compile now (0: there are no such
                rows yet).

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
        opened = open_base(config, None, place_specs(config, places.heads))
        tail = first_tail(batch, mesh, len(places.ranks), reproducible=reproducible)
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
        held_out = [self.assembler.padding(shape) for shape in self._sets.set_shapes] if rows else []
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
        self._bank.starts = {self.names[number]: arrays for number, arrays in weights.items()}
        names = [name for name in self.names if name in self.index]
        warm = {number: self._bank.starts[name] for number, name in enumerate(names) if name in self._bank.starts}
        lora = starting_weights(parts.leaves, [occupied[self.index[name]] for name in names], warm)
        for stage in self.executor.local_stages.values():
            stage.start(lora)
        self._unstarted = [self.index[name] for name in names if name not in self._bank.starts]

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

    @property
    def free_places(self) -> FreePlaces:
        """The free places, of a session that has them: their sizes, and the microbatches of what starts in them."""
        assert self._free_places is not None
        return self._free_places

    @property
    def places(self) -> Places:
        """How large adapters may be, in a session with free places."""
        return self.free_places.places

    def find_place(self, spec: AdapterSpec) -> int | None:
        """Returns a free place for an adapter; None if there is none now."""
        return self.free_places.find(spec, self.index.values())

    def run(
        self,
        events: Sequence[Event],
        names_of: Callable[[int], Sequence[str]],
        assemble: Callable[[int], Microbatch],
    ) -> list[Event]:
        """Runs slots until a pause is due; see `Loop.run`. The devices may still work when it returns."""
        with self.executor.blaming(None, None):
            return self.loop.run(events, names_of, assemble)

    def drain(self) -> None:
        """Waits for all slots that were issued, and reads the results of their steps."""
        self.loop.drain()

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

    def snapshot(self) -> Snapshot:
        """Copies the current trainable state. Collective over processes.

        Training may continue at once: arrays that it overwrites or donates are copied.
        """
        self.executor.wait_dispatched()
        with self.executor.blaming(None, None):
            progress = {name: (task.step, task.source.digest) for name, task in self.tasks.items()}
            return self._snapshots.take(dict(self.index), progress, self._bank.states())

    def load_states(self, states: Mapping[str, AdapterState]) -> None:
        """Continues from the states of a `snapshot`, on this or another layout.

        Raises:
            ValueError: they are not those of these adapters.
        """
        if self._stack.paged:
            self._bank.keep(states)
            self._vacate([name for name in self.index if name in states])
            return
        load_states(self.stages, states)
        self._unstarted = []

    def _vacate(self, names: Sequence[str]) -> None:
        """Leaves the places of some adapters without one. No work may be in flight."""
        vacated = frozenset(self.index.pop(name) for name in names)
        self._unstarted = [place for place in self._unstarted if place not in vacated]
        for stage in self.stages:
            stage.vacant |= vacated
        for stage in self.executor.local_stages.values():
            for name in names:
                stage.optimizers.pop(name, None)

    def close(self) -> None:
        """Ends the threads of the session."""
        if self._reading is not None:
            self._reading.cancel()
        if self._spans is not None:
            self._spans.stop()
        self._bank.close()
        if self._free_places is not None:  # the work of a run may wait for a process that is lost
            self.executor.close()

    @property
    def facts(self) -> Facts:
        """Figures of the session as it is now."""
        return Facts(self.config, self.executor)

    @property
    def _model(self) -> ModelConfig:
        return ModelConfig.from_hf(base_directory(self.config))


class FreePlaces:
    """Which places there are, and the shape of microbatches, which grows with what starts in them.

    Args:
        tail: what the first window must respect.
        targets: targets at a position of clients' rows, for which programs compile now.

    Attributes:
        shape: of the largest microbatches.
    """

    def __init__(self, config: JobConfig, places: Places, tail: Tail, targets: int):
        self._config, self.places, self.tail = config, places, tail
        self.shape = Shape(
            capacity_tokens=config.batch.largest,
            segments=num_segments(tail.most_segments),
            adapters=tail.most_adapters,
            targets=targets,
            balanced=config.train.router_aux > 0,
        )

    def find(self, spec: AdapterSpec, occupied: Collection[int]) -> int | None:
        """Returns a free place for an adapter; None if there is none now."""
        return self.places.find(place_kind(spec), spec.rank, occupied)

    @property
    def sets_shape(self) -> Shape:
        """Of microbatches that nothing trains on: routers have no loss in them."""
        return replace(self.shape, balanced=False)

    def make_room(self, task: Task, state: State | None) -> None:
        """Makes room for the samples of a task. It never shrinks, so that few shapes compile.

        Args:
            state: of a teacher's tokens.
        """
        sets = [(task.chosen, samples) for samples in task.source.sets.values()]
        table = table_shape(self.shape.segments - 1, sets)
        if table is not None and table.rows:
            table = table._replace(rows=self.shape.capacity_tokens)
        if table is not None:
            self.shape = self.shape.with_table(table, state)
        self.shape = replace(self.shape, targets=max(self.shape.targets, task.source.targets))

    def padding(self, assembler: Assembler) -> list[Microbatch]:
        """A microbatch of padding of each capacity."""
        return [assembler.padding(self.shape.of_capacity(size)) for size in self._config.batch.sizes]

    def microbatch(self, assembler: Assembler, slot: Slot, tasks: Mapping[str, Task]) -> Microbatch:
        """Assembles a slot of a window."""
        shape = self.shape.of_capacity(slot.capacity_tokens or self.shape.capacity_tokens)
        return assembler.slot(shape, slot.replicas, tasks)

    @property
    def set_shapes(self) -> list[Shape]:
        """Of what compiles at the start. A smaller microbatch compiles with the first evaluation that has it."""
        return [self.sets_shape]

    def pack(self, task: Task, samples: TokenizedSet) -> list[Replicas]:
        """Packs a set of a task into the largest microbatches, for a pass over all of it."""
        return refs_of_set(self._config, task.name, samples, self._config.batch.largest, self._most_samples(task))

    def pack_held_out(self, task: Task, samples: TokenizedSet) -> tuple[Shape, list[Replicas]]:
        """Packs the held-out set of a task."""
        config, most = self._config, self._most_samples(task)
        size = size_of_set(samples.lengths, config.batch, config.mesh, most).tokens
        return self.sets_shape.of_capacity(size), refs_of_set(config, task.name, samples, size, most)

    def _most_samples(self, task: Task) -> int:
        return (self.shape.segments - 1) // task.chosen.num_segments
