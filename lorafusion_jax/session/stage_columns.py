"""The leaves of adapters that one stage has."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from lorafusion_jax.layout.extent import Extent
from lorafusion_jax.session.inputs import Inputs
from lorafusion_jax.session.leaf_layout import LeafLayout
from lorafusion_jax.session.leaves import EMBED_ROWS, HEAD_ROWS, LAYERS, Columns, on_stage, path_of


class Position(NamedTuple):
    """A layer of a stage. Programs take these numbers, so that equal stages have equal programs."""

    layer: Any  # its number in the model
    attention: Any  # number of the first layer whose attention the stage has
    mlp: Any  # the same of MLPs

    @classmethod
    def of(cls, extent: Extent, layer: int) -> Position:
        firsts = (extent.layers_of(half).start for half in ("attention", "mlp"))
        return cls(*map(np.int32, (layer, *firsts)))

    def plus(self, layers: int) -> Position:
        return self._replace(layer=self.layer + layers)


class StageColumns:
    """Columns of a stage's leaves.

    Args:
        layout: the leaves of all layers.
        extent: the layers of the stage.

    Attributes:
        trained: leaves that steps change.
        constants: leaves that do not change in training.
        prepared: leaves that kinds compute from the others.
        all: all of them.
        twins: leaves of trained rows of a table that is both embedding and head. They are equal, and so are their
            gradients, see `AdapterPrograms.join_twins`.
    """

    def __init__(self, layout: LeafLayout, extent: Extent):
        self._model = layout.model
        self._rows = {name: row for row, name in enumerate(layout.columns)}
        self._leaf_rows = {name: layout.rows_of(name, extent) for name in layout.columns if name.startswith(LAYERS)}
        ends = {"first": extent.start == 0, "last": extent.stop == 2 * layout.model.num_layers}
        columns = on_stage(layout.columns, self._leaf_rows, **ends)
        self.trained = {name: at for name, at in columns.items() if at.leaf.trainable}
        self.prepared = {name: at for name, at in columns.items() if name in layout.prepared}
        self.constants = {
            name: at for name, at in columns.items() if not at.leaf.trainable and name not in self.prepared
        }
        self.all = self.trained | self.constants | self.prepared
        self.twins = frozenset({EMBED_ROWS, HEAD_ROWS} if layout.model.tie_embeddings else ())

    def windows_of(self, name: str, position: Position, inputs: Inputs) -> tuple[Columns, Array, Array]:
        """Returns a leaf's columns, the layer's index on this stage and the windows of the microbatch's adapters."""
        return self.all[name], self._row_of(name, position), inputs.windows[self._rows[name]]

    def _row_of(self, name: str, position: Position) -> Array:
        if not name.startswith(LAYERS):
            return jnp.int32(0)
        first = getattr(position, self._model.half_of(name))
        numbers = self._model.some_layers.get(path_of(name))
        if numbers is None:
            return position.layer - first
        index_L = jnp.asarray(np.searchsorted(numbers, np.arange(self._model.num_layers)).astype(np.int32))
        return index_L[position.layer] - index_L[first]
