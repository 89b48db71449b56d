"""Public names of a package that are imported on first use.

A package that must be importable without jax lists its names once, where type checkers read them:

    if TYPE_CHECKING:
        from lorafusion_jax.api.jobs import load_job as load_job

    __getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """The `__getattr__`, `__dir__` and `__all__` of a package: names that `file` imports under `if TYPE_CHECKING`."""
    homes = _homes(ast.parse(Path(file).read_text(encoding="utf-8")))
    names = sorted(homes)

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return get, lambda: names, names


def _homes(tree: ast.Module) -> dict[str, str]:
    """{name: module that defines it}."""
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.name: node.module or "" for node in imports for alias in node.names}
