"""How far are gradients of joint training from those of an adapter alone, for each tensor, on this device?

    python -m benchmarks.joint_alone --out benchmarks/results/joint_alone_h200_DATE    # two minutes on a GPU

Runs the test of joint and separate training of `tests/gpu/test_whole_runs_gpu.py` and writes what it compares: losses
and gradients of three steps at equal weights, and what the steps moved. The bound is four times what another packing of
the adapter alone changes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from benchmarks.conditions import conditions
from benchmarks.csv_rows import write_rows

ROOT = Path(__file__).resolve().parents[1]
TEST = "tests/gpu/test_whole_runs_gpu.py"
CASE = "test_joint_equals_separate_training_but_for_rounding"


class Differences:
    """A plugin of pytest that keeps what the test compared."""

    def __init__(self) -> None:
        self.rows: list[dict] = []

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call":
            dtype = report.nodeid.rpartition("[")[2].removesuffix("]")
            self.rows += [{"dtype": dtype} | row for row in dict(report.user_properties).get("differences", [])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", default="", help="bfloat16 or float32 only")
    options = parser.parse_args()
    found = Differences()
    chosen = f"{CASE} and {options.dtype}" if options.dtype else CASE
    code = pytest.main([str(ROOT / TEST), "-q", "-m", "gpu", "-k", chosen], plugins=[found])
    if not found.rows:
        return int(code) or 1
    options.out.mkdir(parents=True, exist_ok=True)
    facts = {key: value for key, value in conditions().items() if key != "code"}
    write_rows(options.out / "joint_alone.csv", [row | facts for row in found.rows])
    for dtype in dict.fromkeys(row["dtype"] for row in found.rows):
        rows = [row for row in found.rows if row["dtype"] == dtype]
        worst = max(rows, key=lambda row: row["value"] / row["bound"])
        share = worst["value"] / worst["bound"]
        print(f"{dtype}: {len(rows)} compared, most {share:.2f} of the bound: {worst['tensor']}, step {worst['step']}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
