"""The places of a session in which adapters start and stop: their sizes, and the microbatches of all of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.config.places import Places, place_kind
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.assemble import Microbatch, num_segments
from lorafusion_jax.data.sample_table import State, table_shape
from lorafusion_jax.data.tokenized_set import TokenizedSet
from lorafusion_jax.planning.held_out import size_of_set
from lorafusion_jax.session.assembler import Assembler, Replicas, Shape, refs_of_set
from lorafusion_jax.session.task import Task
from scheduling import Slot
from scheduling.window import Tail


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

    def free(self, occupied: Collection[int]) -> dict[str, int]:
        """Free places by class."""
        classes = self.places.classes.items()
        return {name: sum(place not in occupied for place in members) for name, members in classes}

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
