"""What all layers share of a microbatch: rotary tables, segments, adapters and their columns, dropout keys.

L layers · A adapters · P places for the adapters of a microbatch
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from lorafusion_jax.adapters.bank import NO_KIND, kind_numbers
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.table import adapter_kind
from lorafusion_jax.data.assemble import AdapterRows
from lorafusion_jax.models import ModelConfig, Segments
from lorafusion_jax.models.balance import rows_inside
from lorafusion_jax.models.forward import layer_inputs
from lorafusion_jax.models.layer import LayerInputs
from lorafusion_jax.modules import LoRAContext
from lorafusion_jax.session.leaf_layout import LeafLayout
from lorafusion_jax.session.leaves import LAYERS, windows
from pallas_kernels import Dropout, Implementation


class Inputs(NamedTuple):
    """Inputs of a microbatch that all layers share.

    Attributes:
        layers: inputs of the modules; adapters are numbered by their places.
        windows: columns of the adapters in their places, [leaves, 2, P], see `leaves.windows`.
        kinds: by target, number of the kind of the adapter in each place [P], see `kind_numbers`; [L, P] if not all
            layers have all adapters. A target whose adapters are all of one plain kind is not among them.
        ratios: by leaf, factor of each layer for the adapter in each place, [L, P], see `layer_ratios`. A leaf whose
            factors are 1 in any case is not among them.
    """

    layers: LayerInputs
    windows: Array
    kinds: dict[str, Array]
    ratios: dict[str, Array]


@dataclass(frozen=True, kw_only=True)
class InputMaker:
    """Makes the inputs of microbatches.

    Args:
        layout: the leaves of the adapters.
        implementation: of the fused ops.
    """

    layout: LeafLayout
    implementation: Implementation | None
    _kinds: Mapping[str, Any] = field(init=False, repr=False)  # by target, int32 [A] or [L, A]
    _ratios: Mapping[str, Any] = field(init=False, repr=False)  # by leaf, float32 [L, A]

    def __post_init__(self):
        object.__setattr__(self, "_kinds", self.kinds_in(self.layout.specs))
        object.__setattr__(self, "_ratios", self._scale_ratios())

    def of_batch(self, batch: Any, *, dropout: bool) -> Inputs:  # a Microbatch of tracers
        """Computes what all layers share: rotary tables, segments, adapters and their columns, dropout keys."""
        row_key = batch.row_key if dropout and any(spec.dropout for spec in self.layout.specs) else None
        segments = Segments(ids=batch.segment_ids, offsets=batch.segment_offsets, lengths=batch.segment_lengths)
        if batch.lora is not None:
            layers = self._layers(batch, segments, self._context(batch, row_key))
            kinds = self._kinds_of(batch.lora, batch.adapters)
            return Inputs(layers, batch.lora.windows, kinds, self._by_leaf(batch.lora.ratio))
        lora = LoRAContext.of(
            self.layout.specs,
            batch.tile_adapter,
            row_key=row_key,
            train=row_key is not None,
            implementation=self.implementation,
        )
        places = jnp.maximum(batch.adapters, 0)
        kinds = {target: jnp.asarray(numbers)[..., places] for target, numbers in self._kinds.items()}
        layers = self._layers(batch, segments, lora.in_places(batch.adapters))
        return Inputs(layers, windows(self.layout.columns, batch.adapters), kinds, self._ratios_of(batch.adapters))

    def _layers(self, batch: Any, segments: Segments, lora: LoRAContext) -> LayerInputs:
        layers = layer_inputs(self.layout.model, batch.positions, segments, lora)
        if batch.balance is None:
            return layers
        offsets = batch.segment_offsets[:-1]
        return replace(layers, inside=rows_inside(offsets, batch.balance.length, len(batch.tokens)))

    def of_adapter(self, index: Array, ratio: Array) -> Inputs:
        """Computes where the leaves of one adapter are, without a microbatch.

        Args:
            ratio: its `layer_ratios`.
        """
        layers: Any = None
        return Inputs(layers, windows(self.layout.columns, index[None]), {}, self._by_leaf(ratio[..., None]))

    def kinds_in(self, specs: Sequence[AdapterSpec | None]) -> dict[str, np.ndarray]:
        """Returns `Inputs.kinds` of adapters, which may be others than those of the layout: None has no kind."""
        numbers = {}
        for target in self.layout.model.targets:
            names = tuple(dict.fromkeys(spec.kind for spec in self.layout.specs if target in spec.targets))
            kinds = [None if spec is None or target not in spec.targets else spec.kind for spec in specs]
            numbers[target] = self._by_layer(target, kind_numbers(names, kinds), specs)
        return {target: number for target, number in numbers.items() if number is not None}

    def ratios_of(self, spec: AdapterSpec) -> dict[str, np.ndarray]:
        """Returns `Inputs.ratios` of an adapter, which may be another than those of the layout, [L]."""
        if spec.patterns is None:
            return {}
        return self._by_leaf(layer_ratios(self.layout.model, spec))

    def _by_layer(
        self, target: str, numbers_A: np.ndarray | None, specs: Sequence[AdapterSpec | None]
    ) -> np.ndarray | None:
        """Returns the numbers of the kinds in each layer, [L, A], if not all layers have all adapters."""
        if numbers_A is None or all(spec is None or spec.patterns is None for spec in (*specs, *self.layout.specs)):
            return numbers_A
        has_LA = [[spec is not None and spec.has(path) for spec in specs] for path in self._paths(target)]
        return np.where(has_LA, numbers_A, NO_KIND).astype(np.int32)

    def _scale_ratios(self) -> dict[str, np.ndarray]:
        """Returns by leaf `layer_ratios` of all adapters, where some are not 1."""
        specs, model = self.layout.specs, self.layout.model
        if all(spec.patterns is None for spec in specs):
            return {}
        ratio_TLA = np.stack([layer_ratios(model, spec) for spec in specs], axis=-1)
        return {name: ratio_LA for name, ratio_LA in self._by_leaf(ratio_TLA).items() if (ratio_LA != 1).any()}

    def _by_leaf(self, ratio_TLA: Any) -> dict[str, Any]:
        """Returns the factors of the leaves that the kinds of adapters scale."""
        model = self.layout.model
        leaves = dict.fromkeys(leaf for spec in self.layout.specs for leaf in adapter_kind(spec.kind).scaled)
        names = {
            f"{LAYERS}{path}.{leaf}": ratio_LA
            for target, ratio_LA in zip(model.targets, ratio_TLA, strict=True)
            for path in model.paths_of(target)
            for leaf in leaves
        }
        return {name: ratio_LA for name, ratio_LA in names.items() if name in self.layout.columns}

    def _paths(self, target: str) -> list[str]:
        return layer_paths(self.layout.model, target)

    def _ratios_of(self, adapters: Array) -> dict[str, Array]:
        """Returns `Inputs.ratios` of a microbatch's adapters."""
        return {name: jnp.asarray(ratio_LA)[:, jnp.maximum(adapters, 0)] for name, ratio_LA in self._ratios.items()}

    def _kinds_of(self, rows: AdapterRows, adapters: Array) -> dict[str, Array]:
        """Returns `Inputs.kinds` of a microbatch that describes its adapters itself."""
        places = jnp.maximum(adapters, 0)
        ratio_of = dict(zip(self.layout.model.targets, rows.ratio, strict=True))

        def numbers(target: str) -> Array:
            paths = tuple(f"{LAYERS}{path}." for path in self.layout.model.paths_of(target))
            of_target = np.array([name.startswith(paths) for name in self.layout.columns])
            is_target = jnp.any(rows.windows[of_target, 1] > 0, axis=0)
            has_LP = is_target & (ratio_of[target] != 0)
            return jnp.where(has_LP, jnp.asarray(self._kinds[target])[..., places], NO_KIND)

        return {target: numbers(target) for target in self._kinds}

    def _context(self, batch: Any, row_key: Array | None) -> LoRAContext:
        """Returns the context of a microbatch that describes its adapters itself."""
        rows, adapters = batch.lora, batch.adapters
        dropout = None if row_key is None else Dropout(rate=rows.rate, key=rows.key, row_key=row_key)
        context = LoRAContext(
            tile_adapter=batch.tile_adapter,
            scale=rows.scale,
            dropout=dropout,
            implementation=self.implementation,
            traced_ranks=rows.rank,
            drops_columns=dropout is not None and any(spec.drops_columns for spec in self.layout.specs),
        )
        return context.numbered(adapters)


def layer_paths(model: ModelConfig, target: str) -> list[str]:
    """Returns the paths of a projection in all layers, also in those that lack it."""
    paths, numbers = model.paths_of(target), range(model.num_layers)
    in_layers = [[path for path in paths if number in model.layers_with(path)] for number in numbers]
    return [f"{LAYERS}{number}.{(path or paths)[0]}" for number, path in enumerate(in_layers)]


def layer_ratios(model: ModelConfig, spec: AdapterSpec) -> np.ndarray:
    """Returns an adapter's scale in each projection over `AdapterSpec.scale`, float32 [targets, L].

    0 where its patterns leave a projection out; 1 where it has no patterns.
    """
    if spec.patterns is None:
        return np.ones((len(model.targets), model.num_layers), np.float32)
    paths = [layer_paths(model, target) for target in model.targets]
    scales = [[spec.scale_at(path) / spec.scale if spec.has(path) else 0 for path in layers] for layers in paths]
    return np.array(scales, np.float32)
