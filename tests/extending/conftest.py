"""Toy packages: a file with entry points that is found like an installed distribution."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def install(tmp_path, monkeypatch) -> Callable[[str, str, dict[str, dict[str, str]]], Path]:
    """install(module, source, {group: {name: object}}) makes a distribution of one module and puts it on the path.

    Child processes find it, too.
    """

    def write(module: str, source: str, points: dict[str, dict[str, str]]) -> Path:
        site = tmp_path / "site"
        info = site / f"{module}-1.0.dist-info"
        info.mkdir(parents=True)
        (site / f"{module}.py").write_text(source, encoding="utf-8")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n", encoding="utf-8")
        groups = [
            "\n".join([f"[{group}]", *(f"{name} = {module}:{thing}" for name, thing in named.items())])
            for group, named in points.items()
        ]
        (info / "entry_points.txt").write_text("\n".join(groups) + "\n", encoding="utf-8")
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.setenv("PYTHONPATH", str(site), prepend=":")
        importlib.invalidate_caches()
        return site

    return write
