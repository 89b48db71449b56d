"""Replaces the products of a Linen model's linear modules while it runs.

The adapters lie in the collection "LoRAParam". While a model runs, the tensors of a layer are next to its weight in
"params". So `nn.scan`, `nn.vmap` and `nn.remat` slice and lift them as the weight, and a model need not name the
collection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.core.scope import DenyList, intersect_filters
from jaxtyping import Array

from lorafusion_jax.modules.plan import dropout_sites
from lorafusion_jax.modules.product import Result, exchange_products, unsupported_linear
from lorafusion_jax.modules.unmatched import without_biases

COLLECTION = "LoRAParam"
SITE = "lora_site"  # dropout sites of stacked layers, beside their tensors
# name of a module's weight, the names of several, or a function from the module to them
type Names = str | Sequence[str]
type Weight = Names | Callable[[nn.Module], Names]
type Kinds = Sequence[tuple[type[nn.Module], Weight]]
# module, name of the weight, x [rows, contracted axes], weight, contracted axes of the weight, type of the result → the
# product
type Multiply = Callable[[nn.Module, str, Array, Array, tuple[int, ...], Result], Array]
type Call = Callable[[], Any]


@contextmanager
def intercept(
    kinds: Kinds,
    wanted: Callable[[nn.Module], bool],
    multiply: Multiply,
    *,
    axes: Mapping[str, int],
    watch: Callable[[nn.Module], None] | None = None,
    otherwise: Callable[[nn.Module, Exception], None] | None = None,
) -> Iterator[None]:
    """Makes wanted linear modules use `multiply` for their product, in its body.

    Args:
        axes: number of axes of an adapter's tensors, by their names.
        watch: called with every module that runs.
        otherwise: called with a module of an unknown class and the error if it is no single product after all; it runs
            unchanged then (None: the error is raised).
    """
    inner = joined = False

    def interceptor(call: Any, args: Any, options: Any, context: Any) -> Any:
        nonlocal inner, joined
        module = context.module
        if inner or module.scope is None or context.method_name == "setup":
            return call(*args, **options)  # setup, or the call of an unbound copy
        if not joined and module.scope.parent is None and COLLECTION in module.variables:
            joined = True
            try:
                return _call_joined(module, axes, lambda: interceptor(call, args, options, context))
            finally:
                joined = False
        if watch is not None:
            watch(module)
        names = weights_of(module, kinds) if context.method_name == "__call__" else ()
        if not names or not wanted(module):
            return call(*args, **options)
        params, where, scope = params_of(module), ".".join(module.path), module.scope
        others = {name: tree for name, tree in module.variables.items() if name not in ("params", COLLECTION)}
        mutable = intersect_filters(scope.mutable, DenyList(("params", COLLECTION))) or False
        for name in names:
            if name not in params:
                raise unsupported_linear(where, f"it has no parameter '{name}' yet", "init the base model first")

        def call_with(weights: Mapping[str, Any]) -> Any:
            nonlocal inner
            inner = True
            try:
                bare, variables = module.clone(parent=None), {**others, "params": {**params, **weights}}
                return bare.apply(variables, *args, mutable=mutable, **options)
            finally:
                inner = False

        def product(name: str, x: Array, w: Array, inside: tuple[int, ...], result: Result) -> Array:
            return multiply(module, name, x, w, inside, result)

        try:
            weights = {name: nn.meta.unbox(params[name]) for name in names}
            outputs = exchange_products(call_with, weights, product, where=where, inputs=(args, options))
        except Exception as problem:
            if otherwise is None or any(isinstance(module, cls) for cls, _ in kinds):
                raise
            otherwise(module, problem)
            return call(*args, **options)
        if mutable is False:
            return outputs
        output, changed = outputs  # what the call sows, counts and keeps
        for collection, values in changed.items():
            for name, value in values.items():
                scope.put_variable(collection, name, value)
        return output

    with nn.intercept_methods(interceptor):
        yield


def weights_of(module: nn.Module, kinds: Kinds) -> tuple[str, ...]:
    """Returns the names of a linear module's weights.

    Those of a listed class, or the only matrix of a module of another package that has no submodules.
    """
    weight_names = next((weight for cls, weight in kinds if isinstance(module, cls)), None)
    if weight_names is not None:
        names = weight_names(module) if callable(weight_names) else weight_names
        return (names,) if isinstance(names, str) else tuple(names)
    if type(module).__module__.startswith("flax."):
        return ()
    params = params_of(module)
    matrices = without_biases({name: nn.meta.unbox(params[name]).shape for name in matrices_of(params)})
    is_linear = len(matrices) == 1 and not any(isinstance(value, Mapping) for value in params.values())
    return tuple(matrices) if is_linear else ()


def params_of(module: nn.Module) -> dict[str, Any]:
    """Returns a module's parameters, without adapters."""
    return {name: value for name, value in module.variables.get("params", {}).items() if name != COLLECTION}


def matrices_of(params: Mapping[str, Any]) -> list[str]:
    """Names of the parameters with two or more axes."""
    return [
        name
        for name, value in params.items()
        if not isinstance(value, Mapping) and len(getattr(nn.meta.unbox(value), "shape", ())) >= 2
    ]


def adapters_of(module: nn.Module, weight: str) -> tuple[tuple[str, ...], Mapping[str, Array] | None]:
    """Returns path and tensors of a weight's adapters. If weights share a scope, the path ends with the weight."""
    path, joined = tuple(module.path), module.variables.get("params", {}).get(COLLECTION)
    if joined is not None and isinstance(joined.get(weight), Mapping):
        return (*path, weight), joined[weight]
    if joined is not None and any(isinstance(value, Mapping) for value in joined.values()):
        return path, None  # of another weight in this scope
    return path, joined


def _call_joined(root: nn.Module, axes: Mapping[str, int], call: Call) -> Any:
    """Calls a model's outermost module with its adapters next to their weights."""
    assert root.scope is not None
    variables = root.scope._variables  # flax has no public way to give a running module other variables
    before = variables.get("params", {})
    variables["params"] = joined = _join(before, variables[COLLECTION], (), axes)
    try:
        return call()
    finally:
        variables["params"] = _without_adapters(joined) if root.scope.is_mutable_collection("params") else before


def _join(params: Any, adapters: Mapping[str, Any], path: tuple[str, ...], axes: Mapping[str, int]) -> dict[str, Any]:
    tree, leaves = dict(params), {}
    for name, value in adapters.items():
        if isinstance(value, Mapping) and isinstance(tree.get(name), Mapping):
            tree[name] = _join(tree[name], value, (*path, name), axes)
        elif isinstance(value, Mapping):  # a weight that shares its scope
            leaves[name] = _with_sites(value, (*path, name), axes)
        else:
            leaves[name] = value
    if leaves:
        tree[COLLECTION] = (
            leaves if isinstance(next(iter(leaves.values())), Mapping) else _with_sites(leaves, path, axes)
        )
    return tree


def _with_sites(leaves: Mapping[str, Array], path: tuple[str, ...], axes: Mapping[str, int]) -> dict[str, Any]:
    """Adds the dropout sites of a stack of layers to its tensors [stack, A, ...]."""
    stacks = (value.shape[: value.ndim - 1 - axes[name]] for name, value in leaves.items() if name in axes)
    stack = next(stacks, ())
    return dict(leaves) | ({SITE: jnp.asarray(dropout_sites(".".join(path), stack))} if stack else {})


def _without_adapters(params: Any) -> dict[str, Any]:
    return {
        name: _without_adapters(value) if isinstance(value, Mapping) else value
        for name, value in params.items()
        if name != COLLECTION
    }
