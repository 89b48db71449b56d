"""Finds the linear layers of a Linen model while it runs, and intercepts their products.

K in · N out
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array

from lorafusion_jax.modules.linear import Product
from lorafusion_jax.modules.product import Result, exchange_product, unsupported_linear
from lorafusion_jax.modules.stored_weight import StoredWeight
from lorafusion_jax.modules.use import traced_anew

type Weight = str | Callable[[nn.Module], str]  # name of a module's weight, or a function from the module to it
type Kinds = Sequence[tuple[type[nn.Module], Weight]]
# module, x [rows, contracted axes], weight, contracted axes of the weight → [rows, other axes of the weight]
type Multiply = Callable[[nn.Module, Array, Array, tuple[int, ...], Result], Array]
KERNELS: Kinds = ((nn.Dense, "kernel"), (nn.DenseGeneral, "kernel"), (nn.Einsum, "kernel"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinenLayer(Product):
    """A linear layer that ran.

    Args:
        scope: path of its parameters in their tree.
        path: path of its adapters: the scope, followed by the weight's name if modules share a scope.
    """

    scope: tuple[str, ...]
    path: tuple[str, ...]

    @property
    def name(self) -> str:
        return ".".join(self.path)


def find_layers(model: nn.Module, variables: Any, kinds: Kinds, args: Sequence[Any], options: dict) -> list[LinenLayer]:
    """Lists the linear layers that a call of the model runs, in order, without computation.

    Raises:
        ConfigError: `lora.unsupported-linear`, the weight of a layer is stacked.
    """
    found: dict[tuple[tuple[str, ...], str], LinenLayer] = {}
    params = nn.meta.unbox(variables)["params"]

    def note(module: nn.Module, x: Array, w: Array, inside: tuple[int, ...], result: Result) -> Array:
        path, weight = tuple(module.path), weight_of(module, kinds) or ""
        layer = LinenLayer(scope=path, path=path, weight=weight, shape=w.shape, inside=inside)
        if getattr(_subtree(params, path).get(weight), "shape", None) != w.shape:
            why, fix = "its weight is stacked by nn.scan or nn.vmap", "unroll it, or use an NNX model"
            raise unsupported_linear(layer.name, why, fix)
        found[path, weight] = layer
        return frozen_multiply(x, w, inside, result)

    def run(variables: Any, *args: Any) -> Any:
        with traced_anew(), intercept(kinds, lambda module: _is_of(params, module), note):
            return model.apply(variables, *args, mutable=True, **options)

    jax.eval_shape(run, variables, *args)
    times = Counter(layer.scope for layer in found.values())
    return [
        replace(layer, path=(*layer.scope, layer.weight)) if times[layer.scope] > 1 else layer
        for layer in found.values()
    ]


@contextmanager
def intercept(kinds: Kinds, wanted: Callable[[nn.Module], bool], multiply: Multiply) -> Iterator[None]:
    """Makes wanted linear modules use `multiply` for their product, in its body."""
    inner = False  # do not intercept the call of the unbound copy

    def interceptor(call: Any, args: Any, options: Any, context: Any) -> Any:
        nonlocal inner
        module = context.module
        weight = (
            None if inner or context.method_name != "__call__" or module.scope is None else weight_of(module, kinds)
        )
        if weight is None or not wanted(module):
            return call(*args, **options)
        params = dict(module.variables.get("params", {}))
        if weight not in params:
            raise unsupported_linear(
                ".".join(module.path), f"it has no parameter '{weight}' yet", "init the base model first"
            )
        w = nn.meta.unbox(params[weight])

        def own_call(w: Array) -> Any:
            nonlocal inner
            inner = True
            try:
                return module.clone(parent=None).apply({"params": {**params, weight: w}}, *args, **options)
            finally:
                inner = False

        def own_product(x: Array, w: Array, inside: tuple[int, ...], result: Result) -> Array:
            return multiply(module, x, w, inside, result)

        return exchange_product(own_call, w, own_product, where=".".join(module.path), inputs=(args, options))

    with nn.intercept_methods(interceptor):
        yield


def frozen_multiply(x: Array, w: Array | StoredWeight, inside: tuple[int, ...], result: Result) -> Array:
    """Multiplies x [rows, contracted axes] by a weight without adapters."""
    if isinstance(w, StoredWeight):
        return w.multiply(x, inside, result)
    axes = tuple(range(x.ndim - len(inside), x.ndim)), inside
    return jnp.tensordot(x, w, axes=axes, preferred_element_type=result.dtype, out_sharding=result.sharding)


def has_stored_weight(module: nn.Module, kinds: Kinds) -> bool:
    """Whether a module's weight is stored in fewer bytes."""
    weight = weight_of(module, kinds)
    return weight is not None and isinstance(module.variables.get("params", {}).get(weight), StoredWeight)


def weight_of(module: nn.Module, kinds: Kinds) -> str | None:
    """Returns the name of a module's weight; None if it is not linear."""
    weight = next((weight for cls, weight in kinds if isinstance(module, cls)), None)
    return weight(module) if callable(weight) else weight


def _is_of(params: Any, module: nn.Module) -> bool:
    """Whether a module's parameters are in the tree. A head applied to shared weights has none there."""
    return bool(_subtree(params, tuple(module.path)).keys() & module.variables.get("params", {}).keys())


def _subtree(params: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        params = params.get(part, {})
    return params
