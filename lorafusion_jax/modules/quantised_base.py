"""The frozen weights of any NNX model in fewer bytes.

K in · N out
"""

from __future__ import annotations

from typing import Any

from flax import nnx
from jaxtyping import Array

from lorafusion_jax.errors import ConfigError
from lorafusion_jax.modules.adapted import call_exchanged
from lorafusion_jax.modules.linear import Linear
from lorafusion_jax.modules.match import Candidate, check_owners, find_candidates, is_experts
from lorafusion_jax.modules.product import Result
from lorafusion_jax.modules.stored_weight import StoredWeight
from lorafusion_jax.modules.storing import check_mesh, store
from lorafusion_jax.modules.tree import dotted, exchanged_class
from lorafusion_jax.weights.table import NONE, check_kernels, stored_kind

_LINEAR, _PATH = "stored_linear", "stored_path"  # attributes of a layer without adapters whose weight is stored


class QuantisedParam(nnx.Variable):
    """A frozen weight in fewer bytes. It is no `nnx.Param`, so nothing asks for its gradient."""


def quantize_base(model: nnx.Module, quantize: str) -> nnx.Module:
    """Stores the frozen weights of a model's linear layers in fewer bytes, in place.

    Every linear layer is stored, with adapters or without, but the output head (a path that ends in head, lm_head,
    logits or classifier); embeddings, convolutions and norms stay as they are. Layers are converted one after another,
    so memory peaks at one layer above the model's own. fp8 also multiplies faster on Hopper; int8 and nf4 are
    dequantised for each product, forward and backward, and save memory only.

    A weight on a mesh is stored there, split as before, so place the model first. Its values are those of one device.
    For nf4 a device needs whole blocks of 64 in features.

    Args:
        model: from `apply_lora`.
        quantize: "fp8", "int8", "nf4" or "none", as `base.quantize` of a job file; "none" changes nothing.

    Returns:
        The model. Adapters are trained, saved and loaded as before. They belong to the quantised weights; merge them
        into the original ones: `apply_lora(Model(…), specs)`, `load_adapter`, `merge_adapter`.

    Raises:
        ConfigError: `lora.quantize-first`, no layer has adapters; `lora.quantized`, weights are stored already;
            `lora.quantize-mesh`, a weight cannot be stored on the mesh where it lies; `base.quantize-shape`;
            `plugin.unknown`.

    >>> from lorafusion_jax.modules import AdapterSpec, apply_lora
    >>> model = nnx.Dict(up=nnx.Linear(64, 128, use_bias=False, rngs=nnx.Rngs(0)))
    >>> model = quantize_base(apply_lora(model, [AdapterSpec(name="law", rank=2, alpha=4)], targets="up"), "int8")
    >>> model["up"].kernel.get_value().num_bytes  # 32768 in float32
    8704
    """
    if quantize == NONE:
        return model
    candidates = {id(candidate.module): candidate for candidate in find_candidates(model)}
    layers = [(candidate, linear) for candidate in candidates.values() if (linear := _linear(candidate)) is not None]
    check_owners(model)
    _check(layers, quantize)
    stored: dict[tuple[int, Linear], QuantisedParam] = {}  # layers without adapters may share a weight
    for candidate, linear in layers:
        variable = getattr(candidate.module, linear.weight)
        key = id(variable), linear
        if key not in stored:
            stored[key] = QuantisedParam(store(variable[...], linear, len(linear.stack), quantize))
        setattr(candidate.module, linear.weight, stored[key])
        if not hasattr(candidate.module, "lora_plan"):
            setattr(candidate.module, _LINEAR, linear)
            setattr(candidate.module, _PATH, dotted(candidate.path))
            candidate.module.__class__ = exchanged_class(type(candidate.module), "Quantised", _call_quantised)
    return model


def stored_weight(layer: Any) -> StoredWeight | None:
    """The stored weight of a linear layer; None if its weight is an array."""
    plan = getattr(layer, "lora_plan", None)
    linear = getattr(layer, _LINEAR, None) if plan is None else plan.linear
    value = None if linear is None else getattr(layer, linear.weight).get_value()
    return value if isinstance(value, StoredWeight) else None


def _linear(candidate: Candidate) -> Linear | None:
    if (plan := getattr(candidate.module, "lora_plan", None)) is not None:
        return plan.linear
    if (stored := getattr(candidate.module, _LINEAR, None)) is not None:
        return stored
    return (
        candidate.linear
        if isinstance(candidate.linear, Linear) and not (candidate.is_head or is_experts(candidate))
        else None
    )


def _check(layers: list[tuple[Candidate, Linear]], quantize: str) -> None:
    stored_kind(quantize)  # raises if there is none
    if not any(hasattr(candidate.module, "lora_plan") for candidate, _ in layers):
        raise ConfigError(
            "lora.quantize-first", "no layer has adapters.", fix="model = apply_lora(model, specs) before"
        )
    for candidate, linear in layers:
        where = dotted(candidate.path)
        if stored_weight(candidate.module) is not None:
            raise ConfigError("lora.quantized", "its weight is stored in fewer bytes already.", where=where)
        check_mesh(getattr(candidate.module, linear.weight)[...], linear, len(linear.stack), quantize, where)
    check_kernels(
        quantize, {dotted(candidate.path): (linear.in_features, linear.out_features) for candidate, linear in layers}
    )


def _call_quantised(layer: Any, *args: Any, **options: Any) -> Any:
    """Calls a layer without adapters like its own class, with its stored weight."""

    def product(x: Array, w: StoredWeight, inside: tuple[int, ...], result: Result) -> Array:
        return w.multiply(x, inside, result)

    return call_exchanged(layer, layer.stored_linear, product, layer.stored_path, args, options)
