"""Describes linear modules: their weight, and the axes of it that their product sums over.

K in · N out
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flax import nnx

from lorafusion_jax.errors import ConfigError
from lorafusion_jax.modules.unmatched import without_biases


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A registered linear class: the name of its weight, and a function that returns a module's equation."""

    weight: str
    equation: Callable[[Any], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """The product of a module: it contracts axes of x with axes of a weight.

    Args:
        weight: name of the weight.
        shape: shape of one layer's weight.
        inside: axes that the product sums over.
        stack: sizes of leading axes of the weight, if it holds several layers or experts.
        experts: how many of these axes, the last ones, belong to experts: a call sees them, and x has them, too.
    """

    weight: str
    shape: tuple[int, ...]
    inside: tuple[int, ...]
    stack: tuple[int, ...] = ()
    experts: int = 0

    @property
    def in_features(self) -> int:
        return math.prod(self.shape[axis] for axis in self.inside)

    @property
    def out_features(self) -> int:
        return math.prod(size for axis, size in enumerate(self.shape) if axis not in self.inside)


_CLASSES: dict[type, Registered] = {}


def register_linear(cls: type, *, weight: str, equation: str | Callable[[Any], str]) -> type:
    """Registers your own linear class, so that `apply_lora` can adapt its modules.

    Their `__call__` does not change. While it runs, its product with the weight is computed with the adapters. So it
    may cast, scale or add a bias, but must use the weight in one `jnp.einsum`, `jnp.dot`, `@` or `lax.dot_general`.

    Args:
        cls: an `nnx.Module`. Subclasses are included.
        weight: attribute that holds the weight.
        equation: equation of the product, "input,weight->output", or a function from a module to its equation.

    Returns:
        The class, so that `functools.partial` makes it a decorator.

    >>> import jax.numpy as jnp
    >>> class Einsum(nnx.Module):
    ...     def __init__(self, einsum_str, shape):
    ...         self.einsum_str, self.w = einsum_str, nnx.Param(jnp.ones(shape))
    ...     def __call__(self, x):
    ...         return jnp.einsum(self.einsum_str, x, self.w[...])
    >>> _ = register_linear(Einsum, weight="w", equation=lambda module: module.einsum_str)
    >>> linear_of(Einsum("btd,dnh->btnh", (8, 2, 4))).in_features
    8
    """
    if not (isinstance(cls, type) and issubclass(cls, nnx.Module)):
        raise ConfigError("lora.register", f"register_linear: {cls!r} is not a class of nnx modules.")
    if isinstance(equation, str):
        contracted(equation)  # reports a wrong equation now
    _CLASSES[cls] = Registered(
        weight=weight, equation=(lambda _, text=equation: text) if isinstance(equation, str) else equation
    )
    return cls


def linear_of(module: nnx.Module) -> Linear | str | None:
    """Describes a module's product. Returns a text if it cannot carry LoRA, None if it is not a linear layer."""
    if hasattr(module, "lora_plan"):
        return "it already has adapters; give all of them in one call"
    if hasattr(module, "stored_linear"):
        return "its weight is stored in fewer bytes; call quantize_base after apply_lora"
    registered = next((_CLASSES[cls] for cls in type(module).__mro__ if cls in _CLASSES), None)
    if registered is not None:
        return _read_registered(module, registered)
    if isinstance(module, nnx.Linear):
        return _read_weight(module, "kernel", 2, (0,))
    if isinstance(module, nnx.LinearGeneral):
        inside = len(module.in_features)
        if module.batch_axis:
            return "its kernel has batch axes (batch_axis=…): another weight for every example"
        return _read_weight(module, "kernel", inside + len(module.out_features), tuple(range(inside)))
    if isinstance(module, nnx.Einsum):
        return _read_registered(module, Registered(weight="kernel", equation=lambda module: module.einsum_str))
    return _read_own_equation(module)


def weight_names(module: nnx.Module) -> list[str]:
    """Returns the names of the module's own parameters with two or more axes, which may be weights."""
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, nnx.Param)
        and not isinstance(value, nnx.LoRAParam)
        and len(getattr(value, "shape", ())) >= 2
    ]


def contracted(equation: str) -> tuple[int, tuple[int, ...], int]:
    """Parses an equation of x and a weight.

    Returns:
        The number of the weight's axes, those summed over, and how many axes of experts it begins with: they are in the
        input and the output, too.

    >>> contracted("BTNH,NHD->BTD"), contracted("ebd,edf->ebf")
    ((3, (0, 1), 0), (3, (1,), 1))

    Raises:
        ConfigError: `lora.equation`, it is not a product over features.
    """
    try:
        inputs, output = equation.replace(" ", "").split("->")
        x, weight = inputs.split(",")
    except ValueError:
        raise _bad_equation(equation, "it must read 'input,weight->output'") from None
    shared = [axis for axis in weight if axis in x and axis in output]
    lost = [axis for axis in weight if axis not in x and axis not in output]
    summed = [axis for axis in x.replace("...", "") if axis not in weight and axis not in output]
    if "." in weight or len(set(weight)) < len(weight):
        raise _bad_equation(equation, "the weight's axes must be different letters")
    if shared != list(weight[: len(shared)]):
        why = f"'{shared[-1]}' is in input, weight and output, but is not the weight's first axis"
        raise _bad_equation(equation, why)
    if lost or summed:
        raise _bad_equation(equation, f"it sums '{(lost or summed)[0]}' of one operand only")
    inside = tuple(index for index, axis in enumerate(weight) if axis in x and axis not in shared)
    if not inside or len(inside) + len(shared) == len(weight):
        raise _bad_equation(equation, "the weight needs axes that are summed over and axes of the output")
    return len(weight), inside, len(shared)


def _bad_equation(equation: str, why: str) -> ConfigError:
    return ConfigError("lora.equation", f"the equation '{equation}' is not a product over features.", why=why)


def _read_registered(module: nnx.Module, registered: Registered) -> Linear | str:
    equation = registered.equation(module)
    if not isinstance(equation, str):
        return "its equation is given at the call, not at construction"
    try:
        ndim, inside, experts = contracted(equation)
    except ConfigError as problem:
        return f"{problem.what} ({problem.why})"
    return _read_weight(module, registered.weight, ndim, inside, experts)


def _read_own_equation(module: nnx.Module) -> Linear | str | None:
    """Describes a module of another package that has one matrix, one equation for it, and no submodules."""
    matrices = list(without_biases({name: getattr(module, name).shape for name in weight_names(module)}))
    equations = [value for value in vars(module).values() if isinstance(value, str) and "->" in value]
    if (
        len(matrices) != 1
        or len(equations) != 1
        or any(isinstance(value, nnx.Module) for value in vars(module).values())
    ):
        return None
    try:
        ndim = contracted(equations[0])[0]
    except ConfigError:
        return None
    if getattr(module, matrices[0]).ndim < ndim:
        return None
    return _read_registered(module, Registered(weight=matrices[0], equation=lambda _: equations[0]))


def _read_weight(module: nnx.Module, weight: str, ndim: int, inside: tuple[int, ...], experts: int = 0) -> Linear | str:
    value = getattr(module, weight, None)
    if not isinstance(value, nnx.Variable):
        return f"it has no parameter '{weight}'"
    if value.ndim < ndim:
        return f"its {weight} has {value.ndim} dimensions and its product needs {ndim}"
    if others := sorted(name for name, value in vars(module).items() if _has_state(value)):
        return f"its call may change what it holds ({', '.join(others)})"
    stack, shape = value.ndim - ndim + experts, tuple(value.shape)
    inside = tuple(axis - experts for axis in inside)
    return Linear(weight=weight, stack=shape[:stack], shape=shape[stack:], inside=inside, experts=experts)


def _has_state(value: Any) -> bool:
    """Whether an attribute is, or holds, what calls change: numbers of draws, statistics, caches."""
    if isinstance(value, nnx.Variable):
        return not isinstance(value, nnx.Param)
    return isinstance(value, nnx.Module | nnx.Rngs | nnx.RngStream) and any(map(_has_state, vars(value).values()))
