"""Which cases only `make test-nightly` runs because another case goes through the same code: covered_cases.txt."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent


def read_cases() -> dict[str, tuple[str, ...]]:
    """Covered case, test or file → the cases of every run that cover it."""
    cases: dict[str, tuple[str, ...]] = {}
    covering: tuple[str, ...] = ()
    indented = False
    for line in (TESTS / "covered_cases.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("    "):
            cases[line.strip()] = covering
        elif line and not line.startswith("#"):
            covering = (line,) if indented else (*covering, line)
        indented = line.startswith("    ")
    return cases


def read_covering() -> set[str]:
    return {case for covering in read_cases().values() for case in covering}


def mark_covered(items: Iterable[pytest.Item]) -> None:
    """Marks covered cases `nightly`."""
    cases, covering = read_cases(), read_covering()
    families = tuple(case[:-1] for case in cases if case.endswith("*"))
    file_of = cache(lambda path: path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else "")
    for item in items:
        file = file_of(item.path)
        case = f"{file}::{item.nodeid.partition('::')[2]}"
        test = case.partition("[")[0]
        if not covering & {case, test} and (cases.keys() & {case, test, file} or case.startswith(families)):
            item.add_marker(pytest.mark.nightly)
