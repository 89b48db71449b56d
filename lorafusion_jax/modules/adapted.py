"""What `apply_lora` makes of a layer: the same module, of a class that adds the adapters to its product.

K in · N out · R padded rank · A adapters
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array

from lorafusion_jax.adapters.kind import adapter_kind, leaves_of
from lorafusion_jax.errors import RunError
from lorafusion_jax.modules.bank import low_rank_bank
from lorafusion_jax.modules.context import LoRAContext
from lorafusion_jax.modules.init import init_bank
from lorafusion_jax.modules.linear import Linear
from lorafusion_jax.modules.product import exchange_product, unsupported_linear
from lorafusion_jax.modules.spec import AdapterSpec
from lorafusion_jax.modules.tree import Path, dotted
from lorafusion_jax.modules.use import context_of
from pallas_kernels import multi_lora_linear


class LoRASite(nnx.Variable):
    """Numbers of stacked layers for dropout: int32, one per layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAPlan:
    """What an adapted layer knows besides its arrays.

    Args:
        path: of the layer in its model.
        linear: its product.
        adapters: of the model, in stacking order.
        members: numbers of those that target this layer.
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
        """Layers in the stack, 1 for a single one."""
        return math.prod(self.linear.stack)

    def parameters(self) -> dict[str, int]:
        """Trainable numbers of each adapter here, at its own rank."""
        sizes = {"in_features": self.linear.in_features, "out_features": self.linear.out_features}
        members = [self.adapters[index] for index in self.members]
        return {it.name: self.layers * adapter_kind(it.kind).num_parameters(**sizes, rank=it.rank) for it in members}

    @property
    def site(self) -> int:
        return zlib.crc32(self.path.encode()) >> 1


def call_adapted(layer: Any, *args: Any, **options: Any) -> Any:
    """Calls a layer as its own class does, with its product with the weight computed with the adapter of each row.

    y = x (W + scale[k] · A[k] B[k]) wherever the layer says x W, with dropout on the x of the adapter only
    """
    plan: LoRAPlan = layer.lora_plan
    context = context_of(len(plan.adapters)) or _default(layer, plan)
    a_AKR, b_ARN = low_rank_bank(plan.kinds, {name: getattr(layer, name)[...] for name in plan.leaf_names})
    if a_AKR.ndim != 3:
        raise unsupported_linear(
            plan.path, "a stack of layers was called as one", "call it inside nnx.scan or nnx.vmap"
        )
    site = layer.lora_site[...] if plan.linear.stack else plan.site

    def product(x: Array, w: Array, inside: tuple[int, ...]) -> Array:
        if inside != plan.linear.inside:
            raise unsupported_linear(
                plan.path, f"its call sums over axes {inside} of the weight, not {plan.linear.inside}"
            )
        return lora_product(x, w, a_AKR, b_ARN, inside, context, site)

    graph, weight, rest = nnx.split(layer, lambda path, _: path == (plan.linear.weight,), ...)
    ((path, variable),) = nnx.to_flat_state(weight)

    def call(w: Array) -> Any:
        module = nnx.merge(graph, nnx.from_flat_state([(path, variable.replace(w))]), rest)
        return own_class(layer).__call__(module, *args, **options)

    return exchange_product(
        call, getattr(layer, plan.linear.weight)[...], product, where=plan.path, inside=plan.linear.inside
    )


def lora_product(
    x: Array, w: Array, a_AKR: Array, b_ARN: Array, inside: tuple[int, ...], context: LoRAContext, site: Any
) -> Array:
    """x [rows, contracted axes] times a weight of any axes, with the adapter of each row → [rows, other axes of w]."""
    rows, free = x.shape[: x.ndim - len(inside)], [axis for axis in range(w.ndim) if axis not in inside]
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
        dropout=dropout,
        implementation=context.implementation,
    )
    return y.reshape(*rows, *(w.shape[axis] for axis in free))


def _is_mapped(x: Array) -> bool:
    """Whether `jax.vmap` maps over an axis that the layer does not see; jax has no public name for such arrays."""
    return isinstance(x, Tracer) and hasattr(x, "batch_dim")


def adapt(layer: Any, linear: Linear, adapters: Sequence[AdapterSpec], path: Path, members: Sequence[int]) -> None:
    """Gives a layer its adapters, in place; the frozen weight stays the variable that it is."""
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
        layer.deterministic = False  # what `model.eval()` sets


@cache
def adapted_class(cls: type) -> type:
    """The class of a layer with adapters: a subclass of its own, so that `isinstance` says what it said."""
    return type(f"LoRA{cls.__name__}", (cls,), {"__call__": call_adapted, "__module__": cls.__module__})


def own_class(layer: nnx.Module) -> type:
    """The class that a layer had before it got adapters."""
    cls = type(layer)
    return cls.__mro__[1] if cls.__call__ is call_adapted else cls  # itself, while an adapter is merged into it


def _default(layer: Any, plan: LoRAPlan) -> LoRAContext:
    """The context of a model that is called without one: fine for one adapter without dropout."""
    if len(plan.adapters) > 1:
        names = ", ".join(spec.name for spec in plan.adapters)
        raise RunError(
            "lora.no-context",
            f"the model has {len(plan.adapters)} adapters ({names}), and nothing says which one the rows belong to.",
            fix=f"with use_adapters(specs, table): …   or use_adapters(specs, only='{plan.adapters[0].name}')",
        )
    spec = next(iter(plan.adapters))
    if spec.dropout and not layer.deterministic:
        raise RunError(
            "lora.dropout-step",
            f"{spec.name} has dropout={spec.dropout}, which needs the number of the step, to draw from.",
            fix=f"with use_adapters(specs, only='{spec.name}', step=STEP) in training; train=False or model.eval() "
            "in evaluation",
        )
    return LoRAContext.of(plan.adapters, only=0, train=False)
