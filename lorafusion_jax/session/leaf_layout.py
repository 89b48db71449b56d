"""The leaves of a model's adapters: their names, columns and shapes.

L layers · K, N features of a projection · r rank of an adapter · C columns of all
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.table import prepared_by
from lorafusion_jax.adapters.tokens import Table
from lorafusion_jax.layout.extent import Extent
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.objective.replaced_rows import RowsOf
from lorafusion_jax.session.leaves import COUNTED, LAYERS, SHARED, TOKENS, Columns, all_columns, own_columns, path_of


@dataclass(frozen=True, kw_only=True)
class LeafLayout:
    """Which leaves the adapters have.

    Args:
        model: shapes of the base.
        specs: the adapters, in stacking order.

    Attributes:
        columns: by leaf, which columns belong to which adapter.
    """

    model: ModelConfig
    specs: tuple[AdapterSpec, ...]
    columns: Mapping[str, Columns] = field(init=False, repr=False)

    def __post_init__(self):
        columns = all_columns(self.specs, self.model.linears, tied=self.model.tie_embeddings)
        object.__setattr__(self, "columns", columns)

    def lora_shapes(self, num_layers: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the leaves of all adapters: "layers.self_attn.q_proj.lora_a" → (L, K, C)."""
        stage = Extent(0, 2 * num_layers)
        return {
            name: (len(self.rows_of(name, stage)), *at.shape(self.sizes(name))) for name, at in self.columns.items()
        }

    @property
    def prepared(self) -> frozenset[str]:
        """The leaves that kinds prepare: no part of an adapter's state, because they follow from it."""
        names = {leaf.name for leaf in prepared_by([spec.kind for spec in self.specs])}
        return frozenset(name for name, at in self.columns.items() if at.leaf.name in names)

    def rows_of(self, leaf: str, extent: Extent) -> range:
        """Returns the part of a leaf's first axis in an extent: of the layers that have it, or all."""
        if not leaf.startswith(LAYERS):
            return range(1)
        layers = extent.layers_of(self.model.half_of(leaf))
        numbers = self.model.some_layers.get(path_of(leaf))
        if numbers is None:
            return layers
        return range(bisect_left(numbers, layers.start), bisect_left(numbers, layers.stop))

    def own_shapes(self, occupied: Iterable[tuple[int, AdapterSpec]] | None = None) -> dict[str, dict[str, Any]]:
        """Returns the shapes of each adapter's leaves in all layers: name → leaf → (L, K, r) and so on.

        Args:
            occupied: the adapters with their positions, see `StageState.occupied` (None: `specs`).
        """
        all_layers = Extent(0, 2 * self.model.num_layers)

        def shape_of(name: str, width: int) -> tuple[int, ...]:
            shape = self.columns[name].leaf.shape_in({**self.sizes(name), **dict.fromkeys(COUNTED, width)})
            return (len(self.rows_of(name, all_layers)), *shape)

        return {
            spec.name: {
                name: shape_of(name, width)
                for name, width in own_columns(self.columns, index, spec)
                if name not in self.prepared
            }
            for index, spec in (enumerate(self.specs) if occupied is None else occupied)
        }

    def sizes(self, name: str) -> dict[str, int]:
        """Returns the sizes of a leaf's axes, but its rank."""
        if name.startswith(LAYERS):
            linear = next(linear for linear in self.model.linears if linear.path == path_of(name))
            return {"K": linear.in_features, "N": linear.out_features, "E": linear.experts}
        if name.startswith(SHARED):
            return dict(zip("KN", self.largest, strict=True))
        return {"D": self.model.hidden_size, "V": self.model.vocab_size}

    @property
    def largest(self) -> tuple[int, int]:
        """Largest in and out features of the model, the sizes of shared leaves."""
        shapes = [linear.shape for linear in self.model.linears]
        return max(shape[0] for shape in shapes), max(shape[1] for shape in shapes)

    def token_ids(self, spec: AdapterSpec, table: Table) -> tuple[int, ...]:
        """Returns the trainable tokens of an adapter in a table of the model."""
        return () if spec.tokens is None else spec.tokens.of(table, tied=self.model.tie_embeddings)

    def token_columns(self, table: Table) -> tuple[RowsOf, ...]:
        """Returns which columns of a leaf of trainable tokens belong to which adapter and token."""
        at = self.columns.get(f"{TOKENS}{table}")
        if at is None:
            return ()
        return tuple(
            RowsOf(adapter=index, first=at.first[index], tokens=self.token_ids(spec, table))
            for index, spec in enumerate(self.specs)
            if at.width[index]
        )
