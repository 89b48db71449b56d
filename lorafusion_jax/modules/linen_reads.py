"""Finds weights of a Linen model that something else reads than their layer's product.

A layer marks its weight where it multiplies by it. Any other use of the weight, in the jaxpr of a call, computes
without the adapter: a product with `layer.variables["params"]["kernel"]`, the norm of `nn.WeightNorm`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jaxtyping import Array

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
    _follow(jaxpr, [_named(weights, number) for number in range(len(jaxpr.invars))], elsewhere)
    return elsewhere


def leaf_names(variables: Any) -> dict[int, str]:
    """Number of a leaf of variables → path of the parameter, "block_0.up.kernel"."""
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    keys = [[str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)] for path, _ in leaves]
    return {number: ".".join(names[1:]) for number, names in enumerate(keys) if names[:1] == ["params"]}


def _named(weights: Mapping[int, str], number: int) -> Names:
    return frozenset([weights[number]] if number in weights else [])


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
