"""Layers adapted by `apply_lora`: the same modules, with a subclass that adds the adapters to their product.

K in · N out · R padded rank · A adapters
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array

from lorafusion_jax.adapters.bank import low_rank_bank
from lorafusion_jax.adapters.init import init_bank
from lorafusion_jax.adapters.kind import adapter_kind, leaves_of
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.errors import RunError
from lorafusion_jax.modules.context import LoRAContext
from lorafusion_jax.modules.linear import Linear
from lorafusion_jax.modules.product import Product, Stored, exchange_product, unsupported_linear
from lorafusion_jax.modules.tree import Path, dotted
from lorafusion_jax.modules.use import context_of
from pallas_kernels import multi_lora_linear


class LoRASite(nnx.Variable):
    """Dropout sites of stacked layers: int32, one per layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAPlan:
    """Static data of an adapted layer.

    Args:
        path: path of the layer in its model.
        linear: its product.
        adapters: adapters of the model, in stacking order.
        members: indices of the adapters that target this layer.
        rank: R.
    """

    path: str
    linear: Linear
    adapters: tuple[AdapterSpec, ...]
    members: tuple[int, ...]
    rank: int

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(spec.kind for spec in self.adapters)

    @property
    def leaf_names(self) -> tuple[str, ...]:
        return tuple(leaf.name for leaf in leaves_of(self.kinds))

    @property
    def layers(self) -> int:
        """Number of layers in the stack, 1 for a single layer."""
        return math.prod(self.linear.stack)

    def parameters(self) -> dict[str, int]:
        """Counts the parameters of each adapter in this layer, at its own rank."""
        sizes = {"in_features": self.linear.in_features, "out_features": self.linear.out_features}
        members = [self.adapters[index] for index in self.members]
        return {it.name: self.layers * adapter_kind(it.kind).num_parameters(**sizes, rank=it.rank) for it in members}

    @property
    def site(self) -> int:
        return zlib.crc32(self.path.encode()) >> 1


def call_adapted(layer: Any, *args: Any, **options: Any) -> Any:
    """Calls a layer like its own class, but adds the adapter of each row to its product with the weight.

    y = x (W + scale[k] · A[k] B[k]) in place of x W. Dropout only applies to the adapter's x.
    """
    plan: LoRAPlan = layer.lora_plan
    context = context_of(len(plan.adapters)) or _default(layer, plan)
    a_AKR, b_ARN = low_rank_bank(plan.kinds, {name: getattr(layer, name)[...] for name in plan.leaf_names})
    if a_AKR.ndim != 3:
        raise unsupported_linear(
            plan.path, "a stack of layers was called as one", "call it inside nnx.scan or nnx.vmap"
        )
    site = layer.lora_site[...] if plan.linear.stack else plan.site

    def product(x: Array, w: Array | Stored, inside: tuple[int, ...]) -> Array:
        if inside != plan.linear.inside:
            raise unsupported_linear(
                plan.path, f"its call sums over axes {inside} of the weight, not {plan.linear.inside}"
            )
        return lora_product(x, w, a_AKR, b_ARN, inside, context, site)

    return call_exchanged(layer, plan.linear, product, plan.path, args, options)


def call_exchanged(
    layer: Any, linear: Linear, product: Product, where: str, args: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """Calls a layer like its own class, with `product` in place of its product with its weight."""
    graph, weight, rest = nnx.split(layer, lambda path, _: path == (linear.weight,), ...)
    ((path, variable),) = nnx.to_flat_state(weight)

    def call(w: Array) -> Any:
        module = nnx.merge(graph, nnx.from_flat_state([(path, variable.replace(w))]), rest)
        return own_class(layer).__call__(module, *args, **options)

    value = getattr(layer, linear.weight).get_value()
    return exchange_product(call, value, product, where=where, inside=linear.inside, inputs=(args, options))


def lora_product(
    x: Array, w: Array | Stored, a_AKR: Array, b_ARN: Array, inside: tuple[int, ...], context: LoRAContext, site: Any
) -> Array:
    """Multiplies x [rows, contracted axes] by a weight plus each row's adapter → [rows, other axes of w]."""
    rows, free = x.shape[: x.ndim - len(inside)], [axis for axis in range(w.ndim) if axis not in inside]
    if isinstance(w, Stored):
        w_KN = w.operand()
    else:
        w_KN = jnp.transpose(w, [*inside, *free]).reshape(a_AKR.shape[1], b_ARN.shape[2])
    if context.draw is not None and context.draw.examples is None and _is_mapped(x):
        raise RunError(
            "lora.vmap-dropout",
            "under jax.vmap every example would draw the same dropout.",
            fix="use_adapters(specs, …, step=step, examples=NUMBER), with the number of the example mapped, too",
        )
    table, dropout = context.at_rows(rows, site)
    y = multi_lora_linear(
        x.reshape(*rows, w_KN.shape[0]),
        w_KN,
        a_AKR,
        b_ARN,
        tile_adapter=table,
        scale=context.scale,
        ranks=context.ranks,
        dropout=dropout,
        implementation=context.implementation,
    )
    return y.reshape(*rows, *(w.shape[axis] for axis in free))


def _is_mapped(x: Array) -> bool:
    """Whether `jax.vmap` maps x over an axis that the layer does not see. jax has no public type for such arrays."""
    return isinstance(x, Tracer) and hasattr(x, "batch_dim")


def adapt(layer: Any, linear: Linear, adapters: Sequence[AdapterSpec], path: Path, members: Sequence[int]) -> None:
    """Adds adapters to a layer in place. Its frozen weight stays the same variable."""
    rank = max(adapters[index].rank for index in members)
    plan = LoRAPlan(path=dotted(path), linear=linear, adapters=tuple(adapters), members=tuple(members), rank=rank)
    paths = [plan.path]
    if linear.stack:
        paths = [".".join(map(str, (plan.path, *number))).lstrip(".") for number in np.ndindex(linear.stack)]
    banks = [init_bank(adapters, each, linear.in_features, linear.out_features, rank, members) for each in paths]
    layer.__class__ = adapted_class(type(layer))
    layer.lora_plan = plan
    for name in plan.leaf_names:
        leaf = np.stack([bank[name] for bank in banks])
        setattr(layer, name, nnx.LoRAParam(jnp.asarray(leaf.reshape(*linear.stack, *leaf.shape[1:]))))
    if linear.stack:
        sites = np.array([zlib.crc32(each.encode()) >> 1 for each in paths], np.int32)
        layer.lora_site = LoRASite(jnp.asarray(sites.reshape(linear.stack)))
    if not hasattr(layer, "deterministic"):
        layer.deterministic = False  # `model.eval()` sets it to True


def adapted_class(cls: type) -> type:
    """Returns the class of a layer with adapters."""
    return exchanged_class(cls, "LoRA", call_adapted)


@cache
def exchanged_class(cls: type, prefix: str, call: Callable[..., Any]) -> type:
    """Returns a subclass of a layer's class that is called otherwise: `isinstance` still holds."""
    return type(f"{prefix}{cls.__name__}", (cls,), {"__call__": call, "lora_class": cls, "__module__": cls.__module__})


def own_class(layer: nnx.Module) -> type:
    """Returns the class of a layer before its product was exchanged."""
    return getattr(type(layer), "lora_class", type(layer))


def _default(layer: Any, plan: LoRAPlan) -> LoRAContext:
    """Returns the context of a model that is called without one, which works for one adapter without dropout."""
    if len(plan.adapters) > 1:
        names = ", ".join(spec.name for spec in plan.adapters)
        raise RunError(
            "lora.no-context",
            f"the model has {len(plan.adapters)} adapters ({names}), and the call does not say whose the rows are.",
            fix=f"with use_adapters(specs, table): …   or use_adapters(specs, only='{plan.adapters[0].name}')",
        )
    spec = next(iter(plan.adapters))
    if spec.dropout and not layer.deterministic:
        raise RunError(
            "lora.dropout-step",
            f"{spec.name} has dropout={spec.dropout}, which needs the number of the step.",
            fix=f"with use_adapters(specs, only='{spec.name}', step=STEP) in training; train=False or model.eval() "
            "in evaluation",
        )
    return LoRAContext.of(plan.adapters, only=0, train=False)
