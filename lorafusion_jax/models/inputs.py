"""Inputs that all layers of a forward pass share. Dims: `T` packed tokens · `C` head width"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax

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
        of_layers: inputs that layers have of their own, [L, T, P], or of one layer, [T, P] (None: they have none).
    """

    ropes: tuple[tuple[jax.Array, jax.Array], ...]
    segments: Segments
    lora: LoRAContext | None
    query_scales: tuple[jax.Array, ...] | None = None
    cached: CachedRows | None = None
    inside: jax.Array | None = None
    of_layers: jax.Array | None = None

    def at_layer(self, number: int | jax.Array) -> LayerInputs:
        """The inputs of one layer, with its own dropout."""
        if self.of_layers is not None:
            return replace(self, of_layers=self.of_layers[number])._dropped(number)
        return self._dropped(number)

    def _dropped(self, number: int | jax.Array) -> LayerInputs:
        return self if self.lora is None else replace(self, lora=self.lora.at_layer(number))
