"""Installed packages are read once, and again when one comes or goes."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

import pytest

from lorafusion_jax import plugins
from lorafusion_jax.errors import ConfigError

GROUP = "lorafusion_jax.numbers"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def reads(monkeypatch, tmp_path):
    """How often installed packages were read. Other tests write into the folders of the repository meanwhile."""
    outside = [path for path in sys.path if "site-packages" in path or not Path(path).resolve().is_relative_to(ROOT)]
    monkeypatch.syspath_prepend(str(tmp_path))  # keeps the path, which its undo puts back
    sys.path[:] = outside
    readings = []
    monkeypatch.setattr(plugins, "entry_points", lambda: readings.append(1) or importlib.metadata.entry_points())
    return readings


def test_packages_are_read_once(install, reads):
    install("answers", "SEVEN = 7", {GROUP: {"seven": "SEVEN"}})
    assert plugins.find(GROUP, {}, "seven", int) == 7  # its byte code is written beside it, and its folder changes
    assert [plugins.find(GROUP, {}, "seven", int) for _ in range(9)] == [7] * 9
    assert plugins.known_names(GROUP, {"one": 1}) == ["one", "seven"]
    assert len(reads) <= 2


def test_a_package_that_comes_later_is_found(install, tmp_path):
    site = install("answers_of_old", "SEVEN = 7", {GROUP: {"seven": "SEVEN"}})
    with pytest.raises(ConfigError, match="there is no 'eight'"):
        plugins.find(GROUP, {}, "eight", int)
    info = site / "answers_of_today-1.0.dist-info"
    info.mkdir()
    (site / "answers_of_today.py").write_text("EIGHT = 8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: answers_of_today\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\neight = answers_of_today:EIGHT\n")
    os.utime(site, (1, 1))  # clocks of file systems are coarse
    importlib.invalidate_caches()
    assert plugins.find(GROUP, {}, "eight", int) == 8
