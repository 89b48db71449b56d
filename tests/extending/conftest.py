"""Toy packages: a file with entry points that is found like an installed distribution."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest


def install_distribution(
    site: Path, patch: pytest.MonkeyPatch, module: str, source: str, points: dict[str, dict[str, str]]
) -> Path:
    """Makes a distribution of one module and puts it on the path; child processes find it, too."""
    info = site / f"{module}-1.0.dist-info"
    info.mkdir(parents=True)
    (site / f"{module}.py").write_text(source, encoding="utf-8")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n", encoding="utf-8")
    groups = [
        "\n".join([f"[{group}]", *(f"{name} = {module}:{thing}" for name, thing in named.items())])
        for group, named in points.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups) + "\n", encoding="utf-8")
    patch.syspath_prepend(str(site))
    patch.setenv("PYTHONPATH", str(site), prepend=":")
    importlib.invalidate_caches()
    return site


type Install = Callable[[str, str, dict[str, dict[str, str]]], Path]


@pytest.fixture
def install(tmp_path, monkeypatch) -> Install:
    """install(module, source, {group: {name: object}}) → folder of the distribution, for one test."""
    return partial(install_distribution, tmp_path / "site", monkeypatch)


@pytest.fixture(scope="module")
def install_for_module(tmp_path_factory) -> Iterator[Install]:
    """The same for all tests of a module, so that they can share a run."""
    with pytest.MonkeyPatch.context() as patch:
        yield partial(install_distribution, tmp_path_factory.mktemp("installed") / "site", patch)
