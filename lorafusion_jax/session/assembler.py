"""Assembles samples into microbatches: of plans, of windows, of held-out sets and for references."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import jax.numpy as jnp
import numpy as np

from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.config.schema import BatchSettings, JobConfig, MeshSettings
from lorafusion_jax.data.assemble import (
    EACH_ONE,
    Microbatch,
    Piece,
    Weights,
    assemble,
    num_segments,
    piece_of,
    segment_weights,
    stacked,
)
from lorafusion_jax.data.sample_table import State, TableShape
from lorafusion_jax.data.tokenized_set import TokenizedSet
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.objective.protocol import DIVERGENCE, Chosen
from lorafusion_jax.planning.held_out import pack_set
from lorafusion_jax.session.task import Task
from scheduling import SampleRef
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


def places_for_segments(batch: BatchSettings) -> int:
    """Segments of a microbatch of a session with free places."""
    return num_segments(max(1, batch.largest // TOKENS_OF_A_SEGMENT)) - 1


def first_tail(
    batch: BatchSettings, mesh: MeshSettings, num_places: int, most_segments: int, *, reproducible: bool = False
) -> Tail:
    """What the first window of a session must respect: its limits."""
    return Tail(
        limits=Limits(
            capacity_tokens=batch.largest,
            smaller=batch.sizes[:-1],
            num_stages=mesh.stages,
            data_parallel=mesh.replicas,
            tile_tokens=batch.tile_tokens,
        ),
        most_segments=most_segments,
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
