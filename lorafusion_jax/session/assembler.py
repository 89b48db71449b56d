"""Assembles samples into microbatches: of plans, of windows, of held-out sets and for references.

All microbatches of a capacity have one shape. Samples are packed elsewhere: here it is known which go together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.config.schema import BatchSettings, JobConfig, MeshSettings
from lorafusion_jax.config.stack import stack_of
from lorafusion_jax.data.assemble import (
    EACH_ONE,
    Microbatch,
    Piece,
    Weights,
    adapter_places,
    assemble,
    num_segments,
    piece_of,
    segment_weights,
    stacked,
)
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.data.sample_table import State, TableShape, table_shape
from lorafusion_jax.data.tokenized_set import TokenizedSet
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.objective.protocol import DIVERGENCE, Chosen
from lorafusion_jax.planning.held_out import pack_set
from lorafusion_jax.session.task import Task, tasks_of
from scheduling import Plan, SampleRef
from scheduling.simulate import padding_segments, slot_squares
from scheduling.types import Limits
from scheduling.window import Tail

type Replicas = Sequence[Sequence[SampleRef]]  # samples of a microbatch, by replica

TOKENS_OF_A_SEGMENT = 256  # where adapters join, a microbatch has a place for a segment for as many tokens
MOST_ADAPTERS = 8  # in a microbatch, where adapters join: its cost grows with this number


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Static sizes of microbatches.

    Args:
        segments: places for segments, from `num_segments`.
        adapters: places for adapters, from `adapter_places`.
        table: shape of the table of samples (None: no objective needs it).
        state: of the tokens of a teacher.
        balanced: whether the routers have a loss.
        targets: of each position of clients' rows (0: there are no such rows).
    """

    capacity_tokens: int
    segments: int
    adapters: int
    table: TableShape | None = None
    state: State | None = None
    balanced: bool = False
    targets: int = 0

    def union(self, other: Shape) -> Shape:
        """Room for the microbatches of both, of the same capacity."""
        return replace(
            self.with_table(other.table, other.state),
            segments=max(self.segments, other.segments),
            adapters=max(self.adapters, other.adapters),
            targets=max(self.targets, other.targets),
        )

    def of_capacity(self, tokens: int) -> Shape:
        """The shape of microbatches of another capacity."""
        table = self.table._replace(rows=tokens) if self.table is not None and self.table.rows else self.table
        return replace(self, capacity_tokens=tokens, table=table)

    def with_table(self, table: TableShape | None, state: State | None) -> Shape:
        """Room for the samples of another table."""
        tables = [shape for shape in (self.table, table) if shape is not None]
        joined = tables[0].union(tables[-1]) if tables else None
        return replace(self, table=joined, state=self.state or state)


def first_tail(batch: BatchSettings, mesh: MeshSettings, num_places: int, *, reproducible: bool = False) -> Tail:
    """What the first window of a session must respect: its limits."""
    return Tail(
        limits=Limits(
            capacity_tokens=batch.largest,
            smaller=batch.sizes[:-1],
            num_stages=mesh.stages,
            data_parallel=mesh.replicas,
            tile_tokens=batch.tile_tokens,
        ),
        most_segments=num_segments(max(1, batch.largest // TOKENS_OF_A_SEGMENT)) - 1,
        most_adapters=1 if reproducible else min(num_places, MOST_ADAPTERS),
        reproducible=reproducible,
    )


class Assembler:
    """Makes microbatches, [replicas of this process, ...].

    Args:
        tile_tokens: rows of a tile.
        local_replicas: replicas whose microbatches this process provides.
        index: name of an adapter → its place; its owner may change it between slots.
    """

    def __init__(self, tile_tokens: int, local_replicas: Sequence[int], index: Mapping[str, int]):
        self._tile_tokens, self._replicas, self._index = tile_tokens, tuple(local_replicas), index

    def slot(self, shape: Shape, replicas: Replicas, tasks: Mapping[str, Task]) -> Microbatch:
        """Assembles a slot of training."""
        return self._stacked(shape, [self.pieces(part, tasks) for part in self._local(replicas)])

    def pieces(self, part: Sequence[SampleRef], tasks: Mapping[str, Task]) -> list[Piece]:
        """Looks up the samples of a microbatch, which are grouped by adapter."""
        groups = [(name, list(samples)) for name, samples in groupby(part, key=lambda ref: ref.adapter)]
        return [piece for name, samples in groups for piece in tasks[name].source.pieces(samples, self._index[name])]

    def padding(self, shape: Shape) -> Microbatch:
        """Returns a microbatch of padding: it adds zero to every sum."""
        return self._stacked(shape, [[] for _ in self._replicas])

    def held_out(
        self, shape: Shape, slots: Iterable[Replicas], name: str, samples: TokenizedSet, chosen: Chosen
    ) -> Iterator[Microbatch]:
        """Yields the held-out samples of an adapter."""
        weights = Weights(1.0, 1.0, segment_weights(samples)) if chosen.of_samples else EACH_ONE
        for replicas in slots:
            yield self._of_set(shape, replicas, samples, self._index[name], weights)

    def without_objective(self, shape: Shape, replicas: Replicas, samples: TokenizedSet, place: int) -> Microbatch:
        """Assembles samples of a set under the weights of a place (-1: the base alone)."""
        return self._of_set(shape, replicas, samples, place, EACH_ONE)

    def _of_set(
        self, shape: Shape, replicas: Replicas, samples: TokenizedSet, place: int, weights: Weights
    ) -> Microbatch:
        parts = self._local(replicas)
        return self._stacked(
            shape, [[piece_of(samples, ref.sample, place, weights, key=0) for ref in part] for part in parts]
        )

    def _local(self, replicas: Replicas) -> list[Sequence[SampleRef]]:
        return [replicas[replica] for replica in self._replicas]

    def _stacked(self, shape: Shape, replicas: Sequence[Sequence[Piece]]) -> Microbatch:
        return stacked(
            [
                assemble(
                    pieces,
                    capacity_tokens=shape.capacity_tokens,
                    tile_tokens=self._tile_tokens,
                    max_segments=shape.segments,
                    max_adapters=shape.adapters,
                    table=shape.table,
                    state=shape.state,
                    balanced=shape.balanced,
                    targets=shape.targets,
                )
                for pieces in replicas
            ]
        )


def refs_of_set(
    config: JobConfig, name: str, samples: TokenizedSet, capacity_tokens: int, most_samples: int | None = None
) -> list[Replicas]:
    """Packs a set of an adapter alone, for a pass over all of it.

    Args:
        most_samples: in a microbatch (None: as many as fit).
    """
    packing = pack_set(samples.lengths, capacity_tokens, config.batch, config.mesh)
    slots = [[[SampleRef(name, 0, 0, sample) for sample in part] for part in replicas] for replicas in packing]
    if most_samples is None:
        return [*slots]
    return [
        [part[at : at + most_samples] for part in replicas]
        for replicas in slots
        for at in range(0, max(map(len, replicas)), most_samples)
    ]


def mask_adapters(batch: Microbatch, adapters: Collection[int]) -> Microbatch:
    """Turns the rows of some adapters into padding, in place. Other rows do not change.

    Args:
        adapters: places among the stacked adapters.
    """
    if not adapters:
        return batch
    is_masked = np.isin(batch.row_adapter, list(adapters))
    samples = batch.samples
    if samples is not None:
        samples = samples._replace(adapter=np.where(np.isin(samples.adapter, list(adapters)), -1, samples.adapter))
    return batch._replace(
        samples=samples,
        tokens=np.where(is_masked, 0, batch.tokens),
        targets=np.where(is_masked, 0, batch.targets),
        weights=np.where(is_masked, np.float32(0), batch.weights),
        row_adapter=np.where(is_masked, -1, batch.row_adapter),
        tile_adapter=np.where(np.isin(batch.tile_adapter, list(adapters)), -1, batch.tile_adapter),
    )


def teacher_state(config: JobConfig) -> State | None:
    """Returns width and dtype of the states that objectives compare with; None if none does."""
    if not any(DIVERGENCE in adapter.objective.chosen.needs for adapter in config.adapters):
        return None
    model = ModelConfig.from_hf(base_directory(config))
    return State(model.hidden_size, np.dtype(jnp.dtype(config.base.dtype)))


class Load(NamedTuple):
    """A microbatch to time, with the sizes that determine its cost."""

    rows: Microbatch
    tokens: int
    squares: int  # Σ length² over its segments, padding included


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
        """Takes another plan. Microbatches keep their shape if the new samples fit into it.

        Where adapters may end early, a later plan may put samples that are in the largest microbatches into others.
        """
        self._plan, self._may_change = plan, config.ends_early
        parts = _parts(plan)
        for size in plan.sizes:
            shape = _shape(config, prepared, size, parts.get(size, ()))
            if size in parts:
                shape = shape.union(_reserved_shape(config, size))
            self._shapes[size] = shape.union(self._shapes[size]) if size in self._shapes else shape
        if self._may_change and parts:
            largest = self._shapes[max(parts)]
            self._shapes |= {size: shape.union(largest.of_capacity(size)) for size, shape in self._shapes.items()}

    def of(self, slot: int) -> Microbatch:
        """Returns the microbatch of a slot."""
        shape = self._shapes[self._plan.slot_capacities[slot]]
        return self._assembler.slot(shape, self._plan.slots[slot].replicas, self._tasks)

    def empty(self, slot: int = 0) -> list[Microbatch]:
        """A microbatch of padding of each capacity that may be used from a slot on: it adds zero to every sum."""
        slots_and_sizes = zip(self._plan.slots[slot:], self._plan.slot_capacities[slot:], strict=True)
        sizes = {size for slot_of_plan, size in slots_and_sizes if not slot_of_plan.is_noop}
        if sizes and self._may_change:
            sizes = set(self._plan.sizes)
        return [self._assembler.padding(self._shapes[size]) for size in sorted(sizes)]

    def loads(self, per_capacity: int = 3) -> list[Load]:
        """Slots of each capacity whose samples differ most in Σ length²: the lightest, the heaviest, some between."""
        squares, sizes = slot_squares(self._plan), self._plan.slot_capacities
        loads: list[Load] = []
        for size in self._plan.sizes:
            numbers = [slot for slot, s in enumerate(self._plan.slots) if sizes[slot] == size and not s.is_noop]
            ranked = sorted(numbers, key=squares.__getitem__)
            sampled_slots = (
                {ranked[round(rank)] for rank in np.linspace(0, len(ranked) - 1, per_capacity)} if ranked else set()
            )
            loads += [Load(self.of(slot), size, squares[slot]) for slot in sorted(sampled_slots)]
            if not ranked:  # a capacity that no slot takes: padding alone
                squares_of_padding = sum(length**2 for length in padding_segments(size, size))
                loads.append(Load(self._assembler.padding(self._shapes[size]), size, squares_of_padding))
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
    num_adapters = min(stack_size, MOST_ADAPTERS) if config.train.places else 1
    return Shape(
        capacity_tokens=capacity_tokens,
        segments=reserved_segments(config, capacity_tokens),
        adapters=adapter_places(num_adapters, stack_size),
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
    most_segments = max((sum(segments[name] for name in part) for part in parts), default=1)
    samples = max((sum(objective_by_name[name].of_samples for name in part) for part in parts), default=1)
    members = [(objective_by_name[name], tokenized) for name, tokenized in data.items() if name in objective_by_name]
    return num_segments(most_segments), table_shape(max(samples, 1), members)


def _parts(plan: Plan) -> dict[int, list[list[str]]]:
    """The adapter of each sample, for each microbatch, by capacity."""
    parts: dict[int, list[list[str]]] = {}
    for slot, size in zip(plan.slots, plan.slot_capacities, strict=True):
        parts.setdefault(size, []).extend([ref.adapter for ref in part] for part in slot.replicas)
    return parts
