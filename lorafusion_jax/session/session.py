"""A session: a base model on the devices of a job, its compiled programs, and a place for each adapter.

Only the session and its parts use devices. A run manages the folder, and a loop executes the plan. Adapters may join
while others train. An adapter that has ended keeps its place, so that it can continue later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import jax
import numpy as np

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.table import adapter_kind
from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.checkpoint.peft import Arrays
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.config.specs import adapter_specs
from lorafusion_jax.config.stack import stack_of, without_places
from lorafusion_jax.data.assemble import Microbatch
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.data.references import SetReferences
from lorafusion_jax.layout.layer import RematPolicy
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.objective.protocol import Chosen
from lorafusion_jax.report.format import count
from lorafusion_jax.session.ahead import Ahead, requests_of
from lorafusion_jax.session.base import check_tables, memory_warning, open_base, stages_for
from lorafusion_jax.session.base_cache import BaseFiles
from lorafusion_jax.session.distant_stage import AnyStage, local_stages
from lorafusion_jax.session.evaluation import Evaluation, Evaluator
from lorafusion_jax.session.executor import Executor
from lorafusion_jax.session.first_weights import starting_weights
from lorafusion_jax.session.growth import grow_stages
from lorafusion_jax.session.leaves import HEAD_ROWS, Leaves
from lorafusion_jax.session.place_table import PlaceTable
from lorafusion_jax.session.processes import barrier, is_alone
from lorafusion_jax.session.reading import BASE, Reading, Times
from lorafusion_jax.session.references import SetPass, finish, reference_passes, run_passes
from lorafusion_jax.session.release import release_unused
from lorafusion_jax.session.snapshot import Snapshot, Snapshots
from lorafusion_jax.session.spans import Spans
from lorafusion_jax.session.stage import Stage
from lorafusion_jax.session.state import abstract_state, adapter_arrays, host_leaves, scatter
from pallas_kernels import config_store

# jax's caches keep traces of all shapes, 3 MB for every addition. They belong to the whole process, so they are cleared
# seldom.
ADDITIONS_IN_CACHES = 16


class Session:
    """Adapters on the stages of a pipeline. Call `open`, then `start` or `load_state`, then `finish_loading`.

    `add` adds adapters, and `read` reads one. Adapters that are not in a microbatch do not change.

    Attributes:
        executor: runs the events of a plan.
        spans: records when they ran.
    """

    def __init__(
        self,
        config: JobConfig,
        prepared: Prepared,
        stages: Sequence[AnyStage],
        reading: Reading,
    ):
        self._reading, self.spans, self._additions = reading, Spans(len(stages)), 0
        self._unstarted: list[int] = []  # positions of adapters whose initial values may depend on the base
        self.executor = Executor(stages, (), self.spans)
        self._set_adapters(config, prepared, stages)
        self._snapshots = Snapshots(self._stages, self.executor.links)

    def _set_adapters(self, config: JobConfig, prepared: Prepared, stages: Sequence[AnyStage]) -> None:
        """Tells all parts of the session which adapters there are, and where."""
        self._config, self._stages, self._stack = config, tuple(stages), stack_of(config)
        self.executor.number_adapters(self._stack.index)
        if self._stack.stand_ins:
            table = PlaceTable(stages[0].parts.leaves, len(self._stack.config.adapters))
            for spec in adapter_specs(config):
                chosen = config.adapter(spec.name).objective.chosen
                table.assign(self._stack.index[spec.name], spec, self._stack.number_of(chosen))
            self.executor.describe = table.describe
        self._evaluator = Evaluator(config, prepared, self.executor)

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
        return cls(config, prepared, base.stages, Reading(base))

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
        reading = f"reading {count(self._reading.num_bytes)}B"

        total = 0

        def report(left: Sequence[str]) -> None:
            nonlocal total
            total = max(total, len(left))
            compiling = [f"compiling {total - len(left) + 1} of {total}: {', '.join(left)}"] if left else []
            running = [*compiling, *([] if self._reading.done else [reading])]
            if running:
                on_progress("  ·  ".join(running))

        ahead, held_out = Ahead() if ahead is None else ahead, self._evaluator.empty()
        ahead.compile(lambda: requests_of(self._config, self.executor.local_stages, rows, held_out))
        try:
            times = self.executor.warm_up(rows, held_out, report, ahead) if rows else {}
        finally:  # also where a stage fails: a model that cannot be read is worse
            self._reading.finish()
        assert self._reading.times is not None
        self._start_from_base()
        return {BASE: self._reading.times, **times, **ahead.times}

    @property
    def reading(self) -> Reading:
        """The base model: where it comes from, and whether its cache is written."""
        return self._reading

    def start(self, weights: Mapping[int, Arrays]) -> None:
        """Starts every adapter from its initial weights, or from those given here.

        Args:
            weights: weights of some adapters by their number in the job, from `read_warm_starts`.
        """
        parts, occupied = self._stages[0].parts, dict(self._stages[0].occupied)
        specs = [occupied[self._stack.index[name]] for name in self.names]
        lora = starting_weights(parts.leaves, specs, weights)
        for stage in self.executor.local_stages.values():
            stage.start(lora)
        self._unstarted = [self._stack.index[name] for number, name in enumerate(self.names) if number not in weights]

    def _start_from_base(self) -> None:
        """Sets the initial values that depend on the base, which is on the devices now."""
        specs = dict(self._stages[0].occupied)
        for index in self._unstarted:
            spec = specs[index]
            if _starts_from_base(spec):
                for stage in self.executor.local_stages.values():
                    stage.start_from_base(index)
        self._unstarted = []

    @property
    def stages(self) -> tuple[AnyStage, ...]:
        """The stages, with the current weights; others after `add`."""
        return self._stages

    @property
    def names(self) -> list[str]:
        """Names of the adapters, in the order of the job."""
        return [adapter.name for adapter in self._config.adapters]

    def add(self, config: JobConfig, prepared: Prepared, weights: Mapping[int, Arrays]) -> None:
        """Adds the last adapters of a job and starts them. Collective over processes.

        The state of the others stays bitwise equal. No work may be in flight. Adapters in free places compile nothing
        that is known of their shapes. For others every program compiles again, because the arrays of all adapters
        change their shapes.

        Args:
            config, prepared: of all adapters, the present ones first.
            weights: weights of new adapters by their number in the job, as in `start`.
        """
        assert [adapter.name for adapter in config.adapters][: len(self.names)] == self.names
        self.executor.wait_dispatched()
        before, after, grows = self._stack, stack_of(config), self.needs_room(config)
        starts = {after.index[config.adapters[number].name]: arrays for number, arrays in weights.items()}
        new = {name: index for name, index in after.index.items() if name not in before.index}
        if grows:
            stages = grow_stages(self._stages, self.executor.links, config, starts)
            self.executor.replace_stages(stages)
            self._set_adapters(config, prepared, stages)
            self._snapshots = Snapshots(self._stages, self.executor.links)
        else:
            self._set_adapters(config, prepared, self._stages)
            self._fill_places(new, starts, known=before.objectives)
        self._unstarted = [index for index in new.values() if index not in starts]
        self._start_from_base()
        if grows:
            self._additions += 1
            release_unused(caches=self._additions % ADDITIONS_IN_CACHES == 0)

    def needs_room(self, config: JobConfig) -> bool:
        """Whether adapters of a job do not all fit into places, so that adding them compiles every program."""
        return len(stack_of(config).config.adapters) > len(self._stack.config.adapters)

    def _fill_places(self, new: Mapping[str, int], starts: Mapping[int, Arrays], known: Sequence[Chosen]) -> None:
        if len(self._stack.objectives) > len(known):
            for stage in self._stages:
                stage.replace_objectives(self._stack.objectives)
        for spec in adapter_specs(self._config):
            if (index := new.get(spec.name)) is not None:
                warm_starts = {0: starts[index]} if index in starts else {}
                weights = starting_weights(self._stages[0].parts.leaves, [spec], warm_starts)[spec.name]
                for stage in self._stages:
                    stage.assign(index, self._config.adapter(spec.name), spec)
                for stage in self.executor.local_stages.values():
                    stage.write(index, weights)

    def lacks_memory(self, config: JobConfig) -> str | None:
        """Returns why the devices cannot hold the adapters of a job; None if they can, or if it is unknown."""
        return memory_warning(config, self._model, self.remat)

    def compile_reads(self) -> None:
        """Compiles `read` and `snapshot`, so that they do not delay the run: 0.3 to 0.7 s on a CPU."""
        with self.executor.blaming(None, None):
            self._snapshots.compile()
            for part in self.executor.read(
                lambda stage: [stage.adapter(adapter) for adapter in stage.one_of_every_kind()]
            ):
                part.result()

    def read(self, name: str) -> Callable[[], dict[str, np.ndarray]]:
        """Reads an adapter's weights after all work issued so far. Calling the result waits for them."""
        index = self._stack.index[name]
        parts = self.executor.read(lambda stage: stage.adapter(index))
        if jax.process_count() == 1:
            return partial(_collect, parts)
        # May be collective over processes, so it cannot run in the background.
        local = zip(self.executor.local_stages, parts, strict=True)
        held = {number: host_leaves(part.result()) for number, part in local}
        weights = adapter_arrays(self.executor.links.share(held))
        return lambda: weights

    def evaluate(self, name: str) -> Evaluation:
        """Evaluates an adapter on its held-out data."""
        return self._evaluator(name)

    def compute_references(
        self, prepared: Prepared, names: Sequence[str], on_progress: Callable[[str], None] = lambda text: None
    ) -> dict[str, SetReferences]:
        """Computes what the references of these adapters say of their samples. Waits; collective over processes.

        The adapters, and those that are their references, must be at their first step.
        """
        self.executor.wait_dispatched()
        with self.executor.blaming(None, None):
            passes = reference_passes(self._config, prepared, self._stages, names, self.executor.describe)
            return finish(run_passes(passes, self.executor, on_progress))

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
        new = without_places(new)
        stages = stages_for(self._stages, new)
        local = list(local_stages(stages).values())
        parts, specs = local[0].parts, [spec for _, spec in local[0].occupied]
        lora = starting_weights(parts.leaves, specs, weights)
        for stage in local:
            stage.take_weights(lora)
            for index, spec in enumerate(specs):
                if index not in weights and _starts_from_base(spec):
                    stage.start_from_base(index)
        passes = list(reference_passes(new, prepared, stages, names))
        for pass_of_set in passes if is_alone() else ():
            pass_of_set.compile()
        return passes

    def take_data(self, prepared: Prepared) -> None:
        """Replaces the data of the adapters, whose samples now have references."""
        self._evaluator = Evaluator(self._config, prepared, self.executor)

    def snapshot(self) -> Snapshot:
        """Copies the current trainable state. Collective over processes.

        Training may continue at once: arrays that it overwrites or donates are copied.
        """
        self.executor.wait_dispatched()
        with self.executor.blaming(None, None):
            return self._snapshots.take()

    def load_state(self, restore: Callable[[Any], dict[str, Any]], devices: int) -> None:
        """Continues from the state of a `snapshot`, on this or another layout.

        Args:
            restore: reads arrays of the given shapes and dtypes.
            devices: number of devices of a stage when they were saved.
        """
        scatter(self._stages, restore(abstract_state(self._stages, self.executor.links, devices)))
        self._unstarted = []

    def join_spans(self) -> None:
        """Adds what other processes have recorded of their stages. Collective over processes, once training has ended.

        Clocks are compared by when all processes are here, up to milliseconds.
        """
        links = self.executor.links
        if not links.apart:
            return
        self.spans.stop()
        barrier()
        mine = {"spans": np.frombuffer(self.spans.recorded(), np.uint8)}
        empty = {"spans": np.empty(0, np.uint8)}
        first, *others = links.local
        trees = links.share({first: mine, **dict.fromkeys(others, empty)})
        for stage, tree in enumerate(trees):
            if stage not in links.local and tree["spans"].size:
                self.spans.take(tree["spans"].tobytes())

    def close(self) -> None:
        """Ends the threads that read the base and watch the devices."""
        self._reading.cancel()
        self.spans.stop()

    @property
    def state_bytes(self) -> int:
        """Size of the state of a `snapshot`, with the copies of all replicas. Collective over processes."""
        return sum(self._by_stage(lambda stage: sum(leaf.nbytes for leaf in jax.tree.leaves(stage.trainable_arrays()))))

    def _by_stage[T](self, read: Callable[[Stage], T]) -> list[T]:
        local = self.executor.local_stages
        return self.executor.links.by_stage({index: read(stage) for index, stage in local.items()})

    @property
    def num_trainable(self) -> int:
        """Number of parameters of the adapters."""
        parts = self._stages[0].parts
        shapes = parts.leaves.own_shapes(self._stages[0].occupied).values()
        return sum(
            math.prod(shape)
            for leaves in shapes
            for name, shape in leaves.items()
            if parts.leaves.columns[name].leaf.trainable and not (name == HEAD_ROWS and parts.model.tie_embeddings)
        )

    @property
    def stored(self) -> dict[str, int]:
        """Elements stored on the devices of one replica: weights, gradients, moments. Collective over processes."""
        counts = self._by_stage(lambda stage: stage.count_elements())
        return {kind: sum(of_stage[kind] for of_stage in counts) for kind in counts[0]}

    @property
    def num_frozen(self) -> int:
        return self._model.num_parameters  # not a sum over stages: a tied table is on two of them

    @property
    def layers(self) -> list[float]:
        """Number of layers of each stage."""
        return [stage.extent.count for stage in self._stages]

    @property
    def remat(self) -> RematPolicy:
        return self._stages[0].remat

    @property
    def memory_warning(self) -> str | None:
        return self.lacks_memory(self._config)

    @property
    def device(self) -> dict[str, str]:
        """Kind, platform and tuning table for run.json."""
        device = jax.devices()[0]
        table = config_store.used_digest(device.device_kind)
        return {"device": device.device_kind, "platform": device.platform, "tuning_table": table}

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory in use on a device; None if the backend does not report it (CPU)."""
        return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")

    @property
    def _model(self) -> ModelConfig:
        return ModelConfig.from_hf(base_directory(self._config))


def _collect(parts: Sequence[Future[Leaves]]) -> dict[str, np.ndarray]:
    return adapter_arrays([part.result() for part in parts])


def _starts_from_base(spec: AdapterSpec) -> bool:
    """Whether an adapter's initial values depend on the base."""
    return adapter_kind(spec.kind).start is not None or spec.tokens is not None
