"""The decoder in pieces for a pipeline: what a layer computes, and the makers of its inputs and losses.

Pure functions of dictionaries of arrays, which call the pieces of `models.forward`.
T packed tokens · D model width · P places for the adapters of a microbatch
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.config.schema import TrainSettings
from lorafusion_jax.layout.layer import HALVES, Half
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.models.cache import Cache
from lorafusion_jax.models.forward import run_layer
from lorafusion_jax.models.layer import DecoderLayer
from lorafusion_jax.models.loading import Weight
from lorafusion_jax.models.stream import Stream
from lorafusion_jax.modules.adapted import LoRAConstant
from lorafusion_jax.modules.lora import LoRAKinds
from lorafusion_jax.objective.protocol import SFT, Chosen
from lorafusion_jax.session.inputs import InputMaker, Inputs
from lorafusion_jax.session.leaf_layout import LeafLayout
from lorafusion_jax.session.leaves import SHARED
from lorafusion_jax.session.loss_head import LossHead
from lorafusion_jax.session.stage_weights import LayerWeights, StoredWeights, Weights, layer_kind
from lorafusion_jax.weights.table import NONE, stored_kind
from pallas_kernels import compiler_options
from pallas_kernels.frozen_weight import FrozenWeight

# What layers pass on: x [T, D]; with keys that later layers read, or with a loss of the routers, also the choices of
# the layers before, [2, M, E].
type Carried = Array | Stream | tuple[Array, Array]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The pieces of one model.

    Args:
        model: shapes and arithmetic.
        specs: the adapters, in stacking order.
        settings: implementations and loss chunk.
        objectives: objectives of the adapters (empty: supervised fine-tuning for all).
        quantize: storage of the kernels, see `weights.table`.
        tensor: devices that compute a layer together, each a part of it.

    Attributes:
        leaves: names, columns and shapes of the adapters' leaves.
        inputs: makes what all layers share of a microbatch.
        head: computes losses from the activations of the last layer.
    """

    model: ModelConfig
    specs: tuple[AdapterSpec, ...]
    settings: TrainSettings
    dtype: Any = jnp.bfloat16
    objectives: tuple[Chosen, ...] = ()
    quantize: str = NONE
    tensor: int = 1
    leaves: LeafLayout = field(init=False, repr=False)
    inputs: InputMaker = field(init=False, repr=False)
    head: LossHead = field(init=False, repr=False)
    _modules: dict[tuple[int, Half | None], tuple] = field(init=False, repr=False)

    def __post_init__(self):
        layout = LeafLayout(model=self.model, specs=self.specs)
        inputs = InputMaker(layout=layout, implementation=self.settings.implementation)
        object.__setattr__(self, "leaves", layout)
        object.__setattr__(self, "inputs", inputs)
        object.__setattr__(
            self, "head", LossHead(layout=layout, settings=self.settings, dtype=self.dtype, tensor=self.tensor)
        )
        object.__setattr__(self, "_modules", {})
        for kind in range(len(self.model.kinds)):
            self._module(kind, None)

    def _module(self, layer_kind: int, half: Half | None) -> tuple:
        """Returns a layer of a kind, or a half of it, split into structure and states: half layers when asked for."""
        if (layer_kind, half) not in self._modules:
            layer = partial(
                DecoderLayer,
                self.model.part_of(self.tensor),
                self.specs,
                number=self.model.layers.index(self.model.kinds[layer_kind]),
                half=half,
                dtype=self.dtype,
                prepared=True,
                parted=self.tensor > 1,
                parts=self.settings.parts if self.tensor > 1 else 1,
            )
            shapes = nnx.eval_shape(lambda: layer(rngs=nnx.Rngs(0)))
            of_adapters = nnx.filterlib.Any(nnx.LoRAParam, LoRAConstant)
            self._modules[layer_kind, half] = nnx.split(shapes, of_adapters, LoRAKinds, ...)
        return self._modules[layer_kind, half]

    def frozen_shapes(self, half: Half | None = None, layer_kind: int = 0) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the frozen tensors of a layer of one kind, or of a half layer."""
        return self.model.kinds[layer_kind].frozen_shapes(half)

    def stored_shapes(self, *, layer_kind: int = 0) -> dict[str, Any]:
        """Like `frozen_shapes`, as stored: for a quantised kernel, shapes by the names of its arrays."""
        kind, shapes = stored_kind(self.quantize), dict[str, Any](self.frozen_shapes(None, layer_kind))
        if kind is None:
            return shapes
        for linear in self.model.kinds[layer_kind].linears:
            arrays = kind.of(linear.experts).arrays(*linear.kernel_shape)
            shapes[f"{linear.path}.kernel"] = {leaf: spec.shape for leaf, spec in arrays.items()}
        return shapes

    @property
    def dequantises(self) -> bool:
        """Whether kernels are dequantised to `dtype` before their products."""
        kind = stored_kind(self.quantize)
        return kind is not None and kind.operand is None

    @property
    def compiler_options(self) -> dict[str, bool]:
        """Options of XLA for programs of layers, in training and in generation: their products are the same then."""
        return {} if self.settings.implementation == "xla" else compiler_options()

    def usable(self, stored: StoredWeights) -> Weights:
        """Converts stored weights of a layer or half layer to the form that its ops take."""
        kind, number = stored_kind(self.quantize), layer_kind(stored)
        experts = {f"{linear.path}.kernel": linear.experts for linear in self.model.kinds[number].linears}

        def used(name: str, weight: Weight) -> FrozenWeight:
            if not isinstance(weight, dict):
                return weight
            assert kind is not None, "weights were loaded with base.quantize, and these parts were made without"
            form = kind.of(experts[name])
            return form.dequantise(weight, self.dtype) if form.operand is None else form.operand(weight)

        return LayerWeights({name: used(name, weight) for name, weight in stored.items()}, number)

    def half(self, frozen: Mapping[str, Any]) -> Half | None:
        """Returns the half of a layer that has these tensors; None for a whole layer."""
        kind = layer_kind(frozen)
        return next(half for half in (None, *HALVES) if frozen.keys() == self.frozen_shapes(half, kind).keys())

    @property
    def chosen(self) -> tuple[Chosen, ...]:
        """The objective of each adapter."""
        return self.objectives or (SFT,) * len(self.specs)

    def layer(self, frozen: Weights, lora: Weights, x: Carried, inputs: Inputs, number: Array) -> Carried:
        """Runs one layer, or the half layer whose tensors are given.

        Args:
            frozen: tensors by name.
            lora: leaves by name, of the adapters in the microbatch's places, [P, K, R], [P, R, N] and so on.
            number: index of the layer in the model; dropout depends on it.
        """
        module = self._filled(frozen, lora, inputs, number)
        if not isinstance(x, tuple):
            return run_layer(module, x, inputs.layers, number, self.settings.attention)
        x_TD, choices_2ME = x
        y_TD, counted = module.with_choices(x_TD, inputs.layers.at_layer(number), self.settings.attention)
        return y_TD, choices_2ME if counted is None else choices_2ME + counted

    def layer_with_cache(
        self, frozen: Weights, lora: Weights, x: Array | Stream, inputs: Inputs, number: Array, cache: Cache
    ) -> tuple[Array | Stream, Cache]:
        """Like `layer`, and returns the layer's cache with these rows, see `models.cache`."""
        module = self._filled(frozen, lora, inputs, number)
        return module.with_cache(x, inputs.layers.at_layer(number), cache, self.settings.attention)

    def _filled(self, frozen: Weights, lora: Weights, inputs: Inputs, number: Array) -> DecoderLayer:
        """Returns a layer or half layer with these tensors."""
        graph, lora_state, kind_state, frozen_state = self._module(layer_kind(frozen), self.half(frozen))
        shared = {name.removeprefix(SHARED): leaf for name, leaf in lora.items() if name.startswith(SHARED)}
        names = _names(lora_state)
        leaves = {name: lora[name] if name in lora else shared[name.rpartition(".")[2]] for name in names}
        by_target = {target: kinds[number] if kinds.ndim == 2 else kinds for target, kinds in inputs.kinds.items()}
        kinds = {name: by_target[name.split(".")[-2]] for name in _names(kind_state)}
        return nnx.merge(
            graph, _fill_state(lora_state, leaves), _fill_state(kind_state, kinds), _fill_state(frozen_state, frozen)
        )


def _fill_state(state: Any, arrays: Mapping[str, Any]) -> Any:
    return nnx.from_flat_state([(path, leaf.replace(arrays[_name(path)])) for path, leaf in nnx.to_flat_state(state)])


def _names(state: Any) -> list[str]:
    return [_name(path) for path, _ in nnx.to_flat_state(state)]


def _name(path: tuple) -> str:
    return ".".join(map(str, path))
