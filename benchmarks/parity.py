"""How far are models of every family from transformers and PEFT, in logits, losses and gradients?

    python -m benchmarks.parity --out benchmarks/results/parity_cpu_DATE    # ten minutes
    python -m benchmarks.parity --out FOLDER --only gemma4                  # some models; the rows of others stay

Runs the comparisons with stored results of `tests/models/test_parity.py`, nightly ones too, and writes a row for each
model: the largest difference of logits and loss, and of the gradients of an adapter's tensors, relative.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.conditions import conditions
from benchmarks.csv_rows import read_rows, write_rows
from benchmarks.harness import command_line

ROOT = Path(__file__).resolve().parents[1]
TESTS, CASE = "tests/models/test_parity.py", "test_a_family_computes_what_transformers_and_peft_do"
COLUMNS = ("case", "family", "results", "gradients", "device", "jax", "jaxlib", "date", "commit", "code")


class Differences:
    """A plugin of pytest that keeps what the test compared."""

    def __init__(self) -> None:
        self.rows: list[dict] = []

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" and "results" in (compared := dict(report.user_properties)):
            self.rows.append(compared)


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    found = Differences()
    chosen = f"{CASE} and {options.only}" if options.only else CASE
    code = pytest.main([str(ROOT / TESTS), "-q", "-m", "not gpu", "-k", chosen], plugins=[found])
    options.out.mkdir(parents=True, exist_ok=True)
    file, new = options.out / "parity.csv", [row | conditions() for row in found.rows]
    cases = {row["case"] for row in new}
    kept = [row for row in read_rows(file) if row["case"] not in cases] if file.exists() else []
    write_rows(file, [{key: row[key] for key in COLUMNS} for row in (*kept, *new)])
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
