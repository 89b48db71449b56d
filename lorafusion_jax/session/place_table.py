"""Which adapter is in which place of a session or a run, as microbatches say it.

A places · L layers · P places for the adapters of a microbatch
"""

from __future__ import annotations

import numpy as np

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.data.assemble import AdapterRows, Microbatch, stacked
from lorafusion_jax.modules.context import dropout_key
from lorafusion_jax.session.inputs import layer_ratios
from lorafusion_jax.session.leaf_layout import LeafLayout
from lorafusion_jax.session.leaves import own_windows


class PlaceTable:
    """What microbatches say about the adapters in the places. On the host; changed between microbatches."""

    def __init__(self, layout: LeafLayout, count: int):
        self._model, self._columns = layout.model, layout.columns
        self._windows = np.zeros((len(self._columns), 2, count), np.int32)
        self._rank = np.zeros(count, np.int32)
        self._scale, self._rate = np.zeros(count, np.float32), np.zeros(count, np.float32)
        self._key = np.zeros(count, np.uint32)
        self._ratio = np.ones((len(self._model.targets), self._model.num_layers, count), np.float32)
        self._objective = np.full(count, -1, np.int32)

    def assign(self, place: int, spec: AdapterSpec, objective: int) -> None:
        """Describes the adapter of a place; `objective` is the number of its objective in the session."""
        self._windows[..., place] = own_windows(self._columns, place, spec)
        self._rank[place], self._scale[place] = spec.columns, spec.scale
        self._rate[place], self._key[place] = spec.dropout, dropout_key(spec.seed)
        self._ratio[..., place], self._objective[place] = layer_ratios(self._model, spec), objective

    def describe(self, rows: Microbatch) -> Microbatch:
        """Adds to the microbatches of all replicas what they say of their adapters."""
        return rows._replace(lora=stacked([self.rows(adapters) for adapters in rows.adapters]))

    def rows(self, adapters: np.ndarray) -> AdapterRows:
        """Returns the rows of a microbatch's adapters [P], -1 in unused places."""
        # Unused places read the values of place 0, but their windows have no columns.
        number = np.maximum(adapters, 0)
        return AdapterRows(
            np.where(adapters >= 0, self._windows[:, :, number], 0).astype(np.int32),
            self._rank[number],
            self._scale[number],
            self._rate[number],
            self._key[number],
            self._ratio[..., number],
            # A copy, as indexing makes of the others: `assign` may change the table while this microbatch waits.
            self._objective.copy(),
        )
