"""The layers of one stage, counted in halves.

A stage may end after the attention of a layer, and the next stage starts with the MLP of that layer. Only one array
passes between the two halves, as between layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from lorafusion_jax.layout.layer import Half


class Piece(NamedTuple):
    """A unit of execution: a layer, or the half of it that belongs to a stage."""

    layer: int
    half: Half | None = None


@dataclass(frozen=True, slots=True)
class Extent:
    """Consecutive halves [start, stop) of a model: half 2n is the attention of layer n, half 2n + 1 its MLP.

    An extent has at least two halves, so that every kind of leaf occurs in it.

    >>> own = Extent(41, 81)
    >>> own.count, own.layers_of("attention"), own.layers_of("mlp")
    (20, range(21, 41), range(20, 40))
    >>> own.pieces[0], own.pieces[-1]
    (Piece(layer=20, half='mlp'), Piece(layer=40, half='attention'))
    """

    start: int
    stop: int

    @property
    def count(self) -> int | float:
        """Layers, e.g. 20 or 20.5."""
        return as_count((self.stop - self.start) / 2)

    @property
    def first(self) -> int:
        """Number of the first layer that is at least partly in the extent."""
        return self.start // 2

    @property
    def last(self) -> int:
        return (self.stop - 1) // 2

    @property
    def pieces(self) -> list[Piece]:
        """The pieces in order; only the first and the last can be halves."""
        head = [Piece(self.first, "mlp")] if self.start % 2 else []
        tail = [Piece(self.last, "attention")] if self.stop % 2 else []
        return [*head, *map(Piece, range(-(-self.start // 2), self.stop // 2)), *tail]

    def layers_of(self, half: Half) -> range:
        """Layers whose half is in the extent."""
        if half == "mlp":
            return range(self.start // 2, self.stop // 2)
        return range(-(-self.start // 2), -(-self.stop // 2))

    def holds(self, layer: int, half: Half) -> bool:
        return layer in self.layers_of(half)


def extents(counts: Iterable[int | float]) -> tuple[Extent, ...]:
    """Extents of consecutive stages.

    >>> extents([1.5, 1, 2.5])[1]
    Extent(start=3, stop=5)
    """
    edges = accumulate((round(2 * count) for count in counts), initial=0)
    return tuple(Extent(start, stop) for start, stop in pairwise(edges))


def as_count(layers: float) -> int | float:
    """20.0 → 20; 20.5 stays."""
    return int(layers) if layers == int(layers) else layers


def counts_of(stages: Sequence[Extent]) -> list[int | float]:
    return [stage.count for stage in stages]
