"""Microbatches of a live session, in one shape for all slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.assemble import (
    EACH_ONE,
    Microbatch,
    Piece,
    Weights,
    assemble,
    pieces_of_evaluation,
    pieces_of_slot,
    stacked,
)
from lorafusion_jax.engine.places import PlaceTable
from lorafusion_jax.engine.task import Task
from lorafusion_jax.planning.training_plan import plan_of_set
from scheduling import SampleRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Static sizes of a session's microbatches.

    Args:
        capacity_tokens, tile_tokens: as in a job file.
        segments: places for segments, from `num_segments`.
        adapters: places for adapters.
        replicas: number of replicas.
    """

    capacity_tokens: int
    tile_tokens: int
    segments: int
    adapters: int
    replicas: int


class Assembler:
    """Assembles the samples of tasks.

    Args:
        config: of the session.
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

    def held_out(self, task: Task) -> list[Microbatch]:
        """Returns the microbatches of a task's held-out samples."""
        samples = task.data.eval
        assert samples is not None
        plan, most = plan_of_set(self._config, task.name, samples.lengths), self.shape.segments - 1
        parts = [
            [part[at : at + most] for part in slot.replicas]
            for slot in plan.slots
            for at in range(0, max(map(len, slot.replicas)), most)
        ]
        sets = {task.name: samples}
        return [
            self._stacked([pieces_of_evaluation(part, sets, self._index, {task.name: EACH_ONE}) for part in replicas])
            for replicas in parts
        ]

    def _stacked(self, replicas: Sequence[Sequence[Piece]]) -> Microbatch:
        shape = self.shape
        rows = [
            assemble(
                pieces,
                capacity_tokens=shape.capacity_tokens,
                tile_tokens=shape.tile_tokens,
                max_segments=shape.segments,
                max_adapters=shape.adapters,
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
