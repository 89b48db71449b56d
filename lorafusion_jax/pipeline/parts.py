"""The decoder in the pieces that a pipeline runs: embedding, layers one by one, final norm and head.

Pure functions over plain dictionaries of arrays; what they compute are the pieces of `models.forward`.
T packed tokens · D model width · V vocabulary · A adapters
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from lorafusion_jax.config.schema import TrainSettings
from lorafusion_jax.layout.extent import Extent
from lorafusion_jax.layout.layer import HALVES, LAYER, Half
from lorafusion_jax.models import ModelConfig, Segments
from lorafusion_jax.models.forward import final_norm, layer_inputs, run_layer
from lorafusion_jax.models.layer import DecoderLayer, LayerInputs
from lorafusion_jax.models.loading import Weight
from lorafusion_jax.modules import LoRAContext
from lorafusion_jax.modules.init import init_leaves
from lorafusion_jax.modules.spec import AdapterSpec
from lorafusion_jax.objective.batch import totals_of
from lorafusion_jax.objective.loss import token_losses
from lorafusion_jax.objective.protocol import SFT, Chosen
from lorafusion_jax.weights.table import NONE, stored_kind
from pallas_kernels.frozen_weight import FrozenWeight

Weights = dict[str, FrozenWeight]  # "self_attn.q_proj.kernel" -> [K, N]
StoredWeights = Mapping[str, Weight]  # the same names; a quantised kernel is a dictionary of its arrays


@dataclass(slots=True, kw_only=True)
class StageWeights:
    """Frozen arrays of one stage.

    Attributes:
        extent: its layers.
        pieces: by name, for each of its layers or halves of them.
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


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the pieces of one model compute.

    Args:
        model: shapes and arithmetic.
        specs: the adapters, in stacking order.
        settings: implementations and loss chunk.
        objectives: of the adapters; empty: supervised fine-tuning for all.
        quantize: how the kernels are stored, see `weights.table`.
    """

    model: ModelConfig
    specs: tuple[AdapterSpec, ...]
    settings: TrainSettings
    dtype: Any = jnp.bfloat16
    objectives: tuple[Chosen, ...] = ()
    quantize: str = NONE
    _modules: dict[Half | None, tuple] = field(init=False, repr=False)

    def __post_init__(self):
        modules = {
            half: nnx.split(
                nnx.eval_shape(
                    lambda half=half: DecoderLayer(
                        self.model, self.specs, half=half, dtype=self.dtype, rngs=nnx.Rngs(0)
                    )
                ),
                nnx.LoRAParam,
                ...,
            )
            for half in (None, *HALVES)
        }
        object.__setattr__(self, "_modules", modules)

    def lora_shapes(self, num_layers: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the trainable leaves of that many layers: "layers.self_attn.q_proj.lora_a" → (L, A, K, R)."""
        _, lora, _ = self._modules[None]
        return {f"layers.{_name(path)}": (num_layers, *leaf.shape) for path, leaf in nnx.to_flat_state(lora)}

    def frozen_shapes(self, half: Half | None = None) -> dict[str, tuple[int, ...]]:
        """Shapes of the frozen tensors of one layer, or of half of it."""
        return LAYER.frozen_shapes(self.model, half)

    def stored_shapes(self, half: Half | None = None) -> dict[str, Any]:
        """The same as they are stored: for a quantised kernel, shapes by the names of its arrays."""
        kind, shapes = stored_kind(self.quantize), self.frozen_shapes(half)
        if kind is None:
            return dict(shapes)
        kernels = LAYER.kernel_shapes(self.model, half)
        arrays = {name: kind.arrays(*shape) for name, shape in kernels.items()}
        return shapes | {name: {leaf: one.shape for leaf, one in each.items()} for name, each in arrays.items()}

    @property
    def dequantises(self) -> bool:
        """Whether kernels become arrays of `dtype` before they multiply."""
        kind = stored_kind(self.quantize)
        return kind is not None and kind.operand is None

    def usable(self, stored: StoredWeights) -> Weights:
        """Weights of a layer, or of a part of it, as its ops take them."""
        kind = stored_kind(self.quantize)

        def used(weight: Weight) -> FrozenWeight:
            if not isinstance(weight, dict):
                return weight
            assert kind is not None, "weights were loaded with base.quantize, and these parts were made without"
            return kind.dequantise(weight, self.dtype) if kind.operand is None else kind.operand(weight)

        return {name: used(weight) for name, weight in stored.items()}

    def half(self, frozen: Mapping[str, Any]) -> Half | None:
        """Which half of a layer these tensors are; None: a whole one."""
        return next(half for half in (None, *HALVES) if frozen.keys() == self.frozen_shapes(half).keys())

    def first_lora(self) -> dict[str, Any]:
        """Initial weights of all adapters and layers, numpy float32 [L, A, K, R]."""
        return init_leaves(self.specs, self.lora_shapes(self.model.num_layers))

    def inputs(self, batch: Any, *, dropout: bool) -> LayerInputs:  # a Microbatch of tracers
        """What all layers share of a microbatch: rotary tables, segments, adapter of each tile, dropout keys."""
        row_key = batch.row_key if dropout and any(spec.dropout for spec in self.specs) else None
        segments = Segments(ids=batch.segment_ids, offsets=batch.segment_offsets, lengths=batch.segment_lengths)
        lora = LoRAContext.of(
            self.specs,
            batch.tile_adapter,
            row_key=row_key,
            train=row_key is not None,
            implementation=self.settings.implementation,
        )
        return layer_inputs(self.model, batch.positions, segments, lora)

    def layer(self, frozen: Weights, lora: Weights, x_TD: Array, inputs: LayerInputs, number: Array) -> Array:
        """Runs one layer, or the half of it whose tensors are given.

        Args:
            frozen: its tensors by name.
            lora: its trainable leaves by name, [A, K, R] and [A, R, N].
            number: of the layer in the model; dropout depends on it.
        """
        graph, lora_state, frozen_state = self._modules[self.half(frozen)]
        module = nnx.merge(graph, _filled(lora_state, lora), _filled(frozen_state, frozen))
        return run_layer(module, x_TD, inputs, number, self.settings.attention)

    @property
    def chosen(self) -> tuple[Chosen, ...]:
        """The objective of each adapter."""
        return self.objectives or (SFT,) * len(self.specs)

    def totals(self, norm: Array, head: Array, x_TD: Array, batch: Any) -> dict[str, Array]:  # Microbatch of tracers
        """Sums of loss and metrics of each adapter, float32 [A]."""
        weights = jnp.where(batch.row_adapter >= 0, batch.weights, 0.0)
        hidden = final_norm(x_TD, norm, self.model)
        losses_T = token_losses(hidden, head.T, batch.targets, weights, chunk=self.settings.loss_chunk)
        return totals_of(losses_T, batch, self.chosen)


def cut(frozen: Mapping[str, Any], stages: Sequence[Extent]) -> list[StageWeights]:
    """Gives each stage its part of the weights that `load_frozen` read; tied embeddings serve both ends."""
    last = len(stages) - 1
    embed = frozen["embed_tokens.weight"]
    head = frozen.get("lm_head.weight", embed)
    return [
        StageWeights(
            extent=own,
            pieces=[_weights(frozen, f"layers.{number}.", half) for number, half in own.pieces],
            embed=embed if stage == 0 else None,
            norm=frozen["norm.weight"] if stage == last else None,
            head=head if stage == last else None,
        )
        for stage, own in enumerate(stages)
    ]


def _weights(frozen: Mapping[str, Any], layer: str, half: Half | None) -> StoredWeights:
    own = {name.removeprefix(layer): weight for name, weight in frozen.items() if name.startswith(layer)}
    return {name: weight for name, weight in own.items() if half in (None, LAYER.half_of(name))}


def _filled(state: Any, arrays: Weights) -> Any:
    return nnx.from_flat_state([(path, leaf.replace(arrays[_name(path)])) for path, leaf in nnx.to_flat_state(state)])


def _name(path: tuple) -> str:
    return ".".join(map(str, path))
