"""Traverses the modules of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flax import nnx

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
