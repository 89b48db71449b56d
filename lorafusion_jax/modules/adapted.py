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
from jaxtyping import Array

from lorafusion_jax.adapters.bank import kind_numbers, start_bank
from lorafusion_jax.adapters.init import init_bank
from lorafusion_jax.adapters.kind import Leaf
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.table import adapter_kind, leaves_of
from lorafusion_jax.errors import RunError
from lorafusion_jax.modules.context import LoRAContext
from lorafusion_jax.modules.linear import Linear
from lorafusion_jax.modules.lora_product import Leaves, lora_product
from lorafusion_jax.modules.product import Product, Result, Stored, exchange_product, unsupported_linear
from lorafusion_jax.modules.tree import Path, dotted
from lorafusion_jax.modules.use import context_of


class LoRAConstant(nnx.Variable):
    """A tensor of adapters that is constant in training."""


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
    def names(self) -> tuple[str, ...]:
        """The kinds of the members, each once."""
        return tuple(dict.fromkeys(self.adapters[index].kind for index in self.members))

    @property
    def numbers(self) -> np.ndarray | None:
        """Numbers of the adapters' kinds, see `kind_numbers`."""
        kinds = [spec.kind if index in self.members else None for index, spec in enumerate(self.adapters)]
        return kind_numbers(self.names, kinds)

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return leaves_of(self.names)

    @property
    def leaf_names(self) -> tuple[str, ...]:
        return tuple(leaf.name for leaf in self.leaves)

    @property
    def layers(self) -> int:
        """Number of layers in the stack, 1 for a single layer."""
        return math.prod(self.linear.stack)

    def parameters(self) -> dict[str, int]:
        """Counts the parameters of each adapter in this layer, at its own rank."""
        num_in, num_out = self.linear.in_features, self.linear.out_features
        return {
            spec.name: self.layers
            * adapter_kind(spec.kind).num_parameters(in_features=num_in, out_features=num_out, rank=spec.rank)
            for spec in (self.adapters[index] for index in self.members)
        }

    @property
    def site(self) -> int:
        return zlib.crc32(self.path.encode()) >> 1


def call_adapted(layer: Any, *args: Any, **options: Any) -> Any:
    """Calls a layer like its own class, but adds the adapter of each row to its product with the weight.

    y = x (W + scale[k] · A[k] B[k]) in place of x W, times the column factors of some kinds. Dropout only applies to
    the adapter's x.
    """
    plan: LoRAPlan = layer.lora_plan
    context = context_of(len(plan.adapters)) or _default(layer, plan)
    leaves = {leaf.name: getattr(layer, leaf.name)[...] for leaf in plan.leaves}
    if any(leaves[leaf.name].ndim != 1 + len(leaf.axes) for leaf in plan.leaves):
        raise unsupported_linear(
            plan.path, "a stack of layers was called as one", "call it inside nnx.scan or nnx.vmap"
        )
    site = layer.lora_site[...] if plan.linear.stack else plan.site

    def product(x: Array, w: Array | Stored, inside: tuple[int, ...], result: Result) -> Array:
        if inside != plan.linear.inside:
            raise unsupported_linear(
                plan.path, f"its call sums over axes {inside} of the weight, not {plan.linear.inside}"
            )
        bank = Leaves(names=plan.names, numbers=plan.numbers, leaves=leaves, rank=plan.rank)
        return lora_product(x, w, bank, inside, result, context=context, site=site, where=plan.path)

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


def adapt(
    layer: Any,
    linear: Linear,
    adapters: Sequence[AdapterSpec],
    path: Path,
    members: Sequence[int],
    largest: tuple[int, int],
    shared: dict[str, LoRAConstant],
) -> None:
    """Adds adapters to a layer in place. Its frozen weight stays the same variable.

    Args:
        largest: K and N of the tensors that layers share.
        shared: these tensors by name, filled by the first layer. A stack of layers has its own.
    """
    rank = max(adapters[index].rank for index in members)
    plan = LoRAPlan(path=dotted(path), linear=linear, adapters=tuple(adapters), members=tuple(members), rank=rank)
    paths = [plan.path]
    if linear.stack:
        paths = [".".join(map(str, (plan.path, *number))).lstrip(".") for number in np.ndindex(linear.stack)]
    sizes = (linear.in_features, linear.out_features)
    banks = [init_bank(adapters, each, *sizes, rank, members, largest) for each in paths]
    banks = _started(plan, banks, getattr(layer, linear.weight))
    layer.__class__ = adapted_class(type(layer))
    layer.lora_plan = plan
    for leaf in plan.leaves:
        array = np.stack([bank[leaf.name] for bank in banks])
        whole = jnp.asarray(array.reshape(*linear.stack, *array.shape[1:]))
        if leaf.shared and not linear.stack:
            setattr(layer, leaf.name, shared.setdefault(leaf.name, LoRAConstant(whole)))
        else:
            setattr(layer, leaf.name, (nnx.LoRAParam if leaf.trainable else LoRAConstant)(whole))
    if linear.stack:
        sites = np.array([zlib.crc32(each.encode()) >> 1 for each in paths], np.int32)
        layer.lora_site = LoRASite(jnp.asarray(sites.reshape(linear.stack)))
    if not hasattr(layer, "deterministic"):
        layer.deterministic = False  # `model.eval()` sets it to True


def _started(plan: LoRAPlan, banks: list[dict[str, Any]], weight: Any) -> list[dict[str, Any]]:
    """Fills in the initial values that depend on the weight, for each layer of a stack."""
    if not any(adapter_kind(name).start for name in plan.names):
        return banks
    linear = plan.linear
    if not isinstance(weight, nnx.Param):
        raise unsupported_linear(
            plan.path,
            "its weight is stored in fewer bytes, and the adapter starts from it",
            "apply_lora before quantize_base",
        )
    sizes, inside = (linear.in_features, linear.out_features), list(linear.inside)
    kernels = weight[...].reshape(-1, *weight.shape[len(linear.stack) :])
    free = [axis for axis in range(kernels.ndim - 1) if axis not in inside]
    scales = [spec.scale for spec in plan.adapters]
    return [
        start_bank(
            plan.names,
            plan.numbers,
            {name: jnp.asarray(array) for name, array in bank.items()},
            jnp.transpose(kernel, [*inside, *free]).reshape(sizes),
            shape=sizes,
            rank=plan.rank,
            scales=scales,
        )
        for bank, kernel in zip(banks, kernels, strict=True)
    ]


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
