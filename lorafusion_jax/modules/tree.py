"""Traverses the modules of a model, and calls one otherwise: as a subclass of its class."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

Path = tuple[str | int, ...]


def walk(node: Any, path: Path = ()) -> Iterator[tuple[Path, nnx.Module]]:
    """Yields every module with its path. A shared module is yielded once per path.

    >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)
    >>> [(dotted(path), type(module).__name__) for path, module in walk(model)]
    [('', 'Sequential'), ('layers', 'List'), ('layers.0', 'Linear')]
    """
    return _walk(node, path, frozenset())


def _walk(node: Any, path: Path, above: frozenset[int]) -> Iterator[tuple[Path, nnx.Module]]:
    if id(node) in above:  # a module that contains its own parent
        return
    if isinstance(node, nnx.Module):
        yield path, node
    for key, child in children(node):
        yield from _walk(child, (*path, key), above | {id(node)})


def children(node: Any) -> list[tuple[str | int, Any]]:
    """Lists the children of a module or container, with their keys."""
    if isinstance(node, nnx.List | list | tuple):
        return list(enumerate(node))
    if isinstance(node, nnx.Dict | dict):
        return list(node.items())
    if isinstance(node, nnx.Module):
        return [(name, child) for name, child in vars(node).items() if not name.startswith("_pytree__")]
    return []


def dotted(path: Path) -> str:
    """("layers", 0, "q_proj") → "layers.0.q_proj"."""
    return ".".join(map(str, path))


@cache
def exchanged_class(
    cls: type, prefix: str, call: Callable[..., Any], attribute: Callable[[Any, str], Any] | None = None
) -> type:
    """Returns a subclass of a module's class that is called otherwise: `isinstance` still holds.

    Args:
        attribute: replaces `__getattribute__`.
    """

    def __call__(module: Any, *args: Any, **options: Any) -> Any:  # named like any module's, for `nnx.tabulate`
        return call(module, *args, **options)

    def reduce(module: Any, protocol: Any) -> tuple:
        """Names how the class is made: pickle looks a class up by its name, and no module has this one."""
        return (_new, (cls, prefix, call, attribute), *super(cls_with_call, module).__reduce_ex__(protocol)[2:])

    members = {"__call__": __call__, "lora_class": cls, "__module__": cls.__module__, "__reduce_ex__": reduce}
    members |= {} if attribute is None else {"__getattribute__": attribute}
    cls_with_call = type(f"{prefix}{cls.__name__}", (cls,), members)
    return cls_with_call


def _new(cls: type, prefix: str, call: Callable[..., Any], attribute: Callable[[Any, str], Any] | None) -> Any:
    subclass: Any = exchanged_class(cls, prefix, call, attribute)
    return subclass.__new__(subclass)


def own_class(module: nnx.Module) -> type:
    """Returns the class of a module before its call was exchanged."""
    return getattr(type(module), "lora_class", type(module))


def placed_like(before: Any, array: np.ndarray) -> jax.Array:
    """Puts an array where the one that it replaces is, split along the same axes where they still divide evenly.

    What is bound to no device stays so: otherwise programs would compile again.
    """
    if not isinstance(before, jax.Array) or not before.committed:
        return jnp.asarray(array)
    sharding = before.sharding
    if before.shape != array.shape and isinstance(sharding, NamedSharding):
        spec = (*sharding.spec, *[None] * (array.ndim - len(sharding.spec)))
        sizes = [sharding.shard_shape(before.shape)[axis] for axis in range(before.ndim)]
        parts = [before.shape[axis] // max(size, 1) for axis, size in enumerate(sizes)]
        even = [names if array.shape[axis] % parts[axis] == 0 else None for axis, names in enumerate(spec)]
        sharding = sharding.update(spec=PartitionSpec(*even))
    return jax.device_put(array, sharding)
