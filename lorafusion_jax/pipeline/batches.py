"""Assembles the slots of a plan into microbatches for the replicas of this process."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.assemble import (
    Microbatch,
    Weights,
    adapter_places,
    assemble,
    batch_loss_tokens,
    num_segments,
    pieces_of_slot,
    stacked,
)
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.objective.protocol import Chosen
from lorafusion_jax.pipeline.profile import Load
from scheduling import Plan, SampleRef
from scheduling.simulate import slot_squares


class Batches:
    """Assembles microbatches, [replicas of this process, ...]. All slots of a plan have one shape.

    Attributes:
        loss_tokens: number of loss tokens of each (adapter, global batch).
    """

    def __init__(self, config: JobConfig, prepared: Prepared, plan: Plan, local_replicas: Sequence[int]):
        self._replicas = tuple(local_replicas)
        self._segments, self._table = places(config, _parts(plan))
        self._adapters = _adapters_together(plan, len(config.adapters))
        self.take(config, prepared, plan)

    def take(self, config: JobConfig, prepared: Prepared, plan: Plan) -> None:
        """Replaces the plan. Microbatches keep their shape if the new samples fit into it."""
        self._config, self._prepared, self._plan = config, prepared, plan
        self._index = {adapter.name: index for index, adapter in enumerate(config.adapters)}
        segments, table = places(config, _parts(plan))
        self._segments = max(self._segments, segments)
        self._adapters = max(self._adapters, _adapters_together(plan, len(config.adapters)))
        if table is not None:
            before = self._table or (0, 0)
            self._table = max(before[0], table[0]), max(before[1], table[1])
        self.loss_tokens = {
            (a.name, batch): int(count)
            for a in config.adapters
            for batch, count in enumerate(batch_loss_tokens(prepared.adapters[a.name], a.global_samples))
        }
        self._weights = {
            (name, batch): _weights(chosen, self.loss_tokens[name, batch], size)
            for name, chosen, sizes in _batch_sizes(config, prepared)
            for batch, size in enumerate(sizes)
        }

    def of(self, slot: int) -> Microbatch:
        return self._assembled(self._plan.slots[slot].replicas)

    def empty(self) -> Microbatch:
        """Returns a microbatch of padding, which adds zero to every sum."""
        return self._assembled([()] * self._plan.data_parallel)

    def loads(self, most: int = 3) -> list[Load]:
        """Returns slots with different Σ length² for timing: the lightest, the heaviest and some between."""
        squares = slot_squares(self._plan)
        ranked = sorted((slot for slot, s in enumerate(self._plan.slots) if not s.is_noop), key=squares.__getitem__)
        chosen = {ranked[round(place)] for place in np.linspace(0, len(ranked) - 1, most)}
        return [Load(self.of(slot), self._plan.capacity_tokens, squares[slot]) for slot in sorted(chosen)]

    def _assembled(self, replicas: Sequence[Sequence[SampleRef]]) -> Microbatch:
        rows = [
            assemble(
                pieces_of_slot(replicas[replica], self._prepared.adapters, self._index, self._weights),
                capacity_tokens=self._plan.capacity_tokens,
                tile_tokens=self._plan.tile_tokens,
                max_segments=self._segments,
                max_adapters=self._adapters,
                table=self._table,
            )
            for replica in self._replicas
        ]
        return stacked(rows)


def without(batch: Microbatch, adapters: Collection[int]) -> Microbatch:
    """Turns the rows of some adapters into padding, in place. Other rows do not change.

    Args:
        adapters: places among the stacked adapters.
    """
    if not adapters:
        return batch
    gone = np.isin(batch.row_adapter, list(adapters))
    samples = batch.samples
    if samples is not None:
        samples = samples._replace(adapter=np.where(np.isin(samples.adapter, list(adapters)), -1, samples.adapter))
    return batch._replace(
        samples=samples,
        tokens=np.where(gone, 0, batch.tokens),
        targets=np.where(gone, 0, batch.targets),
        weights=np.where(gone, np.float32(0), batch.weights),
        row_adapter=np.where(gone, -1, batch.row_adapter),
        tile_adapter=np.where(np.isin(batch.tile_adapter, list(adapters)), -1, batch.tile_adapter),
    )


def places(config: JobConfig, parts: Sequence[Sequence[str]]) -> tuple[int, tuple[int, int] | None]:
    """Returns the static sizes of a plan's microbatches.

    Args:
        parts: the adapter of each sample, for each microbatch.

    Returns:
        (places for segments, (places for samples, segments of each) or None if no objective needs samples)
    """
    chosen = {adapter.name: adapter.objective.chosen for adapter in config.adapters}
    segments = {name: each.objective.num_segments for name, each in chosen.items()}
    most = max((sum(segments[name] for name in part) for part in parts), default=1)
    widths = [segments[name] for name, each in chosen.items() if each.of_samples]
    if not widths:
        return num_segments(most), None
    samples = max((sum(chosen[name].of_samples for name in part) for part in parts), default=1)
    return num_segments(most), (max(samples, 1), max(widths))


def _parts(plan: Plan) -> list[list[str]]:
    """Returns the adapter of each sample, for each microbatch."""
    return [[ref.adapter for ref in part] for slot in plan.slots for part in slot.replicas]


def _adapters_together(plan: Plan, num_adapters: int) -> int:
    """Returns the number of adapter places in the microbatches of a plan."""
    return adapter_places(max((len(set(part)) for part in _parts(plan)), default=1), num_adapters)


def _batch_sizes(config: JobConfig, prepared: Prepared) -> Iterator[tuple[str, Chosen, list[int]]]:
    """Yields each adapter's name, its objective and the number of samples of each of its global batches."""
    for adapter in config.adapters:
        data = prepared.adapters[adapter.name]
        sizes = np.diff(np.append(data.batch_starts(adapter.global_samples), len(data.order)))
        yield adapter.name, adapter.objective.chosen, sizes.tolist()


def _weights(chosen: Chosen, loss_tokens: int, size: int) -> Weights:
    return Weights(1.0, 1.0 / size) if chosen.of_samples else Weights(1.0 / loss_tokens)
