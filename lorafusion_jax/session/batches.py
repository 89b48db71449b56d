"""Assembles the slots of a plan into microbatches for the replicas of this process."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.config.model import ModelConfig
from lorafusion_jax.config.schema import AdapterConfig, JobConfig
from lorafusion_jax.config.stack import stack_of
from lorafusion_jax.data.assemble import (
    Microbatch,
    Weights,
    adapter_places,
    assemble,
    batch_loss_tokens,
    num_segments,
    pieces_of_slot,
    segment_weights,
    stacked,
)
from lorafusion_jax.data.prepare import AdapterData, Prepared
from lorafusion_jax.data.sample_table import State, TableShape, table_shape
from lorafusion_jax.data.tokenized_set import TokenizedSet
from lorafusion_jax.objective.protocol import DIVERGENCE
from lorafusion_jax.session.profile import Load
from scheduling import Plan, SampleRef
from scheduling.simulate import slot_squares

TOKENS_OF_A_SEGMENT = 256  # with places, a microbatch has one for as many tokens
MOST_ADAPTERS = 8  # in one microbatch, with places: its cost grows with this number


class Batches:
    """Assembles microbatches, [replicas of this process, ...]; all slots of a capacity have one shape.

    Attributes:
        loss_tokens: number of loss tokens of each (adapter, global batch).
    """

    def __init__(self, config: JobConfig, prepared: Prepared, plan: Plan, local_replicas: Sequence[int]):
        self._replicas = tuple(local_replicas)
        self._rooms: dict[int, _Room] = {}  # by capacity
        self.take(config, prepared, plan)

    def take(self, config: JobConfig, prepared: Prepared, plan: Plan) -> None:
        """Replaces the plan. Microbatches keep their shape if the new samples fit into it."""
        self._config, self._prepared, self._plan = config, prepared, plan
        self._state = teacher_state(config)
        self._index = stack_of(config).index
        parts = _parts(plan)
        for size in sorted(parts):
            room = _room(config, prepared, parts[size]).union(_reserved_room(config, size))
            self._rooms[size] = room.union(self._rooms[size]) if size in self._rooms else room
        self.loss_tokens = {
            (a.name, batch): int(count)
            for a in config.adapters
            for batch, count in enumerate(batch_loss_tokens(prepared.adapters[a.name], a.global_samples))
        }
        self._weights = {
            (adapter.name, batch): weights
            for adapter in config.adapters
            for batch, weights in enumerate(
                batch_weights(adapter, prepared.adapters[adapter.name], config.train.router_aux)
            )
        }

    def of(self, slot: int) -> Microbatch:
        return self._assemble(self._plan.slots[slot].replicas, self._plan.slot_capacities[slot])

    def empty(self, slot: int = 0) -> list[Microbatch]:
        """A microbatch of padding of each capacity that is used from a slot on: it adds zero to every sum."""
        used = zip(self._plan.slots[slot:], self._plan.slot_capacities[slot:], strict=True)
        sizes = {size for slot_of_plan, size in used if not slot_of_plan.is_noop}
        return [self._assemble([()] * self._plan.data_parallel, size) for size in sorted(sizes)]

    def loads(self, most: int = 3) -> list[Load]:
        """Slots of each capacity whose samples differ most in Σ length²: the lightest, the heaviest, some between."""
        squares, sizes = slot_squares(self._plan), self._plan.slot_capacities
        loads: list[Load] = []
        for size in self._plan.sizes:
            numbers = [slot for slot, s in enumerate(self._plan.slots) if sizes[slot] == size and not s.is_noop]
            ranked = sorted(numbers, key=squares.__getitem__)
            chosen = {ranked[round(rank)] for rank in np.linspace(0, len(ranked) - 1, most)} if ranked else set()
            loads += [Load(self.of(slot), size, squares[slot]) for slot in sorted(chosen)]
            if not ranked:  # a capacity that no slot takes: one segment of padding
                loads.append(Load(self._assemble([()] * self._plan.data_parallel, size), size, size * size))
        return loads

    def _assemble(self, replicas: Sequence[Sequence[SampleRef]], capacity_tokens: int) -> Microbatch:
        room = self._rooms.get(capacity_tokens, _room(self._config, self._prepared, ()))
        rows = [
            assemble(
                pieces_of_slot(replicas[replica], self._prepared.adapters, self._index, self._weights),
                capacity_tokens=capacity_tokens,
                tile_tokens=self._plan.tile_tokens,
                max_segments=room.segments,
                max_adapters=room.adapters,
                table=room.table,
                state=self._state,
                balanced=self._config.train.router_aux > 0,
            )
            for replica in self._replicas
        ]
        return stacked(rows)


class _Room(NamedTuple):
    """Static places of the microbatches of one capacity; see `places` and `adapter_places`."""

    segments: int
    table: TableShape | None
    adapters: int

    def union(self, other: _Room) -> _Room:
        """Room for the microbatches of both."""
        tables = [table for table in (self.table, other.table) if table is not None]
        table = tables[0].union(tables[-1]) if tables else None
        return _Room(max(self.segments, other.segments), table, max(self.adapters, other.adapters))


def _room(config: JobConfig, prepared: Prepared, parts: Sequence[Sequence[str]]) -> _Room:
    """Room for microbatches with these samples, given by their adapters."""
    together = max((len(set(part)) for part in parts), default=1)
    data = {name: samples.train for name, samples in prepared.adapters.items()}
    return _Room(*places(config, data, parts), adapter_places(together, len(config.adapters)))


def _reserved_room(config: JobConfig, capacity_tokens: int) -> _Room:
    """Room for microbatches with adapters that may join, so that their shape stays the same."""
    stacked = len(stack_of(config).config.adapters)
    most = min(stacked, MOST_ADAPTERS) if config.train.places else 1
    return _Room(reserved_segments(config, capacity_tokens), None, adapter_places(most, stacked))


def reserved_segments(config: JobConfig, capacity_tokens: int) -> int:
    """Returns places for segments in a microbatch of a job that adapters join; 0 if it reserves none."""
    return num_segments(max(1, capacity_tokens // TOKENS_OF_A_SEGMENT)) if config.train.places else 0


def mask_adapters(batch: Microbatch, adapters: Collection[int]) -> Microbatch:
    """Turns the rows of some adapters into padding, in place. Other rows do not change.

    Args:
        adapters: places among the stacked adapters.
    """
    if not adapters:
        return batch
    removed = np.isin(batch.row_adapter, list(adapters))
    samples = batch.samples
    if samples is not None:
        samples = samples._replace(adapter=np.where(np.isin(samples.adapter, list(adapters)), -1, samples.adapter))
    return batch._replace(
        samples=samples,
        tokens=np.where(removed, 0, batch.tokens),
        targets=np.where(removed, 0, batch.targets),
        weights=np.where(removed, np.float32(0), batch.weights),
        row_adapter=np.where(removed, -1, batch.row_adapter),
        tile_adapter=np.where(np.isin(batch.tile_adapter, list(adapters)), -1, batch.tile_adapter),
    )


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
    chosen = {adapter.name: adapter.objective.chosen for adapter in config.adapters}
    segments = {name: objective.num_segments for name, objective in chosen.items()}
    most = max((sum(segments[name] for name in part) for part in parts), default=1)
    samples = max((sum(chosen[name].of_samples for name in part) for part in parts), default=1)
    members = [(chosen[name], tokenized) for name, tokenized in data.items() if name in chosen]
    return num_segments(most), table_shape(max(samples, 1), members)


def teacher_state(config: JobConfig) -> State | None:
    """Returns width and dtype of the states that objectives compare with; None if none does."""
    if not any(DIVERGENCE in adapter.objective.chosen.needs for adapter in config.adapters):
        return None
    model = ModelConfig.from_hf(base_directory(config))
    return State(model.hidden_size, np.dtype(jnp.dtype(config.base.dtype)))


def _parts(plan: Plan) -> dict[int, list[list[str]]]:
    """The adapter of each sample, for each microbatch, by capacity."""
    parts: dict[int, list[list[str]]] = {}
    for slot, size in zip(plan.slots, plan.slot_capacities, strict=True):
        parts.setdefault(size, []).extend([ref.adapter for ref in part] for part in slot.replicas)
    return parts


def batch_weights(adapter: AdapterConfig, data: AdapterData, router_aux: float = 0.0) -> Iterator[Weights]:
    """Yields the weights of each of an adapter's global batches.

    Args:
        router_aux: factor of the routers' loss, which is a mean over the sequences of the batch.
    """
    tokens = batch_loss_tokens(data, adapter.global_samples).tolist()
    batches = np.split(data.order, data.batch_starts(adapter.global_samples)[1:])
    segments = data.train.segment_tokens.shape[1]
    for count, samples in zip(tokens, batches, strict=True):
        sequence = router_aux / (len(samples) * segments)
        if adapter.objective.chosen.of_samples:
            yield Weights(1.0, 1.0 / len(samples), segment_weights(data.train, samples), sequence)
        else:
            yield Weights(1.0 / count, sequence=sequence)
