"""Walking over the modules inside a model, and putting others in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flax import nnx

Path = tuple[str | int, ...]


def walk(node: Any, path: Path = ()) -> Iterator[tuple[Path, nnx.Module]]:
    """Yields every module with every path that leads to it; a shared module comes once per path.

    >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)
    >>> [(dotted(path), type(module).__name__) for path, module in walk(model)]
    [('', 'Sequential'), ('layers', 'List'), ('layers.0', 'Linear')]
    """
    return _walk(node, path, frozenset())


def _walk(node: Any, path: Path, above: frozenset[int]) -> Iterator[tuple[Path, nnx.Module]]:
    if id(node) in above:  # a module that holds its own parent
        return
    if isinstance(node, nnx.Module):
        yield path, node
    for key, child in children(node):
        yield from _walk(child, (*path, key), above | {id(node)})


def replace_modules(node: Any, new: Mapping[int, nnx.Module], seen: set[int] | None = None) -> Any:
    """Puts `new[id(module)]` in the place of modules, wherever they are referenced.

    Args:
        node: model or container; changed in place where it can be.
        new: replacements; kept alive by the caller together with the modules that they replace.

    Returns:
        `node`, or what stands in its place: a replacement, or a new tuple.
    """
    seen = set() if seen is None else seen
    if id(node) in new:
        return new[id(node)]
    if id(node) in seen:
        return node
    seen.add(id(node))
    changed = {key: value for key, child in children(node) if (value := replace_modules(child, new, seen)) is not child}
    if changed and isinstance(node, tuple):
        parts = [changed.get(index, child) for index, child in enumerate(node)]
        return type(node)(*parts) if hasattr(node, "_fields") else tuple(parts)
    for key, value in changed.items():
        _assign(node, key, value)
    return node


def children(node: Any) -> list[tuple[str | int, Any]]:
    """Lists what a module or container holds, with the key of each."""
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


def _assign(node: Any, key: Any, value: Any) -> None:
    if isinstance(node, nnx.List | nnx.Dict | list | dict):
        node[key] = value
    elif isinstance(value, nnx.Module):
        setattr(node, key, value)
    else:
        setattr(node, key, nnx.data(value))  # a rebuilt tuple of modules
