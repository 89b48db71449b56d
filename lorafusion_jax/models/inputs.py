"""Inputs that all layers of a forward pass share. Dims: `T` packed tokens · `C` head width"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lorafusion_jax.models.cache import CachedRows
from lorafusion_jax.models.segments import Segments
from lorafusion_jax.modules import LoRAContext


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """Rotary tables, segments, and the adapter of each tile.

    Attributes:
        ropes: cosines and signed sines [T, 1, C] of each of the model's rotary embeddings, see `rope.rope_tables`.
        query_scales: factor of the queries [T, 1, 1], for each of them (None: no model's rope has one).
        cached: where the rows lie in the layers' caches (None: the layers keep nothing).
        inside: whether a row is one of each sequence's, [M, T], where choices of routers are counted (None: they are
            not).
        chunks: segments, cut where layers attend within chunks (None: no layer does).
        of_layers: inputs that layers have of their own, [L, T, P], or of one layer, [T, P] (None: they have none).
    """

    ropes: tuple[tuple[jax.Array, jax.Array], ...]
    segments: Segments
    lora: LoRAContext | None
    query_scales: tuple[jax.Array, ...] | None = None
    cached: CachedRows | None = None
    inside: jax.Array | None = None
    chunks: Segments | None = None
    of_layers: jax.Array | None = None

    def at_layer(self, number: int | jax.Array) -> LayerInputs:
        """The inputs of one layer, with its own dropout."""
        if self.of_layers is not None:
            return replace(self, of_layers=self.of_layers[number])._dropped(number)
        return self._dropped(number)

    def cut(self, parts: int) -> list[tuple[int, LayerInputs]]:
        """Returns the rows and the inputs of consecutive parts of the microbatch, cut between tiles.

        The segments of a part are those of all rows, and it has no choices of routers and no cache.
        """
        assert self.lora is not None
        total, tiles = len(self.segments.ids), len(self.lora.tile_adapter)
        borders = [tiles * number // parts for number in range(parts + 1)]
        return [self._of_tiles(slice(*ends), total // tiles) for ends in pairwise(borders) if ends[0] < ends[1]]

    def _of_tiles(self, tiles: slice, tile: int) -> tuple[int, LayerInputs]:
        assert self.lora is not None
        rows = slice(tile * tiles.start, tile * tiles.stop)
        ropes, scales, of_layer = jax.tree.map(lambda x: x[rows], (self.ropes, self.query_scales, self.of_layers))
        lora = self.lora.of_tiles(tiles)
        return rows.stop - rows.start, replace(self, ropes=ropes, query_scales=scales, of_layers=of_layer, lora=lora)

    def _dropped(self, number: int | jax.Array) -> LayerInputs:
        return self if self.lora is None else replace(self, lora=self.lora.at_layer(number))


def by_parts[Rows](function: Callable[..., Rows], parts: int, inputs: LayerInputs, *rows: jax.Array) -> Rows:
    """Returns function(*rows, inputs), whose rows do not depend on each other, from consecutive parts of the rows.

    What XLA makes of one part does not wait for the others.
    """
    if parts == 1 or inputs.lora is None:
        return function(*rows, inputs)
    sizes, inputs_of = zip(*inputs.cut(parts), strict=True)
    rows_of = zip(*(lax.split(x, sizes) for x in rows), strict=True)
    outputs: list[Any] = [function(*x, of_part) for x, of_part in zip(rows_of, inputs_of, strict=True)]
    return jax.tree.map(lambda *ys: jnp.concatenate(ys), *outputs)
