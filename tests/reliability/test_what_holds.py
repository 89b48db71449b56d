"""Every row of what holds on the page about reliability names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

from campaigns.reliability_table import is_good, table

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "pages" / "reliability.md"
TEST = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def rows() -> list[str]:
    text = PAGE.read_text(encoding="utf-8")
    lines = text.partition("## What holds")[2].partition("\n## ")[0].splitlines()
    return [line for line in lines if line.startswith("| ") and not line.startswith(("| what holds |", "| **"))]


def test_everything_that_holds_has_a_test():
    assert len(rows()) > 30
    assert [row for row in rows() if not TEST.search(row)] == []


def test_the_tests_exist():
    missing = [
        f"{file}::{name}"
        for row in rows()
        for file, name in TEST.findall(row)
        if f"\ndef {name}(" not in (ROOT / "tests" / file).read_text(encoding="utf-8")
    ]
    assert missing == []


def test_files_that_are_named_exist():
    missing = [
        file
        for file in re.findall(r"`(\w+/\w+\.py)", PAGE.read_text(encoding="utf-8"))
        if not any((ROOT / folder / file).exists() for folder in ("", "tests"))
    ]
    assert missing == []


def test_the_figures_hide_nothing():
    """A miss of a committed row would stand in the table."""
    assert "missed" in table()
    good = {"kind": "SIGTERM", "code": 130, "acknowledged_s": 0.1, "resumed": 0, "bitwise": True, "leftovers": ""}
    good |= {"traceback": False}
    assert is_good(good)
    lost = {"code": 0, "acknowledged_s": ""}  # the run went on to its end
    for bad in ({"code": -15}, lost, {"resumed": 2}, {"bitwise": False}, {"leftovers": ".x"}, {"traceback": True}):
        assert not is_good(good | bad)
