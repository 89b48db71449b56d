"""Does `lorafusion verify RUN ADAPTER` cry wolf, and does it find faults? Random sweeps, and faults in joint training.

    python -m benchmarks.verify_sweeps --out benchmarks/results/verify_sweeps_cpu_DATE    # five minutes

Runs the sweeps and planted faults of `tests/reliability/test_compare_alone.py`, nightly ones too. A row for each: the
worst difference of joint and separate training as a multiple of its bound, and where it is.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.conditions import conditions
from benchmarks.csv_rows import append_row
from benchmarks.harness import command_line

ROOT = Path(__file__).resolve().parents[1]
TESTS = "tests/reliability/test_compare_alone.py"
KINDS = {"test_no_false_alarm": "honest sweep", "test_planted_faults_are_found": "planted fault"}


class Rows:
    """A plugin of pytest that writes a row for each sweep and each fault."""

    def __init__(self, file: Path):
        self._file = file
        self.failed = 0

    def pytest_runtest_logreport(self, report) -> None:
        test, _, case = report.nodeid.rpartition("::")[2].removesuffix("]").partition("[")
        if report.when != "call" or test not in KINDS or case == "None":
            return
        self.failed += report.failed
        worst = dict(report.user_properties)
        row = {"kind": KINDS[test], "case": case, "result": "as it should be" if report.passed else "WRONG"}
        append_row(self._file, row | {key: worst.get(key) for key in ("of_bound", "step", "tensor")} | conditions())


def main() -> int:
    parser = command_line(__doc__)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = Rows(options.out / "verify_sweeps.csv")
    code = pytest.main([str(ROOT / TESTS), "-q", "-m", "not gpu", "-k", " or ".join(KINDS)], plugins=[rows])
    return int(code != 0 or rows.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
