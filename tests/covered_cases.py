"""Which cases only `make test-nightly` runs because another case goes through the same code: covered_cases.txt."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent


def read_cases() -> dict[str, str]:
    """Covered case, test or file → the case of every run that covers it."""
    cases, covering = {}, ""
    for line in (TESTS / "covered_cases.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("    "):
            cases[line.strip()] = covering
        elif line and not line.startswith("#"):
            covering = line
    return cases


def mark_covered(items: Iterable[pytest.Item]) -> None:
    """Marks covered cases `nightly`."""
    cases = read_cases()
    covering = set(cases.values())
    families = tuple(case[:-1] for case in cases if case.endswith("*"))
    for item in items:
        file = item.path.relative_to(TESTS).as_posix() if item.path.is_relative_to(TESTS) else ""
        case = f"{file}::{item.nodeid.partition('::')[2]}"
        test = case.partition("[")[0]
        if not covering & {case, test} and (cases.keys() & {case, test, file} or case.startswith(families)):
            item.add_marker(pytest.mark.nightly)
