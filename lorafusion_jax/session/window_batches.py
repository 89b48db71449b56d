"""Microbatches of a live session, in one shape for all slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.assemble import (
    EACH_ONE,
    Microbatch,
    Piece,
    Weights,
    assemble,
    piece_of,
    pieces_of_evaluation,
    pieces_of_slot,
    segment_weights,
    stacked,
)
from lorafusion_jax.data.references import sets_of
from lorafusion_jax.data.sample_table import State, TableShape, table_shape
from lorafusion_jax.data.tokenized_set import TokenizedSet
from lorafusion_jax.planning.training_plan import plan_of_set
from lorafusion_jax.session.place_table import PlaceTable
from lorafusion_jax.session.references import Replicas
from lorafusion_jax.session.task import Task
from scheduling import SampleRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Static sizes of a session's microbatches.

    Args:
        capacity_tokens, tile_tokens: as in a job file.
        segments: places for segments, from `num_segments`.
        adapters: places for adapters.
        replicas: number of replicas.
        table: shape of the table of samples (None: no objective needs it).
        state: of the tokens of a teacher.
    """

    capacity_tokens: int
    tile_tokens: int
    segments: int
    adapters: int
    replicas: int
    table: TableShape | None = None
    state: State | None = None


class Assembler:
    """Assembles the samples of tasks.

    Args:
        config: of the session.
        shape: of all microbatches; `add_objective` extends its table.
        index: name of a task → its place; the session changes it.
    """

    def __init__(self, config: JobConfig, shape: Shape, table: PlaceTable, index: Mapping[str, int]):
        self._config, self.shape, self._table, self._index = config, shape, table, index

    def slot(self, replicas: Sequence[Sequence[SampleRef]], tasks: Mapping[str, Task]) -> Microbatch:
        """Assembles a slot of a window."""
        names = {ref.adapter for part in replicas for ref in part}
        data = {name: tasks[name].data for name in names}
        weights = _BatchWeights(tasks)
        return self._stacked([pieces_of_slot(part, data, self._index, weights) for part in replicas])

    def empty(self) -> Microbatch:
        """Returns a microbatch of padding: it adds zero to every sum."""
        return self._stacked([[] for _ in range(self.shape.replicas)])

    def add_objective(self, task: Task, state: State | None) -> None:
        """Makes room in the table for the samples of a task. It never shrinks, so that few shapes compile."""
        sets = [(task.chosen, samples) for samples in sets_of(task.data).values()]
        needed = table_shape(self.shape.segments - 1, sets)
        if needed is None:
            return
        if needed.rows:
            needed = needed._replace(rows=self.shape.capacity_tokens)
        table = needed if self.shape.table is None else self.shape.table.union(needed)
        self.shape = replace(self.shape, table=table, state=self.shape.state or state)

    def held_out(self, task: Task) -> list[Microbatch]:
        """Returns the microbatches of a task's held-out samples."""
        samples = task.data.eval
        assert samples is not None
        weights = Weights(1.0, 1.0, segment_weights(samples)) if task.chosen.of_samples else EACH_ONE
        sets, of_task = {task.name: samples}, {task.name: weights}
        return [
            self._stacked([pieces_of_evaluation(part, sets, self._index, of_task) for part in replicas])
            for replicas in self.slots_of(task, samples)
        ]

    def slots_of(self, task: Task, samples: TokenizedSet) -> list[Replicas]:
        """Packs a set of a task alone, for a pass over all of it."""
        plan = plan_of_set(self._config, task.name, samples.lengths)
        most = (self.shape.segments - 1) // task.chosen.num_segments
        return [
            [part[at : at + most] for part in slot.replicas]
            for slot in plan.slots
            for at in range(0, max(map(len, slot.replicas)), most)
        ]

    def without_objective(self, samples: TokenizedSet, replicas: Replicas, place: int) -> Microbatch:
        """Assembles samples of a set under the weights of a place (-1: the base alone)."""
        return self._stacked(
            [[piece_of(samples, ref.sample, place, EACH_ONE, key=0) for ref in part] for part in replicas]
        )

    def _stacked(self, replicas: Sequence[Sequence[Piece]]) -> Microbatch:
        shape = self.shape
        rows = [
            assemble(
                pieces,
                capacity_tokens=shape.capacity_tokens,
                tile_tokens=shape.tile_tokens,
                max_segments=shape.segments,
                max_adapters=shape.adapters,
                table=shape.table,
                state=shape.state,
            )
            for pieces in replicas
        ]
        return stacked([row._replace(lora=self._table.rows(row.adapters)) for row in rows])


class _BatchWeights(dict[tuple[str, int], Weights]):
    """Looks up the weights of a (task, batch)."""

    def __init__(self, tasks: Mapping[str, Task]):
        super().__init__()
        self._tasks = tasks

    def __missing__(self, key: tuple[str, int]) -> Weights:
        return self._tasks[key[0]].weights[key[1]]
