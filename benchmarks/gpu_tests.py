"""Runs the tests that need a GPU and records their outcomes; `make gpu-test` prints the same.

python -m benchmarks.gpu_tests --out benchmarks/results/gpu_tests_h200_2026-11-24
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.harness import add_row, command_line
from benchmarks.measured_code import write_measured

ROOT = Path(__file__).resolve().parents[1]


class Ends:
    """Writes a line for every finished test, and for every file that could not be collected."""

    def __init__(self, file: Path):
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self._write(report, {"seconds": round(report.duration, 2)})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._write(report, {})

    def _write(self, report: pytest.TestReport | pytest.CollectReport, more: dict) -> None:
        row = {"test": report.nodeid, "outcome": report.outcome} | more
        if report.failed:
            row["why"] = reason(report.longrepr)
        add_row(self._file, row)


def reason(longrepr: object) -> str:
    """The error without its traceback."""
    crash = getattr(longrepr, "reprcrash", None)
    if crash is not None:
        return crash.message
    errors = [line[1:].strip() for line in str(longrepr).splitlines() if line.startswith("E ")]
    return "\n".join(errors) or str(longrepr).strip().splitlines()[-1]


def main() -> int:
    options = command_line(__doc__).parse_args()
    write_measured(options.out)
    # A file with a missing package (notebooks need a few) is recorded and does not stop the others.
    chosen = [str(ROOT / "tests"), "-m", "gpu", "--continue-on-collection-errors"]
    return pytest.main(chosen, plugins=[Ends(options.out / "gpu_tests.jsonl")])


if __name__ == "__main__":
    sys.exit(main())
