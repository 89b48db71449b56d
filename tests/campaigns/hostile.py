"""Damaged and strange input of every reader: no trace, and within the limits of `limits`, measured input by input.

Fuzzed: the properties of `tests/reliability/test_fuzz.py`, each with many seeds. By hand: the tests that bring pipes,
devices, bombs, odd values, files of others. pytest runs them, in processes that are forked from one that has imported
what they need.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import limits
import pytest
from campaigns.cases import Case, Row

TESTS = Path(__file__).resolve().parents[1]
FUZZ = "reliability/test_fuzz.py"
KINDS = (
    "job_files",
    "rows_of_data",
    "files_of_data",
    "parquet_files",
    "model_folders",
    "peft_folders",
    "plans",
    "run_folders",
    "requests",
    "files_of_other_programs",
    "files_of_costs",
    "timelines",
    "toml_job_files",
)
SEEDS = 10
BY_HAND = {  # file → processes that share its tests
    "reliability/test_hostile_files.py": 6,
    "reliability/test_hostile_requests.py": 2,
    "reliability/test_unreadable.py": 1,
    "cli/test_hostile_jobs.py": 6,
    "config/test_odd_values.py": 6,
    "checkpoint/test_peft_refusals.py": 3,
    "data/test_sandbox.py": 1,
}


class Hostile:
    name = "hostile"

    def prepare(self, home: Path) -> None:
        pass

    def cases(self, home: Path) -> Iterable[Case]:
        for file, count in BY_HAND.items():
            for number in range(count):
                name = f"{file} {number + 1}/{count}"
                yield Case(name=name, run=partial(_by_hand, file, number, count))
        for seed in range(SEEDS):
            for kind in KINDS:
                yield Case(name=f"{kind} seed {seed}", run=partial(_fuzzed, kind, seed))


class Limited:
    """A plugin of pytest: of a file's tests every `count`-th, each within the limits."""

    def __init__(self, number: int, count: int):
        self._number, self._count = number, count

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = items[self._number :: self._count]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item):
        with limits.limited():
            return (yield)


def _by_hand(file: str, number: int, count: int, work: Path) -> Row:
    return _tested(file, work, [], [Limited(number, count)]) | {"part": "by hand"}


def _fuzzed(kind: str, seed: int, work: Path) -> Row:
    options = ["-k", f"test_{kind}", "--hypothesis-profile", "batch", "--hypothesis-seed", str(seed)]
    return _tested(FUZZ, work, options, []) | {"part": f"fuzzed: {kind.replace('_', ' ')}"}


def _tested(file: str, work: Path, options: list[str], plugins: list[object]) -> Row:
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they are imported, and pytest would warn
    common = ["-p", "_hypothesis_pytestplugin", "-m", "not gpu", f"--basetemp={work / 'pytest'}", "--tb=short"]
    code = pytest.main([str(TESTS / file), *common, *options], plugins=plugins)
    costs = limits.MEASURED
    assert code == 0, f"pytest ended with {code}"
    assert costs, "nothing was tried"
    return {
        "inputs": len(costs),
        "cpu_s": round(max(cost.cpu_s for cost in costs), 2),
        "peak_mb": round(max(cost.grown_mb for cost in costs)),
    }
