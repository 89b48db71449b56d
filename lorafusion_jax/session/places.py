"""The places of a session: which adapter is in which, what fits, with which weights, and what it compiles.

A places · L layers · P places for the adapters of a microbatch
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.table import adapter_kind
from lorafusion_jax.config.references import ReferenceWeights
from lorafusion_jax.config.schema import JobConfig, OptimSettings
from lorafusion_jax.config.specs import adapter_specs
from lorafusion_jax.config.stack import Stack, place_name
from lorafusion_jax.data.assemble import AdapterRows, Microbatch, stacked
from lorafusion_jax.data.sample_table import State
from lorafusion_jax.errors import CheckpointError, RunError
from lorafusion_jax.modules.context import dropout_key
from lorafusion_jax.peft.folder import Arrays
from lorafusion_jax.session.adapter_state import AdapterState
from lorafusion_jax.session.assembler import teacher_state
from lorafusion_jax.session.distant_stage import DistantStage
from lorafusion_jax.session.dry_runs import compile_steps
from lorafusion_jax.session.executor import Executor
from lorafusion_jax.session.first_weights import starting_weights
from lorafusion_jax.session.inputs import layer_ratios
from lorafusion_jax.session.leaf_layout import LeafLayout
from lorafusion_jax.session.leaves import own_windows
from lorafusion_jax.session.references import read_reference_folder
from lorafusion_jax.session.stage import Stage
from lorafusion_jax.session.stage_state import PlaceArrays
from lorafusion_jax.session.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceWeights:
    """What a place gets.

    Args:
        leaves: for all layers.
        optimizer: its state by path, for all layers (None: the initial one).
        fresh: initial values may depend on the base.
    """

    spec: AdapterSpec
    leaves: Mapping[str, np.ndarray]
    optimizer: Mapping[str, np.ndarray] | None = None
    fresh: bool = False


class PlaceWriter:
    """Puts adapters into places, after all work issued so far.

    Args:
        stack: which adapter is where.
        table: what microbatches say of places; it is told of every adapter.
        compiles: whether steps of new shapes compile when their adapter is written, and not with its first step.
    """

    def __init__(self, config: JobConfig, stack: Stack, executor: Executor, table: PlaceTable, *, compiles: bool):
        self._config, self._executor, self._table, self._compiles = config, executor, table, compiles
        self._stages = tuple(executor.local_stages.values())
        self._distant = [stage for stage in executor.stages if isinstance(stage, DistantStage)]
        assert stack.places is not None
        self._places, self._objectives = stack.places, list(stack.objectives)
        self._compiled: set[tuple] = set()

    @property
    def _layout(self) -> LeafLayout:
        return self._stages[0].parts.leaves

    def write_zeros(self) -> None:
        """Makes the arrays of all places, with an adapter of zeros in each."""
        for stage in self._stages:
            stage.start(self._zeros())

    def compile_classes(self) -> None:
        """Compiles the steps of the largest adapters of each class of places."""
        zeros, specs = self._zeros(), adapter_specs(self._config)
        for place, *_ in self._places.classes.values():
            for stage in self._stages:
                stage.write(place, zeros[place_name(place)])
                stage.copy_state(place)
                stage.adapter(place)
                if adapter_kind(specs[place].kind).start is not None:
                    stage.start_from_base(place)
            self._compiled.add(_steps_of(specs[place], self._config.adapters[place].optim))
        # The arrays were only for compiling: a vacant place has no optimizer state.
        for stage in self._stages:
            stage.optimizers.clear()

    def check(self, place: int, task: Task, most_segments: int) -> None:
        """Raises `session.place` or `session.segments` if a task does not fit into a place."""
        why = self._places.refuses(task.spec)
        if why or task.spec.rank > self._places.ranks[place]:
            raise RunError(
                "session.place",
                f"{task.name} does not fit into place {place}.",
                why=why or f"rank {task.spec.rank} is above {self._places.ranks[place]}",
            )
        if task.chosen.num_segments > most_segments:
            raise RunError(
                "session.segments",
                f"a sample of {task.name} has {task.chosen.num_segments} segments.",
                why=f"microbatches of the session have places for {most_segments}",
                fix="a smaller group, or a session of a larger batch.capacity_tokens",
            )

    def first_weights(self, task: Task, warm_start: Arrays | None = None) -> PlaceWeights:
        """Returns initial weights, or those of a warm start."""
        starts = {} if warm_start is None else {0: warm_start}
        leaves = starting_weights(self._layout, [task.spec], starts)[task.name]
        return PlaceWeights(spec=task.spec, leaves=leaves, fresh=warm_start is None)

    def reference_weights(
        self, place: int, task: Task, reference: ReferenceWeights | None, first: PlaceWeights
    ) -> PlaceWeights | None:
        """Returns the weights that a place holds while a reference is computed; None: those that train."""
        if reference is None or reference.kind == "base":
            return None
        if reference.kind == "adapter":
            return first
        described, arrays = read_reference_folder(task.config, reference)
        spec = replace(described, name=task.name)
        if why := self._places.refuses(spec) or (spec.rank > self._places.ranks[place] and f"rank {spec.rank}"):
            raise RunError(
                "session.reference", f"the reference of {task.name} does not fit into place {place}.", why=why
            )
        return PlaceWeights(spec=spec, leaves=starting_weights(self._layout, [spec], {0: arrays})[task.name])

    def number_objective(self, task: Task) -> int:
        """Returns the number of a task's objective in the session, which learns it if it is new."""
        objective = task.chosen
        numbers = (number for number, other in enumerate(self._objectives) if objective.same_as(other))
        if (number := next(numbers, None)) is not None:
            return number
        self._objectives.append(objective)
        objectives = tuple(self._objectives)
        # Those of other processes, too: they say how many metrics those processes will send.
        for stage in self._distant:
            stage.replace_objectives(objectives)
        self._executor.read_all(lambda stage: stage.replace_objectives(objectives))
        return len(objectives) - 1

    def teacher_state(self, task: Task) -> State | None:
        """Returns the state of a teacher's tokens, if the task's objective compares distributions."""
        return teacher_state(self._config.model_copy(update={"adapters": (task.adapter,)}))

    def send(self, task: Task, weights: PlaceWeights) -> list[PlaceArrays]:
        """Puts the arrays of an adapter onto the devices of all stages, for a later `write`. Any thread may call it."""
        largest = len(self._places.ranks) - 1  # ranks ascend
        arrays = (task.adapter, weights.spec, weights.leaves, weights.optimizer)
        # One adapter's at a time: microbatches go the same way.
        return jax.block_until_ready([stage.place_arrays(largest, *arrays) for stage in self._stages])

    def write(
        self, place: int, task: Task, weights: PlaceWeights, objective: int, sent: Sequence[PlaceArrays] | None = None
    ) -> None:
        """Writes weights and optimizer state into a place.

        Args:
            objective: its number in the session.
            sent: what `send` returned of it.
        """
        # Microbatches say who is in the place from now on. Those in flight were made before, for its last adapter, and
        # each stage writes on its own thread, after their passes.
        self._table.assign(place, weights.spec, objective)
        for stage in self._distant:
            stage.assign(place, task.adapter, weights.spec)
        for future in self._executor.read(lambda stage: self._write_stage(stage, place, task, weights, sent)):
            with self._executor.blaming(None, None, [task.name]):
                future.result()

    def _write_stage(
        self, stage: Stage, place: int, task: Task, weights: PlaceWeights, sent: Sequence[PlaceArrays] | None
    ) -> None:
        stage.assign(place, task.adapter, weights.spec)
        if sent is None:
            stage.write(place, weights.leaves, weights.optimizer)
        else:
            stage.write_arrays(place, sent[self._stages.index(stage)])
        if weights.fresh and adapter_kind(weights.spec.kind).start is not None:
            stage.start_from_base(place)
        steps = _steps_of(weights.spec, task.adapter.optim)
        if self._compiles and steps not in self._compiled:
            compile_steps(stage, len(self._stages), place)
            stage.copy_state(place)
            stage.adapter(place)
            # By the last stage alone: each has programs of its own to compile.
            if stage is self._stages[-1]:
                self._compiled.add(steps)

    def _zeros(self) -> dict[str, dict[str, np.ndarray]]:
        shapes = self._layout.own_shapes()
        return {
            name: {leaf: np.zeros(shape, np.float32) for leaf, shape in leaf_shapes.items()}
            for name, leaf_shapes in shapes.items()
        }


def _steps_of(spec: AdapterSpec, optim: OptimSettings) -> tuple:
    """What decides the programs of an adapter's steps: adapters that agree in it share them."""
    return spec.kind, spec.rank, spec.targets, optim.name, optim.clip > 0, *optim.lr_ratios


def check_state(task: Task, state: AdapterState) -> None:
    """Raises `state.data` if a state was trained on other data than the task's."""
    if state.data != task.source.digest:
        raise CheckpointError(
            "state.data",
            f"the state of {task.name} was trained on other data, or in another order.",
            fix="restore the data, or start the adapter from the beginning",
        )


class PlaceTable:
    """What microbatches say about the adapters in the places. On the host; changed between microbatches."""

    def __init__(self, layout: LeafLayout, count: int):
        self._model, self._columns = layout.model, layout.columns
        self._windows = np.zeros((len(self._columns), 2, count), np.int32)
        self._rank = np.zeros(count, np.int32)
        self._scale, self._rate = np.zeros(count, np.float32), np.zeros(count, np.float32)
        self._key = np.zeros(count, np.uint32)
        self._ratio = np.ones((len(self._model.targets), self._model.num_layers, count), np.float32)
        self._objective = np.full(count, -1, np.int32)

    def assign(self, place: int, spec: AdapterSpec, objective: int) -> None:
        """Describes the adapter of a place; `objective` is the number of its objective in the session."""
        self._windows[..., place] = own_windows(self._columns, place, spec)
        self._rank[place], self._scale[place] = spec.columns, spec.scale
        self._rate[place], self._key[place] = spec.dropout, dropout_key(spec.seed)
        self._ratio[..., place], self._objective[place] = layer_ratios(self._model, spec), objective

    def describe(self, rows: Microbatch) -> Microbatch:
        """Adds to the microbatches of all replicas what they say of their adapters."""
        return rows._replace(lora=stacked([self.rows(adapters) for adapters in rows.adapters]))

    def rows(self, adapters: np.ndarray) -> AdapterRows:
        """Returns the rows of a microbatch's adapters [P], -1 in unused places."""
        # Unused places read the values of place 0, but their windows have no columns.
        number = np.maximum(adapters, 0)
        return AdapterRows(
            np.where(adapters >= 0, self._windows[:, :, number], 0).astype(np.int32),
            self._rank[number],
            self._scale[number],
            self._rate[number],
            self._key[number],
            self._ratio[..., number],
            # A copy, as indexing makes of the others: `assign` may change the table while this microbatch waits.
            self._objective.copy(),
        )
