"""The frozen weights of any NNX model in fewer bytes.

K in · N out
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from lorafusion_jax.errors import ConfigError
from lorafusion_jax.modules.adapted import call_exchanged, exchanged_class
from lorafusion_jax.modules.linear import Linear
from lorafusion_jax.modules.match import Place, find_places
from lorafusion_jax.modules.tree import dotted
from lorafusion_jax.weights.table import NONE, check_kernels, stored_kind
from pallas_kernels.frozen_weight import QuantisedWeight, frozen_product, frozen_product_transposed

_LINEAR, _PATH = "stored_linear", "stored_path"  # attributes of a layer without adapters whose weight is stored


class QuantisedParam(nnx.Variable):
    """A frozen weight in fewer bytes. It is no `nnx.Param`, so nothing asks for its gradient."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("arrays",),
    meta_fields=("kind", "shape", "dtype", "inside"),
)
@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeight:
    """The stored arrays of one layer's weight, or of a stack of layers.

    Args:
        arrays: by name, after the stack's axes.
        kind: name of a stored kind, "nf4".
        shape: shape of one layer's weight before it was stored.
        dtype: its dtype.
        inside: axes that the product sums over.
    """

    arrays: Mapping[str, Array]
    kind: str
    shape: tuple[int, ...]
    dtype: Any
    inside: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def num_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.arrays.values())

    @property
    def num_weights(self) -> int:
        """Weights of all layers of the stack."""
        kind = stored_kind(self.kind)
        assert kind is not None
        name, one = next(iter(kind.arrays(*self.matrix).items()))
        return math.prod(self.shape) * (self.arrays[name].size // math.prod(one.shape))

    @property
    def matrix(self) -> tuple[int, int]:
        """(K, N)."""
        inside = math.prod(self.shape[axis] for axis in self.inside)
        return inside, math.prod(self.shape) // inside

    def operand(self) -> QuantisedWeight:
        """The weight [K, N] as the ops take it."""
        kind = stored_kind(self.kind)
        assert kind is not None
        return DequantisedWeight(weight=self) if kind.operand is None else kind.operand(self.arrays)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class DequantisedWeight:
    """Dequantises in each product, so a backward pass holds the stored arrays and not the weight."""

    weight: StoredWeight

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.matrix

    @property
    def ndim(self) -> int:
        return 2

    def multiply(self, x: Float[Array, "*B K"]) -> Float[Array, "*B N"]:
        """x W."""
        return frozen_product(x, self._array(x.dtype))

    def multiply_transposed(self, dy: Float[Array, "*B N"]) -> Float[Array, "*B K"]:
        """dY W^T."""
        return frozen_product_transposed(dy, self._array(dy.dtype))

    def _array(self, dtype: Any) -> Array:
        kind = stored_kind(self.weight.kind)
        assert kind is not None
        return kind.dequantise(self.weight.arrays, dtype)


def quantize_base(model: nnx.Module, quantize: str) -> nnx.Module:
    """Stores the frozen weights of a model's linear layers in fewer bytes, in place.

    Every linear layer is stored, with adapters or without, but the output head (a path that ends in head, lm_head,
    logits or classifier); embeddings, convolutions and norms stay as they are. Layers are converted one after another,
    so memory peaks at one layer above the model's own. fp8 also multiplies faster on Hopper; int8 and nf4 are
    dequantised for each product, forward and backward, and save memory only.

    Args:
        model: from `apply_lora`.
        quantize: "fp8", "int8", "nf4" or "none", as `base.quantize` of a job file; "none" changes nothing.

    Returns:
        The model. Adapters are trained, saved and loaded as before. They belong to the quantised weights; merge them
        into the original ones: `apply_lora(Model(…), specs)`, `load_adapter`, `merge_adapter`.

    Raises:
        ConfigError: `lora.quantize-first`, no layer has adapters; `lora.quantized`, weights are stored already;
            `lora.quantize-mesh`, a weight is split over devices; `base.quantize-shape`; `plugin.unknown`.

    >>> from lorafusion_jax.modules import AdapterSpec, apply_lora
    >>> model = nnx.Dict(up=nnx.Linear(64, 128, use_bias=False, rngs=nnx.Rngs(0)))
    >>> model = quantize_base(apply_lora(model, [AdapterSpec(name="law", rank=2, alpha=4)], targets="up"), "int8")
    >>> model["up"].kernel.get_value().num_bytes  # 32768 in float32
    8704
    """
    if quantize == NONE:
        return model
    places = {id(place.module): place for place in find_places(model)}
    layers = [(place, linear) for place in places.values() if (linear := _linear(place)) is not None]
    _check(layers, quantize)
    for place, linear in layers:
        weight = getattr(place.module, linear.weight)[...]
        setattr(place.module, linear.weight, QuantisedParam(_stored(weight, linear, quantize)))
        if not hasattr(place.module, "lora_plan"):
            setattr(place.module, _LINEAR, linear)
            setattr(place.module, _PATH, dotted(place.path))
            place.module.__class__ = exchanged_class(type(place.module), "Quantised", _call_quantised)
    return model


def stored_weight(layer: Any) -> StoredWeight | None:
    """The stored weight of a linear layer; None if its weight is an array."""
    plan = getattr(layer, "lora_plan", None)
    linear = getattr(layer, _LINEAR, None) if plan is None else plan.linear
    value = None if linear is None else getattr(layer, linear.weight).get_value()
    return value if isinstance(value, StoredWeight) else None


def _linear(place: Place) -> Linear | None:
    if (plan := getattr(place.module, "lora_plan", None)) is not None:
        return plan.linear
    if (stored := getattr(place.module, _LINEAR, None)) is not None:
        return stored
    return place.linear if isinstance(place.linear, Linear) and not place.is_head else None


def _check(layers: list[tuple[Place, Linear]], quantize: str) -> None:
    stored_kind(quantize)  # raises if there is none
    if not any(hasattr(place.module, "lora_plan") for place, _ in layers):
        raise ConfigError(
            "lora.quantize-first", "no layer has adapters.", fix="model = apply_lora(model, specs) before"
        )
    for place, linear in layers:
        where = dotted(place.path)
        if stored_weight(place.module) is not None:
            raise ConfigError("lora.quantized", "its weight is stored in fewer bytes already.", where=where)
        if len(getattr(place.module, linear.weight)[...].sharding.device_set) > 1:
            raise ConfigError(
                "lora.quantize-mesh",
                "a weight on a mesh cannot be quantised.",
                where=where,
                why="its scales would have to be split with it, and the ops do not do that yet",
                fix="one device, or `base.quantize` of a job file, which shards quantised weights",
            )
    check_kernels(quantize, {dotted(place.path): (it.in_features, it.out_features) for place, it in layers})


def _stored(weight: Array, linear: Linear, quantize: str) -> StoredWeight:
    kind, stack = stored_kind(quantize), len(linear.stack)
    assert kind is not None
    free = [axis for axis in range(len(linear.shape)) if axis not in linear.inside]
    order = [*range(stack), *(stack + axis for axis in (*linear.inside, *free))]
    kernels = jnp.transpose(weight, order).reshape(-1, linear.in_features, linear.out_features)
    quantise = jax.jit(lambda kernel: dict(kind.quantise(kernel.astype(jnp.float32))))
    layers = [quantise(kernel) for kernel in kernels]
    arrays = jax.tree.map(lambda *leaves: jnp.stack(leaves).reshape(*linear.stack, *leaves[0].shape), *layers)
    return StoredWeight(arrays=arrays, kind=quantize, shape=linear.shape, dtype=weight.dtype, inside=linear.inside)


def _call_quantised(layer: Any, *args: Any, **options: Any) -> Any:
    """Calls a layer without adapters like its own class, with its stored weight."""

    def product(x: Array, w: StoredWeight, inside: tuple[int, ...]) -> Array:
        rows = x.shape[: x.ndim - len(inside)]
        operand = w.operand()
        y = frozen_product(x.reshape(*rows, operand.shape[0]), operand)
        return y.reshape(*rows, *(size for axis, size in enumerate(w.shape) if axis not in inside))

    return call_exchanged(layer, layer.stored_linear, product, layer.stored_path, args, options)
