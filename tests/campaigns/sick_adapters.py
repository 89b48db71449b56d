"""Does an adapter that gets sick leave the others bitwise as they are?

    python -m campaigns.sick_adapters --out benchmarks/results/sick_adapters_cpu_DATE [--limit-s 300]

runs every configuration of tests/reliability/sick_adapters.py and writes a row for each as it ends. What has a row in
the file is not run again.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
import time
from pathlib import Path

import pytest

from benchmarks.conditions import conditions
from benchmarks.csv_rows import append_row

ROOT = Path(__file__).resolve().parents[2]
TESTS = "tests/reliability/test_sick_adapters.py"
MESHES = {
    "test_one_device": "1 device",
    "test_two_stages_by_two_replicas": "2 stages x 2 replicas",
    "test_quantised_base": "1 device, quantised",
}
_NAME = re.compile(r"::(\w+)\[(.+)\]$")


class Rows:
    """A plugin of pytest that writes a row for each configuration."""

    def __init__(self, file: Path, limit_s: float):
        self._file, self._end = file, time.monotonic() + limit_s
        self.failed, self._have = 0, set()
        if file.exists():
            with file.open(encoding="utf-8") as stream:
                self._have = {(row["mesh"], row["configuration"]) for row in csv.DictReader(stream)}

    def pytest_collection_modifyitems(self, items: list) -> None:
        items[:] = [item for item in items if self._place(item.nodeid) not in self._have]

    @staticmethod
    def _place(nodeid: str) -> tuple[str, str] | None:
        """Mesh and configuration of a test; None of others."""
        match = _NAME.search(nodeid)
        return (MESHES[match[1]], match[2]) if match and match[1] in MESHES else None

    def pytest_runtest_logreport(self, report) -> None:
        case = self._place(report.nodeid)
        if report.when != "call" or case is None or report.skipped:
            return
        self.failed += report.failed
        row = {"mesh": case[0], "configuration": case[1], "others": "bitwise" if report.passed else "DIFFER"}
        append_row(self._file, row | {"seconds": round(report.duration, 1)} | conditions())

    def pytest_runtest_setup(self, item) -> None:
        if time.monotonic() > self._end:
            pytest.skip("the time is over")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=3600)
    parser.add_argument("--mesh", choices=list(MESHES.values()), help="of all configurations; both when absent")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = Rows(arguments.out / "sick_adapters.csv", arguments.limit_s)
    chosen = " or ".join(test for test, mesh in MESHES.items() if arguments.mesh in (mesh, None))
    code = pytest.main([str(ROOT / TESTS), "-q", "-m", "not gpu", "-k", chosen, "-p", "no:randomly"], plugins=[rows])
    return int(code != 0 or rows.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
