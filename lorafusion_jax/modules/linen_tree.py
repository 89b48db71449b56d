"""Trees of Linen's variables: dictionaries of dictionaries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def node_at(tree: Any, path: tuple[str, ...]) -> Any:
    """Returns the dictionary at a path, and makes it where there is none."""
    for part in path:
        tree = tree.setdefault(part, {})
    return tree


def copy_dicts(tree: Any) -> dict[str, Any]:
    """Copies the dictionaries of a tree, with the same leaves."""
    return {key: copy_dicts(value) if isinstance(value, Mapping) else value for key, value in tree.items()}
