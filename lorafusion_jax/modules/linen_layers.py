"""Finds the linear layers of a Linen model while it runs, and the other modules with matrices.

A layer marks its weight where it multiplies by it. Any other use of the weight, in the jaxpr of a call, computes
without the adapter: a product with `layer.variables["params"]["kernel"]`, the norm of `nn.WeightNorm`.

K in · N out
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jaxtyping import Array

from lorafusion_jax.modules.linear import Linear
from lorafusion_jax.modules.linen_intercept import Kinds, intercept, matrices_of, params_of, weights_of
from lorafusion_jax.modules.match import find_heads, is_embedding
from lorafusion_jax.modules.product import Result, unsupported_linear
from lorafusion_jax.modules.stored_weight import StoredWeight
from lorafusion_jax.modules.unmatched import plausible_weights, without_biases
from lorafusion_jax.modules.use import traced_anew

KERNELS: Kinds = ((nn.Dense, "kernel"), (nn.DenseGeneral, "kernel"), (nn.Einsum, "kernel"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinenLayer(Linear):
    """A linear layer that ran.

    Args:
        scope: path of its parameters in their tree.
        path: path of its adapters: the scope, followed by the weight's name if weights share a scope.
        kind: name of its class.
        parts: how many axes of the stack, the last ones, the call takes by index: `w[0]`.
        is_head: whether "all-linear" leaves it out.
    """

    scope: tuple[str, ...]
    path: tuple[str, ...]
    kind: str
    parts: int = 0
    is_head: bool = False

    @property
    def name(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherModule:
    """A module that ran and has matrices, but is not linear."""

    path: tuple[str, ...]
    kind: str
    why: str
    is_table: bool  # or another of Flax's own classes: "all-linear" does not mean it

    @property
    def name(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What ran in a call of a model.

    Args:
        read: names of the layers whose weights something else reads, too.
    """

    layers: list[LinenLayer]
    others: list[OtherModule]
    read: frozenset[str] = frozenset()


def find_layers(
    model: nn.Module,
    variables: Any,
    kinds: Kinds,
    args: Sequence[Any],
    options: Mapping[str, Any],
    *,
    heads: Sequence[str] | None = None,
) -> Ran:
    """Lists the linear layers that a call of the model runs, in order, without computation.

    Raises:
        ConfigError: `lora.unsupported-linear`, a module of a listed class is not one product with its weight.
    """
    params = nn.meta.unbox(variables)["params"]
    seen = _Seen(params)

    def run(variables: Any, *args: Any) -> Any:
        interceptor = intercept(
            kinds, lambda module: _is_of(params, module), seen.note, axes={}, watch=seen.watch, otherwise=seen.refuse
        )
        with traced_anew(), interceptor:
            return model.apply(variables, *args, mutable=True, **options)

    variables = {name: tree for name, tree in variables.items() if name != "LoRAParam"}
    jaxpr = jax.make_jaxpr(run)(variables, *args).jaxpr
    weight_names = {".".join((*scope, weight)) for scope, weight in seen.layers}
    leaves = {number: name for number, name in leaf_names(variables).items() if name in weight_names}
    read = read_elsewhere(jaxpr, leaves)
    tables = [shape for module, shapes in seen.modules.values() if is_embedding(module) for shape in shapes.values()]
    layers = _named_layers([*seen.layers.values()], tables, heads)
    scopes = {layer.scope for layer in layers}
    others = [
        OtherModule(
            path=path,
            kind=type(module).__name__,
            why=_why(module, list(left_out), seen.problems.get(path), adapted=path in scopes),
            is_table=_is_table(module, left_out),
        )
        for path, (module, shapes) in seen.modules.items()
        if (left_out := _left_out(module, shapes, [layer.weight for layer in layers if layer.scope == path]))
        and _is_of(params, module)
    ]
    read_layers = frozenset(layer.name for layer in layers if ".".join((*layer.scope, layer.weight)) in read)
    return Ran(layers=layers, others=others, read=read_layers)


class _Seen:
    """What a traced call of a model shows.

    Attributes:
        layers: by scope and weight, in order.
        modules: those with matrices, with their shapes by name.
        problems: why a module of a listed class takes no LoRA.
    """

    def __init__(self, params: Any):
        self._params = params
        self.layers: dict[tuple[tuple[str, ...], str], LinenLayer] = {}
        self.modules: dict[tuple[str, ...], tuple[nn.Module, dict[str, tuple[int, ...]]]] = {}
        self.problems: dict[tuple[str, ...], str] = {}

    def note(
        self, module: nn.Module, weight: str, x: Array, w: Array, inside: tuple[int, ...], result: Result
    ) -> Array:
        """Notes a product with a weight, and computes it."""
        path = tuple(module.path)
        stored = getattr(_subtree(self._params, path).get(weight), "shape", ())
        stack, experts = tuple(stored[: len(stored) - w.ndim]), result.experts
        if stored[len(stack) :] != w.shape:
            why = f"its weight {list(stored)} is cut into {list(w.shape)}, not along its first axes"
            raise unsupported_linear(".".join(path), why, "nn.scan and nn.vmap with variable_axes={'params': 0}")
        layer = LinenLayer(
            scope=path,
            path=path,
            weight=weight,
            shape=w.shape[experts:],
            inside=tuple(axis - experts for axis in inside),
            stack=(*stack, *w.shape[:experts]),
            experts=experts,
            kind=type(module).__name__,
            parts=len(result.part),
        )
        if result.part and self.layers.setdefault((path, weight), layer) != layer:
            why = f"its call sums over other axes of {weight}[{result.part[0]}] than of the parts before"
            raise unsupported_linear(".".join(path), why)
        self.layers[path, weight] = layer
        w = w if isinstance(w, StoredWeight) else marked(w, ".".join((*path, weight)))
        return frozen_multiply(x, w, inside, result)

    def watch(self, module: nn.Module) -> None:
        """Notes the matrices of a module."""
        module_params = params_of(module)
        shapes = {
            name: tuple(getattr(nn.meta.unbox(module_params[name]), "shape", ())) for name in matrices_of(module_params)
        }
        if shapes:
            self.modules.setdefault(tuple(module.path), (module, shapes))

    def refuse(self, module: nn.Module, problem: Exception) -> None:
        """Notes why a module takes no LoRA."""
        self.problems[tuple(module.path)] = getattr(problem, "why", "") or str(problem)


def _named_layers(
    layers: Sequence[LinenLayer], tables: Sequence[tuple[int, ...]], heads: Sequence[str] | None
) -> list[LinenLayer]:
    """Returns layers with the weight's name in their path where weights share a scope, and with the heads marked."""
    times = Counter(layer.scope for layer in layers)
    layers = [
        replace(layer, path=(*layer.scope, layer.weight)) if times[layer.scope] > 1 else layer for layer in layers
    ]
    widths = [(layer.path, layer.out_features, bool(layer.stack)) for layer in layers]
    head_paths = find_heads(widths, tables, heads)
    return [replace(layer, is_head=layer.path in head_paths) for layer in layers]


def _left_out(
    module: nn.Module, shapes: Mapping[str, tuple[int, ...]], weights: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    """Returns the matrices of a module that takes no LoRA, and of one of another package those beside its weight."""
    if weights and type(module).__module__.startswith("flax."):
        return {}
    left_out = {name: shapes[name] for name in without_biases(shapes) if name not in weights}
    return left_out if not weights or plausible_weights(left_out) else {}


def frozen_multiply(x: Array, w: Array | StoredWeight, inside: tuple[int, ...], result: Result) -> Array:
    """Multiplies x [rows, contracted axes] by a weight without adapters."""
    if isinstance(w, StoredWeight):
        return w.multiply(x, inside, result)
    axes = tuple(range(x.ndim - len(inside), x.ndim)), inside
    if experts := tuple(range(result.experts)):
        return jax.lax.dot_general(x, w, (axes, (experts, experts)), preferred_element_type=result.dtype)
    return jnp.tensordot(x, w, axes=axes, preferred_element_type=result.dtype, out_sharding=result.sharding)


def has_stored_weight(module: nn.Module, kinds: Kinds) -> bool:
    """Whether a module's weight is stored in fewer bytes."""
    params = module.variables.get("params", {})
    return any(isinstance(params.get(weight), StoredWeight) for weight in weights_of(module, kinds))


def _why(module: nn.Module, names: Sequence[str], problem: str | None, *, adapted: bool) -> str:
    kind = type(module).__name__
    if is_embedding(module):
        return "an embedding"
    if problem is not None:
        return problem
    if type(module).__module__.startswith("flax."):
        return f"an nn.{kind} is not a product with a weight"
    if adapted:
        return f"its {', '.join(names)} is beside the weight that takes LoRA"
    if not plausible_weights(dict.fromkeys(names, ())):
        return f"its {', '.join(names)} is no weight of a product"
    if len(names) > 1:
        quoted = ", ".join(f'"{name}"' for name in sorted(names))
        several = f"{kind} holds several weights; if it multiplies by each of them once, or by each of their parts w[0]"
        return f"{several}, say so with LinenLoRA(…, modules=[({kind}, ({quoted}))])"
    return f"{kind} does not multiply by its {names[0]} in its own call"


def _is_table(module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    if type(module).__module__.startswith("flax.") or is_embedding(module):
        return True
    return not plausible_weights(shapes)


def _is_of(params: Any, module: nn.Module) -> bool:
    """Whether a module's parameters are in the tree. A head applied to shared weights has none there."""
    return bool(_subtree(params, tuple(module.path)).keys() & params_of(module).keys())


def _subtree(params: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        params = params.get(part, {})
    return params


type Names = frozenset[str]
_MARK = "lora_weight:"
_SAME_VALUES = frozenset({
    "broadcast_in_dim", "convert_element_type", "copy", "copy_p", "dynamic_slice", "name", "optimization_barrier",
    "pcast", "pvary", "reshape", "reshard", "sharding_constraint", "slice", "split", "squeeze",
    "transpose", "unstack",
})  # fmt: skip


def marked(w: Array, name: str) -> Array:
    """The weight of a layer where the layer multiplies by it."""
    return checkpoint_name(w, f"{_MARK}{name}")


def read_elsewhere(jaxpr: Jaxpr, weights: Mapping[int, str]) -> set[str]:
    """Names the weights that anything but their own mark reads.

    Args:
        jaxpr: of a call of the model.
        weights: number of an input → the name of the weight.
    """
    elsewhere: set[str] = set()
    _follow(jaxpr, [frozenset({weights[i]} if i in weights else ()) for i in range(len(jaxpr.invars))], elsewhere)
    return elsewhere


def leaf_names(variables: Any) -> dict[int, str]:
    """Number of a leaf of variables → path of the parameter, "block_0.up.kernel"."""
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    keys = [[str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)] for path, _ in leaves]
    return {number: ".".join(names[1:]) for number, names in enumerate(keys) if names[:1] == ["params"]}


def _follow(jaxpr: Jaxpr, inputs: Sequence[Names], elsewhere: set[str]) -> list[Names]:
    """Returns the weights that are outputs as they are, and adds those that are read to `elsewhere`."""
    weights_in: dict[Any, Names] = dict(zip(jaxpr.invars, inputs, strict=True))

    def names_of(atom: Any) -> Names:
        return frozenset() if isinstance(atom, Literal) else weights_in.get(atom, frozenset())

    for equation in jaxpr.eqns:
        names = [names_of(atom) for atom in equation.invars]
        if not any(names):
            continue
        primitive, label = equation.primitive.name, str(equation.params.get("name", ""))
        if primitive == "name" and label.startswith(_MARK):
            elsewhere |= names[0] - {label.removeprefix(_MARK)}
        elif inner := [body for body in _bodies(equation) if len(body.invars) <= len(names)]:
            for body in inner:  # its inputs are the last ones: a condition has its index before
                outputs = _follow(body, names[len(names) - len(body.invars) :], elsewhere)
                if len(outputs) == len(equation.outvars):
                    weights_in |= dict(zip(equation.outvars, outputs, strict=True))
        elif primitive in _SAME_VALUES:
            weights_in |= dict.fromkeys(equation.outvars, names[0])
        else:
            elsewhere |= frozenset().union(*names)
    return [names_of(atom) for atom in jaxpr.outvars]


def _bodies(equation: JaxprEqn) -> Iterator[Jaxpr]:
    for value in equation.params.values():
        for body in value if isinstance(value, list | tuple) else (value,):
            if isinstance(jaxpr := getattr(body, "jaxpr", body), Jaxpr):  # of a closed one
                yield jaxpr
