"""The decoder in pieces for a pipeline: embedding, single layers, final norm and head.

Pure functions of dictionaries of arrays, which call the pieces of `models.forward`.
T packed tokens · D model width · V vocabulary · A adapters · P places for the adapters of a microbatch
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from lorafusion_jax.adapters.bank import NO_KIND, kind_numbers, rows_of
from lorafusion_jax.adapters.init import draw_leaf, init_layers, init_shared
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.table import adapter_kind, prepared_by
from lorafusion_jax.adapters.tokens import TABLES, Table
from lorafusion_jax.config.schema import TrainSettings
from lorafusion_jax.layout.extent import Extent
from lorafusion_jax.layout.layer import HALVES, Half
from lorafusion_jax.models import ModelConfig, Segments
from lorafusion_jax.models.cache import Cache
from lorafusion_jax.models.forward import final_norm, layer_inputs, run_layer
from lorafusion_jax.models.layer import DecoderLayer, LayerInputs
from lorafusion_jax.models.loading import Weight
from lorafusion_jax.modules import LoRAContext
from lorafusion_jax.modules.adapted import LoRAConstant
from lorafusion_jax.modules.lora import LoRAKinds
from lorafusion_jax.objective.batch import divergence_rows, totals_of
from lorafusion_jax.objective.loss import token_divergences, token_losses
from lorafusion_jax.objective.protocol import DIVERGENCE, HIDDEN, SCORE, SFT, Chosen
from lorafusion_jax.objective.replaced_rows import ReplacedRows, RowsOf
from lorafusion_jax.pipeline.leaves import (
    COUNTED,
    HEAD,
    HEAD_ROWS,
    LAYERS,
    SHARED,
    TOKENS,
    Columns,
    all_columns,
    own_columns,
    path_of,
    windows,
)
from lorafusion_jax.weights.table import NONE, stored_kind
from pallas_kernels import Dropout
from pallas_kernels.frozen_weight import FrozenWeight

Weights = dict[str, FrozenWeight]  # "self_attn.q_proj.kernel" -> [K, N]
StoredWeights = Mapping[str, Weight]  # the same names; a quantised kernel is a dictionary of its arrays


@jax.tree_util.register_pytree_node_class
class LayerWeights(dict[str, Any]):
    """Weights of a layer or half layer by name. The kind of the layer is static, so each kind has its own programs.

    Args:
        layer_kind: index of the layer's description in `ModelConfig.kinds`.
    """

    def __init__(self, weights: Mapping[str, Any], layer_kind: int = 0):
        super().__init__(weights)
        self.layer_kind = layer_kind

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[int, tuple[str, ...]]]:
        names = tuple(sorted(self))
        return tuple(self[name] for name in names), (self.layer_kind, names)

    @classmethod
    def tree_unflatten(cls, static: tuple[int, tuple[str, ...]], weights: tuple[Any, ...]) -> LayerWeights:
        kind, names = static
        return cls(dict(zip(names, weights, strict=True)), kind)


def layer_kind(weights: Mapping[str, Any]) -> int:
    """The kind of the layer that has these weights; plain dictionaries are of the first kind."""
    return weights.layer_kind if isinstance(weights, LayerWeights) else 0


@dataclass(slots=True, kw_only=True)
class StageWeights:
    """Frozen arrays of one stage.

    Attributes:
        extent: its layers.
        pieces: weights by name, for each of its layers or half layers.
        embed: [V, D], on the first stage.
        norm, head: final norm [D] and [V, D] table, on the last stage.
    """

    extent: Extent
    pieces: list[StoredWeights]
    embed: Array | None = None
    norm: Array | None = None
    head: Array | None = None

    def arrays(self) -> list[Any]:
        return [self.pieces, self.embed, self.norm, self.head]


class Inputs(NamedTuple):
    """Inputs of a microbatch that all layers share.

    Attributes:
        layers: inputs of the modules; adapters are numbered by their places.
        windows: columns of the adapters in their places, [leaves, 2, P], see `leaves.windows`.
        kinds: by target, number of the kind of the adapter in each place [P], see `kind_numbers`; [L, P] if not all
            layers have all adapters. A target whose adapters are all of one plain kind is not among them.
        ratios: by leaf, factor of each layer for the adapter in each place, [L, P]. A leaf whose factors are 1 is not
            among them.
    """

    layers: LayerInputs
    windows: Array
    kinds: dict[str, Array]
    ratios: dict[str, Array]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The pieces of one model.

    Args:
        model: shapes and arithmetic.
        specs: the adapters, in stacking order.
        settings: implementations and loss chunk.
        objectives: objectives of the adapters (empty: supervised fine-tuning for all).
        quantize: storage of the kernels, see `weights.table`.
    """

    model: ModelConfig
    specs: tuple[AdapterSpec, ...]
    settings: TrainSettings
    dtype: Any = jnp.bfloat16
    objectives: tuple[Chosen, ...] = ()
    quantize: str = NONE
    columns: Mapping[str, Columns] = field(init=False, repr=False)
    _kinds: Mapping[str, Any] = field(init=False, repr=False)  # by target, int32 [A] or [L, A]
    _ratios: Mapping[str, Any] = field(init=False, repr=False)  # by leaf, float32 [L, A]
    _modules: dict[tuple[int, Half | None], tuple] = field(init=False, repr=False)

    def __post_init__(self):
        numbers = [self.model.layers.index(layer) for layer in self.model.kinds]
        of_adapters = nnx.filterlib.Any(nnx.LoRAParam, LoRAConstant)

        def module(number: int, half: Half | None) -> DecoderLayer:
            return DecoderLayer(
                self.model, self.specs, number=number, half=half, dtype=self.dtype, rngs=nnx.Rngs(0), prepared=True
            )

        modules = {
            (kind, half): nnx.split(nnx.eval_shape(partial(module, number, half)), of_adapters, LoRAKinds, ...)
            for kind, number in enumerate(numbers)
            for half in (None, *HALVES)
        }
        object.__setattr__(self, "_modules", modules)
        object.__setattr__(self, "_kinds", self._number_kinds())
        object.__setattr__(self, "_ratios", self._scale_ratios())
        columns = all_columns(self.specs, self.model.linears, tied=self.model.tie_embeddings)
        object.__setattr__(self, "columns", columns)

    def _number_kinds(self) -> dict[str, Any]:
        numbers = {}
        for target in self.model.targets:
            kinds = [spec.kind if target in spec.targets else None for spec in self.specs]
            names = tuple(dict.fromkeys(kind for kind in kinds if kind is not None))
            numbers[target] = self._by_layer(target, kind_numbers(names, kinds))
        return {target: number for target, number in numbers.items() if number is not None}

    def _by_layer(self, target: str, numbers_A: np.ndarray | None) -> np.ndarray | None:
        """Returns the numbers of the kinds in each layer, [L, A], if not all layers have all adapters."""
        if numbers_A is None or all(spec.patterns is None for spec in self.specs):
            return numbers_A
        has_LA = np.array([[spec.has(path) for spec in self.specs] for path in self._paths(target)])
        return np.where(has_LA, numbers_A, NO_KIND).astype(np.int32)

    def _scale_ratios(self) -> dict[str, np.ndarray]:
        """Returns by leaf what the adapters' scales in each layer are of `AdapterSpec.scale`, where they differ."""
        ratios: dict[str, np.ndarray] = {}
        patterned = [index for index, spec in enumerate(self.specs) if spec.patterns is not None]
        for target in self.model.targets if patterned else ():
            ratio_LA = np.ones((self.model.num_layers, len(self.specs)), np.float32)
            for index in patterned:
                spec = self.specs[index]
                ratio_LA[:, index] = [spec.scale_at(path) / spec.scale for path in self._paths(target)]
            leaves = {name for index in patterned for name in adapter_kind(self.specs[index].kind).scaled}
            if (ratio_LA != 1).any():
                paths = self.model.paths_of(target)
                ratios |= {f"{LAYERS}{path}.{leaf}": ratio_LA for path in paths for leaf in leaves}
        return ratios

    def _paths(self, target: str) -> list[str]:
        """Paths of a projection in all layers, also in those that lack it."""
        paths, numbers = self.model.paths_of(target), range(self.model.num_layers)
        in_layers = [[path for path in paths if number in self.model.layers_with(path)] for number in numbers]
        return [f"{LAYERS}{number}.{(path or paths)[0]}" for number, path in enumerate(in_layers)]

    def lora_shapes(self, num_layers: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the leaves: "layers.self_attn.q_proj.lora_a" → (L, K, C)."""
        stage = Extent(0, 2 * num_layers)
        return {
            name: (len(self.rows_of(name, stage)), *at.shape(self._sizes(name))) for name, at in self.columns.items()
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
            occupied: the adapters with their positions, see `Stage.occupied` (None: `specs`).
        """
        whole = Extent(0, 2 * self.model.num_layers)

        def shape_of(name: str, width: int) -> tuple[int, ...]:
            shape = self.columns[name].leaf.shape_in({**self._sizes(name), **dict.fromkeys(COUNTED, width)})
            return (len(self.rows_of(name, whole)), *shape)

        return {
            spec.name: {
                name: shape_of(name, width)
                for name, width in own_columns(self.columns, index, spec)
                if name not in self.prepared
            }
            for index, spec in (enumerate(self.specs) if occupied is None else occupied)
        }

    def _sizes(self, name: str) -> dict[str, int]:
        """Returns the sizes of a leaf's axes, but its rank."""
        if name.startswith(LAYERS):
            linear = next(linear for linear in self.model.linears if linear.path == path_of(name))
            return {"K": linear.in_features, "N": linear.out_features, "E": linear.experts}
        if name.startswith(SHARED):
            return dict(zip("KN", self._largest, strict=True))
        return {"D": self.model.hidden_size, "V": self.model.vocab_size}

    @property
    def _largest(self) -> tuple[int, int]:
        """Largest in and out features of the model, the sizes of shared leaves."""
        shapes = [linear.shape for linear in self.model.linears]
        return max(shape[0] for shape in shapes), max(shape[1] for shape in shapes)

    def frozen_shapes(self, half: Half | None = None, layer_kind: int = 0) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the frozen tensors of a layer of one kind, or of a half layer."""
        return self.model.kinds[layer_kind].frozen_shapes(half)

    def stored_shapes(self, half: Half | None = None, layer_kind: int = 0) -> dict[str, Any]:
        """Like `frozen_shapes`, as stored: for a quantised kernel, shapes by the names of its arrays."""
        kind, shapes = stored_kind(self.quantize), self.frozen_shapes(half, layer_kind)
        if kind is None:
            return dict(shapes)
        kernels = self.model.kinds[layer_kind].kernel_shapes(half)
        arrays = {name: kind.arrays(*shape) for name, shape in kernels.items()}
        return shapes | {name: {leaf: spec.shape for leaf, spec in parts.items()} for name, parts in arrays.items()}

    @property
    def dequantises(self) -> bool:
        """Whether kernels are dequantised to `dtype` before their products."""
        kind = stored_kind(self.quantize)
        return kind is not None and kind.operand is None

    def usable(self, stored: StoredWeights) -> Weights:
        """Converts stored weights of a layer or half layer to the form that its ops take."""
        kind = stored_kind(self.quantize)

        def used(weight: Weight) -> FrozenWeight:
            if not isinstance(weight, dict):
                return weight
            assert kind is not None, "weights were loaded with base.quantize, and these parts were made without"
            return kind.dequantise(weight, self.dtype) if kind.operand is None else kind.operand(weight)

        return LayerWeights({name: used(weight) for name, weight in stored.items()}, layer_kind(stored))

    def half(self, frozen: Mapping[str, Any]) -> Half | None:
        """Returns the half of a layer that has these tensors; None for a whole layer."""
        kind = layer_kind(frozen)
        return next(half for half in (None, *HALVES) if frozen.keys() == self.frozen_shapes(half, kind).keys())

    def first_lora(self) -> dict[str, dict[str, Any]]:
        """Returns the initial values of each adapter's leaves, numpy float32: name → leaf → [L, K, r] and so on.

        Those that depend on the frozen kernels are not final, see `Stage.start_from_base`.
        """
        return {spec.name: self.first_weights(spec) for spec in self.specs}

    def first_weights(self, spec: AdapterSpec) -> dict[str, Any]:
        """Returns the initial values of one adapter's leaves: leaf → [L, K, r] and so on."""
        targeted = [linear for linear in self.model.linears if linear.name in spec.targets]
        drawn = {
            f"{path}.{leaf}": array
            for linear in targeted
            for path in (f"{LAYERS}{linear.path}",)
            for leaf, array in init_layers(
                spec, path, *linear.shape, self.model.layers_with(linear.path), experts=linear.experts
            ).items()
        }
        shared = init_shared(spec, *self._largest)
        return (
            drawn
            | {f"{SHARED}{leaf}": array[None] for leaf, array in shared.items()}
            | self._first_head(spec)
            | self._first_rows(spec)
        )

    def _first_rows(self, spec: AdapterSpec) -> dict[str, Any]:
        """Returns zeros for the rows of trainable tokens, which start as those of the base."""
        return {
            f"{TOKENS}{table}": np.zeros((1, self.model.hidden_size, len(ids)), np.float32)
            for table in (TABLES if spec.tokens is not None else ())
            if (ids := self.token_ids(spec, table))
        }

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

    def _first_head(self, spec: AdapterSpec) -> dict[str, Any]:
        leaves = {} if spec.head is None else spec.head.by_key
        shapes = {key: leaf.shape_in(self._sizes(HEAD)) for key, leaf in leaves.items()}
        return {
            f"{HEAD}{key}": draw_leaf(leaf, spec.seed, f"{HEAD}{key}", shapes[key])[None]
            for key, leaf in leaves.items()
        }

    def inputs(self, batch: Any, *, dropout: bool) -> Inputs:  # a Microbatch of tracers
        """Computes what all layers share: rotary tables, segments, adapters and their columns, dropout keys."""
        row_key = batch.row_key if dropout and any(spec.dropout for spec in self.specs) else None
        segments = Segments(ids=batch.segment_ids, offsets=batch.segment_offsets, lengths=batch.segment_lengths)
        if batch.lora is not None:
            layers = layer_inputs(self.model, batch.positions, segments, self._context(batch, row_key))
            kinds = self._kinds_of(batch.lora.windows, batch.adapters)
            return Inputs(layers, batch.lora.windows, kinds, self._ratios_of(batch.adapters))
        lora = LoRAContext.of(
            self.specs,
            batch.tile_adapter,
            row_key=row_key,
            train=row_key is not None,
            implementation=self.settings.implementation,
        )
        places = jnp.maximum(batch.adapters, 0)
        kinds = {target: jnp.asarray(numbers)[..., places] for target, numbers in self._kinds.items()}
        layers = layer_inputs(self.model, batch.positions, segments, lora.in_places(batch.adapters))
        return Inputs(layers, windows(self.columns, batch.adapters), kinds, self._ratios_of(batch.adapters))

    def _ratios_of(self, adapters: Array) -> dict[str, Array]:
        """Returns `Inputs.ratios` of a microbatch's adapters."""
        return {name: jnp.asarray(ratio_LA)[:, jnp.maximum(adapters, 0)] for name, ratio_LA in self._ratios.items()}

    def kinds_in(self, places: np.ndarray) -> dict[str, np.ndarray]:
        """Returns `Inputs.kinds` of adapters in places, of which -1 are unused and have no kind."""
        present = np.maximum(places, 0)
        return {
            target: np.where(places >= 0, np.asarray(numbers)[..., present], NO_KIND)
            for target, numbers in self._kinds.items()
        }

    def ratios_in(self, places: np.ndarray) -> dict[str, np.ndarray]:
        """Returns `Inputs.ratios` of adapters in places."""
        return {name: ratio_LA[:, np.maximum(places, 0)] for name, ratio_LA in self._ratios.items()}

    def inputs_of(self, index: Array) -> Inputs:
        """Computes where the leaves of one adapter are, without a microbatch."""
        layers: Any = None
        return Inputs(layers, windows(self.columns, index[None]), {}, self._ratios_of(index[None]))

    def _kinds_of(self, windows: Array, adapters: Array) -> dict[str, Array]:
        """Returns `Inputs.kinds` of a microbatch that describes its adapters itself."""
        places = jnp.maximum(adapters, 0)

        def numbers(target: str) -> Array:
            paths = tuple(f"{LAYERS}{path}." for path in self.model.paths_of(target))
            rows = np.array([name.startswith(paths) for name in self.columns])
            is_target = jnp.any(windows[rows, 1] > 0, axis=0)
            return jnp.where(is_target, jnp.asarray(self._kinds[target])[..., places], NO_KIND)

        return {target: numbers(target) for target in self._kinds}

    def _context(self, batch: Any, row_key: Array | None) -> LoRAContext:
        """Returns the context of a microbatch that describes its adapters itself."""
        rows, adapters = batch.lora, batch.adapters
        drawn = None if row_key is None else Dropout(rate=rows.rate, key=rows.key, row_key=row_key)
        context = LoRAContext(
            tile_adapter=batch.tile_adapter,
            scale=rows.scale,
            dropout=drawn,
            implementation=self.settings.implementation,
            traced_ranks=rows.rank,
            drops_columns=drawn is not None and any(spec.drops_columns for spec in self.specs),
        )
        return context.numbered(adapters)

    def layer(self, frozen: Weights, lora: Weights, x_TD: Array, inputs: Inputs, number: Array) -> Array:
        """Runs one layer, or the half layer whose tensors are given.

        Args:
            frozen: tensors by name.
            lora: leaves by name, of the adapters in the microbatch's places, [P, K, R], [P, R, N] and so on.
            number: index of the layer in the model; dropout depends on it.
        """
        module = self._filled(frozen, lora, inputs, number)
        return run_layer(module, x_TD, inputs.layers, number, self.settings.attention)

    def layer_with_cache(
        self, frozen: Weights, lora: Weights, x_TD: Array, inputs: Inputs, number: Array, cache: Cache
    ) -> tuple[Array, Cache]:
        """Like `layer`, and returns the layer's cache with these rows, see `models.cache`."""
        module = self._filled(frozen, lora, inputs, number)
        return module.with_cache(x_TD, inputs.layers.at_layer(number), cache, self.settings.attention)

    def _filled(self, frozen: Weights, lora: Weights, inputs: Inputs, number: Array) -> DecoderLayer:
        """Returns a layer or half layer with these tensors."""
        graph, lora_state, kind_state, frozen_state = self._modules[layer_kind(frozen), self.half(frozen)]
        shared = {name.removeprefix(SHARED): leaf for name, leaf in lora.items() if name.startswith(SHARED)}
        names = _names(lora_state)
        leaves = {name: lora[name] if name in lora else shared[name.rpartition(".")[2]] for name in names}
        by_target = {target: kinds[number] if kinds.ndim == 2 else kinds for target, kinds in inputs.kinds.items()}
        kinds = {name: by_target[name.split(".")[-2]] for name in _names(kind_state)}
        return nnx.merge(
            graph, _fill_state(lora_state, leaves), _fill_state(kind_state, kinds), _fill_state(frozen_state, frozen)
        )

    @property
    def chosen(self) -> tuple[Chosen, ...]:
        """The objective of each adapter."""
        return self.objectives or (SFT,) * len(self.specs)

    def totals(
        self, norm: Array, head: Array, x_TD: Array, batch: Any, heads: Mapping[str, Array], chosen: Sequence[Chosen]
    ) -> dict[str, Array]:  # Microbatch of tracers
        """Computes sums of loss and metrics of each adapter, float32 [A].

        Args:
            heads: leaves of the objectives' heads by name, [1, C, ...], and of trained rows of the head.
            chosen: as in `totals_of`.
        """
        weights = jnp.where(batch.row_adapter >= 0, batch.weights, 0.0)
        hidden = final_norm(x_TD, norm, self.model)
        rows = heads.get(HEAD_ROWS)
        losses_T = self._token_losses(hidden, head, batch, weights, rows)
        needed = frozenset().union(*(objective.needs for objective in chosen))
        divergence_T = self._divergences(hidden, head, batch, chosen) if DIVERGENCE in needed else None
        of_samples = {} if batch.samples is None else heads  # a session has heads before an objective needs them
        return totals_of(
            losses_T,
            batch,
            chosen,
            None if needed.isdisjoint({HIDDEN, SCORE}) else hidden,
            divergence_T,
            {
                name.removeprefix(HEAD): self._of_samples(name, leaf, batch)
                for name, leaf in of_samples.items()
                if name != HEAD_ROWS
            },
        )

    def _of_samples(self, name: str, leaf: Array, batch: Any) -> Array:
        """Returns the tensor of each sample's adapter, [N, ...]; any for samples of others."""
        at, adapter_N = self.columns[name], batch.samples.adapter
        column_A = jnp.array([first if width else -1 for first, width in zip(at.first, at.width, strict=True)])
        return rows_of(leaf[0], jnp.where(adapter_N >= 0, column_A[jnp.maximum(adapter_N, 0)], -1))

    def states(self, norm: Array, x_TD: Array) -> Array:
        """Computes the states behind the final norm, [T, D]."""
        return final_norm(x_TD, norm, self.model).astype(self.dtype)

    def token_logprobs(self, norm: Array, head: Array, x_TD: Array, batch: Any, heads: Mapping[str, Array]) -> Array:
        """Computes log p of the learned target of each row, float32 [T]; 0 where nothing is learned."""
        hidden, learned = final_norm(x_TD, norm, self.model), (batch.weights != 0).astype(jnp.float32)
        return -self._token_losses(hidden, head, batch, learned, heads.get(HEAD_ROWS))

    def _divergences(self, hidden: Array, head: Array, batch: Any, chosen: Sequence[Chosen]) -> Array:
        weights, betas, temperatures = divergence_rows(batch, chosen)
        return token_divergences(
            hidden,
            batch.samples.teacher,
            head.T,
            weights,
            betas,
            temperatures,
            chunk=self.settings.loss_chunk,
            soft_cap=self.model.final_soft_cap,
            logit_scale=self.model.logit_scale,
        )

    def _token_losses(self, hidden: Array, head: Array, batch: Any, weights: Array, rows: Array | None) -> Array:
        """Computes the token losses.

        Args:
            rows: trained rows of the head, [1, D, C].
        """
        return token_losses(
            hidden,
            head.T,
            batch.targets,
            weights,
            chunk=self.settings.loss_chunk,
            soft_cap=self.model.final_soft_cap,
            logit_scale=self.model.logit_scale,
            replaced=None if rows is None else ReplacedRows(rows[0], self.token_columns("head"), batch.row_adapter),
        )


def cut(frozen: Mapping[str, Any], model: ModelConfig, stages: Sequence[Extent]) -> list[StageWeights]:
    """Splits the weights from `load_frozen` by stage. A tied embedding goes to the first and the last stage."""
    last = len(stages) - 1
    embed = frozen["embed_tokens.weight"]
    head = frozen.get("lm_head.weight", embed)
    return [
        StageWeights(
            extent=extent,
            pieces=[_weights(frozen, model, number, half) for number, half in extent.pieces],
            embed=embed if stage == 0 else None,
            norm=frozen["norm.weight"] if stage == last else None,
            head=head if stage == last else None,
        )
        for stage, extent in enumerate(stages)
    ]


def _weights(frozen: Mapping[str, Any], model: ModelConfig, number: int, half: Half | None) -> LayerWeights:
    names = model.layer(number).frozen_shapes(half)
    return LayerWeights({name: frozen[f"{LAYERS}{number}.{name}"] for name in names}, model.kind_of(number))


def _fill_state(state: Any, arrays: Mapping[str, Any]) -> Any:
    return nnx.from_flat_state([(path, leaf.replace(arrays[_name(path)])) for path, leaf in nnx.to_flat_state(state)])


def _names(state: Any) -> list[str]:
    return [_name(path) for path, _ in nnx.to_flat_state(state)]


def _name(path: tuple) -> str:
    return ".".join(map(str, path))
