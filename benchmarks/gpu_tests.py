"""Runs the tests that need a GPU and writes down how each of them ended; `make gpu-test` prints the same.

python benchmarks/gpu_tests.py --out results
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # not this folder: its scheduling.py is a benchmark


class Ends:
    """Writes a line for every test that ended."""

    def __init__(self, file: Path):
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        row = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
        if report.failed:
            row["why"] = str(report.longrepr)[-2000:]
        with self._file.open("a") as stream:
            stream.write(json.dumps(row) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    return pytest.main([str(ROOT / "tests"), "-m", "gpu"], plugins=[Ends(options.out / "gpu_tests.jsonl")])


if __name__ == "__main__":
    sys.exit(main())
