"""One op for the layers to which a module gives the same input, so that their adapters read it once.

A layer cannot know while it runs that another one will get its input. So a module with such layers is first traced
alone, its layers only noting their inputs; when it then runs, the first layer of a group computes all of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import reduce
from types import MappingProxyType
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from flax import nnx
from flax.errors import TraceContextError
from jaxtyping import Array

from lorafusion_jax.modules.context import LoRAContext
from lorafusion_jax.modules.lora_product import Leaves, lora_products, operands_of
from lorafusion_jax.modules.match import check_owners
from lorafusion_jax.modules.plan import LoRAPlan
from lorafusion_jax.modules.product import Result, Stored
from lorafusion_jax.modules.tree import exchanged_class, own_class, walk
from lorafusion_jax.modules.use import staging


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The product of one layer.

    Args:
        x: [rows, contracted axes].
        inside: contracted axes of the weight.
        context: the one set by `use_adapters`; None: none is set.
    """

    layer: Any
    x: Array
    inside: tuple[int, ...]
    result: Result
    context: LoRAContext | None

    @property
    def may_share(self) -> bool:
        """Whether one op can compute it beside others, with the same meaning.

        Each layer draws dropout of its own, and on a mesh each has a sharding of its own.
        """
        context = self.context
        return (
            context is not None
            and context.dropout is None
            and context.draw is None
            and self.result.casts is not None
            and self.result.sharding is None
            and not self.result.experts
            and self.result.dtype == self.x.dtype
        )


@dataclass(slots=True)
class _Watch:
    """The calls of a module's layers, by name, while it is traced alone."""

    names: Mapping[int, str]
    trace: Any
    calls: list[tuple[str, Call]] = field(default_factory=list)


@dataclass(slots=True)
class _Group:
    """Layers that get the same input, and their results once the first of them has run."""

    layers: Mapping[int, tuple[Any, Call]]  # by id: the layer, and its call as it was watched
    trace: Any
    x: Array | None = None
    ys: dict[int, Array] = field(default_factory=dict)

    def run(self, call: Call) -> None:
        assert call.context is not None
        parts = []
        for layer, watched in self.layers.values():
            plan, result = layer.lora_plan, watched.result
            weight = vars(layer)[plan.linear.weight].get_value()
            if not isinstance(weight, Stored):
                weight = reduce(jnp.astype, result.casts or (), weight)
            leaves = {leaf.name: getattr(layer, leaf.name)[...] for leaf in plan.leaves}
            bank = Leaves(names=plan.names, numbers=plan.numbers, leaves=leaves, rank=plan.rank)
            parts.append(operands_of(weight, bank, watched.inside, call.context, call.x.dtype, plan.path))
        self.x = call.x
        self.ys = dict(zip(self.layers, lora_products(call.x, len(call.inside), parts, call.context), strict=True))


_watch: ContextVar[_Watch | None] = ContextVar("lorafusion_watch", default=None)
_groups: ContextVar[Mapping[int, _Group]] = ContextVar("lorafusion_siblings", default=MappingProxyType({}))


def share_inputs(model: nnx.Module) -> nnx.Module:
    """Lets layers that a module gives the same input share the reads of it, in place; other layers do not change.

    Modules are recognised by themselves: those whose layers `apply_lora` adapted. Results are equal to rounding. It
    acts on models that are compiled, on one device, without dropout; everywhere else layers run one by one.

    >>> from lorafusion_jax.modules import AdapterSpec, apply_lora
    >>> spec = AdapterSpec(name="law", rank=2, alpha=4)
    >>> class Gated(nnx.Module):
    ...     def __init__(self):
    ...         self.gate, self.up = (nnx.Linear(4, 8, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    ...     def __call__(self, x):
    ...         return nnx.silu(self.gate(x)) * self.up(x)
    >>> model = share_inputs(apply_lora(Gated(), [spec], targets="all-linear"))
    >>> type(model).__name__
    'SharedGated'
    """
    check_owners(model)
    for _, module in walk(model):
        sizes = [layer.lora_plan.linear.in_features for layer in _layers(module).values()]
        if len(set(sizes)) < len(sizes) and callable(module) and type(module).__call__ is not call_sharing:
            module.__class__ = exchanged_class(type(module), "Shared", call_sharing)
    return model


def call_sharing(module: Any, *args: Any, **options: Any) -> Any:
    """Calls a module like its own class, with one op for the layers that get the same input."""
    plain = own_class(module).__call__
    if _watch.get() is not None or not staging() or not jax.sharding.get_abstract_mesh().empty:
        return plain(module, *args, **options)
    with _set(_groups, {**_groups.get(), **_find_groups(module, args, options)}):
        return plain(module, *args, **options)


def product_beside_siblings(call: Call) -> Array | None:
    """Returns a layer's product, or a stand-in while its module is watched; None: the layer must compute it itself."""
    if (watch := _watch.get()) is not None:
        return _note(watch, call)
    group = _groups.get().get(id(call.layer))
    if group is None or group.trace != _trace() or not call.may_share:
        return None
    if group.x is None:
        group.run(call)
    return group.ys.pop(id(call.layer), None) if group.x is call.x else None


def _note(watch: _Watch, call: Call) -> Array:
    name = watch.names.get(id(call.layer))
    if name is not None and watch.trace == _trace():
        watch.calls.append((name, call))
    plan = call.layer.lora_plan
    rows = call.x.shape[: call.x.ndim - len(call.inside)]
    free = (size for axis, size in enumerate(plan.linear.shape) if axis not in plan.linear.inside)
    return jnp.zeros((*rows, *free), call.result.dtype)


def _find_groups(module: Any, args: tuple[Any, ...], options: dict[str, Any]) -> dict[int, _Group]:
    calls: list[tuple[str, Call]] = []

    def trace() -> None:
        copy = nnx.clone(module)  # what the call changes in it is forgotten
        names = {id(layer): name for name, layer in _layers(copy).items()}
        with _set(_watch, watch := _Watch(names, _trace())):
            own_class(module).__call__(copy, *args, **options)
        calls.extend(watch.calls)

    try:
        jax.eval_shape(trace)
    except TraceContextError:  # the call changes what it was given, a cache for instance
        return {}
    by_input: dict[tuple[int, int], list[tuple[str, Call]]] = defaultdict(list)
    for name, call in calls:
        if [other for other, _ in calls].count(name) == 1 and call.may_share:
            by_input[id(call.x), len(call.inside)].append((name, call))
    layers, groups = _layers(module), {}
    for members in by_input.values():
        if len(members) > 1:
            by_id = {id(layers[name]): (layers[name], call) for name, call in members}
            groups |= dict.fromkeys(by_id, _Group(by_id, _trace()))
    return groups


def _layers(module: Any) -> dict[str, Any]:
    """The adapted layers that are attributes of a module."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, nnx.Module) and isinstance(getattr(value, "lora_plan", None), LoRAPlan)
    }


def _trace() -> Any:
    """What is being traced: tracers of an inner function must not leave it."""
    return jax.extend.core.get_opaque_trace_state(convention="nnx")


@contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
