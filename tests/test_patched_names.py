"""What tests replace in our modules is there: a test of the nightly run would tell only then."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
OURS = ("lorafusion_jax", "pallas_kernels", "scheduling", "benchmarks")
Patch = tuple[str, str]  # a module, and names below it


def imported_modules(tree: ast.Module) -> dict[str, str]:
    """Names of a file that are modules of ours → the modules."""
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
            for alias in node.names:
                path = TESTS.parent.joinpath(*f"{node.module}.{alias.name}".split("."))
                if path.with_suffix(".py").exists() or path.is_dir():
                    modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return modules


def patches_of(source: str) -> Iterator[Patch]:
    """Every `….setattr(module, "name", …)` and `….setattr("module.name", …)`."""
    tree = ast.parse(source)
    modules = imported_modules(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="setattr"), args=[ast.Constant(value=str(path)), *_]):
                if path.split(".")[0] in OURS:
                    yield path, ""
            case ast.Call(
                func=ast.Attribute(attr="setattr"), args=[ast.Name(id=name), ast.Constant(value=str(attr)), *_]
            ):
                if name in modules:
                    yield modules[name], attr


def exists(module: str, attribute: str) -> bool:
    path, rest = module.split("."), [attribute] if attribute else []
    while True:
        try:
            value: Any = import_module(".".join(path))
            break
        except ModuleNotFoundError:
            rest.insert(0, path.pop())
    for name in rest:
        if not hasattr(value, name):
            return False
        value = getattr(value, name)
    return True


def test_what_a_test_replaces_is_there():
    texts = {file: file.read_text(encoding="utf-8") for file in TESTS.rglob("*.py")}
    files = {file: set(patches_of(text)) for file, text in texts.items() if "setattr(" in text}
    assert sum(map(len, files.values())) > 150
    missing = [
        f"{file.name}: {'.'.join(patch)}" for file, patches in files.items() for patch in patches if not exists(*patch)
    ]
    assert not missing


@pytest.mark.parametrize(
    ("source", "there"),
    [
        ("from lorafusion_jax.cli import job_calls as j\nmonkeypatch.setattr(j, 'named_calls', 1)", True),
        ("from lorafusion_jax.cli import tune\nmonkeypatch.setattr(tune, 'named_calls', 1)", False),
        ("patch.setattr('lorafusion_jax.cli.job_calls.LayerCalls.linears', 1)", True),
        ("patch.setattr('lorafusion_jax.cli.job_calls.LayerCalls.convolutions', 1)", False),
    ],
)
def test_a_name_that_has_moved_is_not_there(source, there):
    (patch,) = patches_of(source)
    assert exists(*patch) is there
