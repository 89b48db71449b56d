"""Layers adapted by `apply_lora`: the same modules, with a subclass that adds the adapters to their product.

K in · N out · R padded rank · A adapters
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.errors import TraceContextError
from jaxtyping import Array

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.errors import RunError
from lorafusion_jax.modules.context import LoRAContext
from lorafusion_jax.modules.linear import Linear
from lorafusion_jax.modules.lora_product import Leaves, expert_products, lora_product
from lorafusion_jax.modules.plan import Calls, LoRAPlan
from lorafusion_jax.modules.product import Product, Result, Stored, exchange_product, unsupported_linear
from lorafusion_jax.modules.siblings import Call, product_beside_siblings
from lorafusion_jax.modules.tree import Path, dotted, exchanged_class, own_class
from lorafusion_jax.modules.use import context_of, note_reader

_READ = "lora_read"  # metadata of a stand-in: the variable, and what notes that it is read
TABULATED = "_nnx_tabulate_id"  # attribute of the modules in the copy that `nnx.tabulate` runs


class LoRAConstant(nnx.Variable):
    """A tensor of adapters that is constant in training."""


class LoRASite(nnx.Variable):
    """Dropout sites of stacked layers: int32, one per layer."""


def call_adapted(layer: Any, *args: Any, **options: Any) -> Any:
    """Calls a layer like its own class, but adds the adapter of each row to its product with the weight.

    y = x (W + scale[k] · A[k] B[k]) in place of x W, times the column factors of some kinds. Dropout only applies to
    the adapter's x.
    """
    plan: LoRAPlan = layer.lora_plan
    tabulated = hasattr(layer, TABULATED)
    active_context = context_of(plan, tabulated=tabulated)
    if tabulated:  # for shapes only, which adapters do not change; it also wraps the methods of classes
        return inspect.unwrap(own_class(layer).__call__)(layer, *args, **options)
    context = active_context or _default(layer, plan)
    leaves = {leaf.name: getattr(layer, leaf.name)[...] for leaf in plan.leaves}
    experts = plan.linear.experts
    if any(leaves[leaf.name].ndim != 1 + len(leaf.axes) + experts for leaf in plan.leaves):
        raise unsupported_linear(
            plan.path, "a stack of layers was called as one", "call it inside nnx.scan or nnx.vmap"
        )
    site: Any = layer.lora_site[...] if plan.linear.stack else int(plan.sites)

    def product(x: Array, w: Array | Stored, inside: tuple[int, ...], result: Result) -> Array:
        axes = tuple(axis + experts for axis in plan.linear.inside)
        if inside != axes:
            raise unsupported_linear(plan.path, f"its call sums over axes {inside} of the weight, not {axes}")
        call = Call(layer=layer, x=x, inside=inside, result=result, context=active_context)
        if (y := product_beside_siblings(call)) is not None:
            return y
        bank = Leaves(names=plan.names, numbers=plan.numbers, leaves=leaves, rank=plan.rank)
        options = {"context": context, "site": site, "where": plan.path}
        if result.experts and not isinstance(w, Stored):
            return expert_products(x, w, bank, inside, result, **options)
        return lora_product(x, w, bank, inside, result, **options)

    return call_exchanged(layer, plan.linear, product, plan.path, args, options)


def call_exchanged(
    layer: Any, linear: Linear, product: Product, where: str, args: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """Calls a layer like its own class, with `product` in place of its product with its weight."""
    graph, weight, other_state = nnx.split(layer, lambda path, _: path == (linear.weight,), ...)
    ((path, variable),) = nnx.to_flat_state(weight)

    def call(w: Array) -> Any:
        module = nnx.merge(graph, nnx.from_flat_state([(path, variable.replace(w))]), other_state)
        module.__class__ = own_class(layer)
        before = nnx.graphdef(module)
        try:
            y = own_class(layer).__call__(module, *args, **options)
        except TraceContextError as problem:
            raise unsupported_linear(where, f"its call changes what it holds ({problem})") from None
        if nnx.graphdef(module) != before:
            raise unsupported_linear(where, "its call changes what it holds, as `sow` and counters do")
        return y

    value = vars(layer)[linear.weight].get_value()
    inside = tuple(axis + linear.experts for axis in linear.inside)
    inputs = (args, options)
    return exchange_product(call, value, product, where=where, inside=inside, inputs=inputs, experts=linear.experts)


def adapt(
    layer: Any,
    linear: Linear,
    adapters: Sequence[AdapterSpec],
    path: Path,
    members: Sequence[int],
    largest: tuple[int, int],
    shared: dict[str, LoRAConstant],
    calls: Calls,
) -> None:
    """Adds adapters to a layer in place. Its frozen weight stays the same variable.

    Args:
        largest: K and N of the tensors that layers share.
        shared: these tensors by name, filled by the first layer. A stack of layers has its own.
        calls: of all layers of the model.
    """
    plan = LoRAPlan.of(dotted(path), linear, adapters, members, calls)

    def weight() -> Array:
        variable = getattr(layer, linear.weight)
        if not isinstance(variable, nnx.Param):
            why = "its weight is stored in fewer bytes, and the adapter starts from it"
            raise unsupported_linear(plan.path, why, "apply_lora before quantize_base")
        return variable[...]

    arrays = plan.start(largest, weight)
    layer.__class__ = adapted_class(type(layer))
    layer.lora_plan = plan
    for leaf in plan.leaves:
        if leaf.shared and not linear.stack:
            setattr(layer, leaf.name, shared.setdefault(leaf.name, LoRAConstant(arrays[leaf.name])))
        else:
            setattr(layer, leaf.name, (nnx.LoRAParam if leaf.trainable else LoRAConstant)(arrays[leaf.name]))
    if linear.stack:
        layer.lora_site = LoRASite(jnp.asarray(plan.sites))
    if not hasattr(layer, "deterministic"):
        layer.deterministic = False  # `model.eval()` sets it to True


def adapted_class(cls: type) -> type:
    """Returns the class of a layer with adapters."""
    return exchanged_class(cls, "LoRA", call_adapted, get_attribute)


def get_attribute(layer: Any, name: str) -> Any:
    """Reads an attribute of an adapted layer. In a context, its weight comes as one that notes who reads its value."""
    cls: Any = own_class(layer)
    value = cls.__getattribute__(layer, name)
    if not isinstance(value, nnx.Variable) or TABULATED in vars(layer):
        return value
    plan = vars(layer).get("lora_plan")
    note = note_reader(plan) if plan is not None and name == plan.linear.weight else None
    if note is None:
        return value
    metadata = {**value.get_metadata(), _READ: (value, note)}
    return _watched_class(type(value)).from_metadata(value.get_raw_value(), metadata)


@cache
def _watched_class(cls: type) -> type:
    """Returns the class of a stand-in for a variable, whose reads of the value are noted."""

    def get_value(variable: Any, **options: Any) -> Any:
        original, note = variable.get_metadata(_READ)
        note()
        return original.get_value(**options)

    def set_value(variable: Any, value: Any, **options: Any) -> None:
        variable.get_metadata(_READ)[0].set_value(value, **options)

    shape = property(lambda variable: variable.get_raw_value().shape)  # that of a variable reads its value
    return type(cls.__name__, (cls,), {"get_value": get_value, "set_value": set_value, "shape": shape})


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
