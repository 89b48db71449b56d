"""The order in which rooms may import each other, without cycles at any level."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("scheduling", "pallas_kernels", "lorafusion_jax")
TOWER: tuple[set[str], ...] = (  # of lorafusion_jax, from the ground up: a room imports lower floors only
    {"errors", "layout", "readable"},
    {"files", "log_file", "plugins", "sealed_programs", "signals", "tensor_file"},
    {"digests", "examples"},
    {"new_folder"},
    {"adapters", "tuning_table", "weights"},
    {"optim"},
    {"families", "machine", "modules", "objective"},
    {"models"},
    {"peft"},
    {"config"},
    {"checkpoint"},
    {"data"},
    {"rollout"},
    {"report"},
    {"planning"},
    {"session"},
    {"generation"},
    {"training"},
    {"api"},
    {"cli"},
    {"serve"},
    {"__main__", "extend"},
)
MODULES = {
    path.with_suffix("").relative_to(ROOT).parts: path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}

Name = tuple[str, ...]


def imports(module: Name) -> Iterator[Name]:
    """Modules of ours that a module imports, anywhere in it."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from filter(None, (module_of(tuple(alias.name.split("."))) for alias in node.names))
        elif isinstance(node, ast.ImportFrom):
            above = module[: len(module) - node.level] if node.level else ()
            base = above + tuple((node.module or "").split(".") if node.module else ())
            yield from filter(None, (module_of((*base, alias.name)) for alias in node.names))


def module_of(name: Name) -> Name | None:
    """The module that defines a name: itself a module, a package, or something inside of one."""
    for candidate in (name, (*name, "__init__"), name[:-1], (*name[:-1], "__init__")):
        if candidate in MODULES:
            return candidate
    return None


@cache
def edges() -> set[tuple[Name, Name]]:
    """Who imports whom."""
    return {(module, other) for module in MODULES for other in imports(module) if other != module}


def siblings(folder: Name) -> set[tuple[str, str]]:
    """Who imports whom among the files and folders right inside a folder; its `__init__` is the face of them all."""
    depth = len(folder)
    inside = ((a[depth], b[depth]) for a, b in edges() if a[:depth] == b[:depth] == folder)
    return {(a, b) for a, b in inside if a != b and "__init__" not in (a, b)}


def circle(edges: Iterable[tuple[str, str]]) -> list[str]:
    """Names that import each other in a circle; empty if there is none."""
    left = set(edges)
    while True:
        sources, targets = {a for a, _ in left}, {b for _, b in left}
        # Whoever is imported by nobody, or imports nobody, is in no circle.
        rest = {(a, b) for a, b in left if a in targets and b in sources}
        if rest == left:
            return sorted(sources)
        left = rest


@pytest.mark.parametrize("folder", sorted({module[:-1] for module in MODULES}), ids=".".join)
def test_no_import_cycles(folder):
    assert circle(siblings(folder)) == []


def test_rooms_import_only_lower_rooms():
    floor_of = {room: floor for floor, rooms in enumerate(TOWER) for room in rooms}
    edges = siblings(("lorafusion_jax",))
    unknown = {room for edge in edges for room in edge} - floor_of.keys()
    assert not unknown, "a new room needs its place in the tower"
    assert [f"{a} -> {b}" for a, b in sorted(edges) if floor_of[a] <= floor_of[b]] == []


def test_few_rooms_import_others():
    """Folders of a package, and what stands beside them: a reader of one room opens those that it imports."""

    def room(module: Name) -> Name:
        return module[: min(2, len(module) - 1)]

    assert len({(room(a), room(b)) for a, b in edges() if room(a) != room(b)}) < 236


def test_packages_import_each_other_one_way():
    assert {(a[0], b[0]) for a, b in edges() if a[0] != b[0]} == {
        ("lorafusion_jax", "scheduling"),
        ("lorafusion_jax", "pallas_kernels"),
    }


def test_cycles_are_detected():
    assert circle({("a", "b"), ("b", "c"), ("c", "a"), ("d", "a"), ("c", "e")}) == ["a", "b", "c"]
    assert circle({("a", "b"), ("b", "c"), ("a", "c")}) == []
    assert circle({("a", "a")}) == ["a"]
