"""The slots of a plan as microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.config.stack import stack_of
from lorafusion_jax.data.assemble import Microbatch, adapter_places, num_segments
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.data.sample_table import TableShape, table_shape
from lorafusion_jax.data.tokenized_set import TokenizedSet
from lorafusion_jax.session.assembler import MOST_ADAPTERS, TOKENS_OF_A_SEGMENT, Assembler, Shape, teacher_state
from lorafusion_jax.session.profile import Load
from lorafusion_jax.session.task import Task, tasks_of
from scheduling import Plan
from scheduling.simulate import slot_squares


class Batches:
    """Makes the microbatches of a plan; all slots of a capacity have one shape.

    Args:
        assembler, tasks: of the session.
    """

    def __init__(
        self, config: JobConfig, prepared: Prepared, plan: Plan, assembler: Assembler, tasks: Mapping[str, Task]
    ):
        self._assembler, self._tasks = assembler, tasks
        self._shapes: dict[int, Shape] = {}  # by capacity
        self.replace_plan(config, prepared, plan)

    @classmethod
    def of_job(cls, config: JobConfig, prepared: Prepared, plan: Plan, local_replicas: Sequence[int]) -> Batches:
        """Makes those of a job without a session."""
        stack = stack_of(config)
        # For times alone: adapters that take turns may be in one place.
        index = {adapter.name: n % len(stack.config.adapters) for n, adapter in enumerate(config.adapters)}
        assembler = Assembler(config.batch.tile_tokens, local_replicas, index | dict(stack.index))
        return cls(config, prepared, plan, assembler, tasks_of(config, prepared))

    def replace_plan(self, config: JobConfig, prepared: Prepared, plan: Plan) -> None:
        """Takes another plan. Microbatches keep their shape if the new samples fit into it."""
        self._plan = plan
        parts = _parts(plan)
        for size in plan.sizes:
            shape = _shape(config, prepared, size, parts.get(size, ()))
            if size in parts:
                shape = shape.union(_reserved_shape(config, size))
            self._shapes[size] = shape.union(self._shapes[size]) if size in self._shapes else shape

    def of(self, slot: int) -> Microbatch:
        """Returns the microbatch of a slot."""
        shape = self._shapes[self._plan.slot_capacities[slot]]
        return self._assembler.slot(shape, self._plan.slots[slot].replicas, self._tasks)

    def empty(self, slot: int = 0) -> list[Microbatch]:
        """A microbatch of padding of each capacity that is used from a slot on: it adds zero to every sum."""
        slots_and_sizes = zip(self._plan.slots[slot:], self._plan.slot_capacities[slot:], strict=True)
        sizes = {size for slot_of_plan, size in slots_and_sizes if not slot_of_plan.is_noop}
        return [self._assembler.padding(self._shapes[size]) for size in sorted(sizes)]

    def loads(self, most: int = 3) -> list[Load]:
        """Slots of each capacity whose samples differ most in Σ length²: the lightest, the heaviest, some between."""
        squares, sizes = slot_squares(self._plan), self._plan.slot_capacities
        loads: list[Load] = []
        for size in self._plan.sizes:
            numbers = [slot for slot, s in enumerate(self._plan.slots) if sizes[slot] == size and not s.is_noop]
            ranked = sorted(numbers, key=squares.__getitem__)
            sampled_slots = {ranked[round(rank)] for rank in np.linspace(0, len(ranked) - 1, most)} if ranked else set()
            loads += [Load(self.of(slot), size, squares[slot]) for slot in sorted(sampled_slots)]
            if not ranked:  # a capacity that no slot takes: one segment of padding
                loads.append(Load(self._assembler.padding(self._shapes[size]), size, size * size))
        return loads


def _shape(config: JobConfig, prepared: Prepared, capacity_tokens: int, parts: Sequence[Sequence[str]]) -> Shape:
    """Room for microbatches with these samples, given by their adapters."""
    together = max((len(set(part)) for part in parts), default=1)
    segments, table = places(config, {name: data.train for name, data in prepared.adapters.items()}, parts)
    return Shape(
        capacity_tokens=capacity_tokens,
        segments=segments,
        adapters=adapter_places(together, len(stack_of(config).config.adapters)),
        table=table,
        state=teacher_state(config),
        balanced=config.train.router_aux > 0,
    )


def _reserved_shape(config: JobConfig, capacity_tokens: int) -> Shape:
    """Room for microbatches with adapters that may join, so that their shape stays the same."""
    stack_size = len(stack_of(config).config.adapters)
    most = min(stack_size, MOST_ADAPTERS) if config.train.places else 1
    return Shape(
        capacity_tokens=capacity_tokens,
        segments=reserved_segments(config, capacity_tokens),
        adapters=adapter_places(most, stack_size),
    )


def reserved_segments(config: JobConfig, capacity_tokens: int) -> int:
    """Returns places for segments in a microbatch of a job that adapters join; 0 if it reserves none."""
    return num_segments(max(1, capacity_tokens // TOKENS_OF_A_SEGMENT)) if config.train.places else 0


def places(
    config: JobConfig, data: Mapping[str, TokenizedSet], parts: Sequence[Sequence[str]]
) -> tuple[int, TableShape | None]:
    """Returns the static sizes of a plan's microbatches.

    Args:
        data: samples of each adapter.
        parts: the adapter of each sample, for each microbatch.

    Returns:
        (places for segments, shape of the table of samples; None if no objective needs it)
    """
    objective_by_name = {adapter.name: adapter.objective.chosen for adapter in config.adapters}
    segments = {name: objective.num_segments for name, objective in objective_by_name.items()}
    most = max((sum(segments[name] for name in part) for part in parts), default=1)
    samples = max((sum(objective_by_name[name].of_samples for name in part) for part in parts), default=1)
    members = [(objective_by_name[name], tokenized) for name, tokenized in data.items() if name in objective_by_name]
    return num_segments(most), table_shape(max(samples, 1), members)


def _parts(plan: Plan) -> dict[int, list[list[str]]]:
    """The adapter of each sample, for each microbatch, by capacity."""
    parts: dict[int, list[list[str]]] = {}
    for slot, size in zip(plan.slots, plan.slot_capacities, strict=True):
        parts.setdefault(size, []).extend([ref.adapter for ref in part] for part in slot.replicas)
    return parts
