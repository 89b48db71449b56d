"""Does any damaged input end in a traceback? Thousands of cases of each kind, found by hypothesis.

    python -m campaigns.fuzzing --out benchmarks/results/fuzzing_cpu_DATE    # 10 000 cases of each kind, half an hour
    python -m campaigns.fuzzing --out /tmp/x --profile default --only job_files        # a minute

Runs `tests/reliability/test_fuzz.py`, whose tests say what is asserted of a case: it ends well, or with an error that
names file and place. A row a test: kind, cases that passed, and the result; what
a failing test prints is beside the rows.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.conditions import conditions
from benchmarks.csv_rows import append_row

ROOT = Path(__file__).resolve().parents[2]
TESTS = "tests/reliability/test_fuzz.py"
KINDS = {
    "test_job_files": "job files",
    "test_rows_of_data": "rows of data",
    "test_files_of_data": "data files",
    "test_parquet_files": "Parquet files",
    "test_model_folders": "model folders",
    "test_peft_folders": "PEFT folders",
    "test_plans": "plans",
    "test_run_folders": "run folders and checkpoints",
    "test_requests": "requests to a run",
    "test_files_of_other_programs": "settings of other programs",
    "test_files_of_costs": "cost models",
    "test_timelines": "timelines",
    "test_toml_job_files": "job files in TOML",
}
TEST = re.compile(rf"^{re.escape(TESTS)}::(\w+)(\[[^\]]*\])?:$")
PASSED = re.compile(r"(\d+) passing")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--profile", default="nightly", help="of hypothesis, see tests/conftest.py")
    parser.add_argument("--only", nargs="+", choices=[name.removeprefix("test_") for name in KINDS])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "conditions.json").write_text(json.dumps(conditions()) + "\n")
    wanted = [f"test_{name}" for name in options.only] if options.only else list(KINDS)
    bad = 0
    for name in wanted:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", TESTS, "-k", name, "-m", "not gpu", "--hypothesis-show-statistics",
             "--hypothesis-profile", options.profile],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        cases = sum(cases_of(done.stdout).get(name, []))
        bad += done.returncode != 0 or not cases
        result = "no traceback"
        if done.returncode:
            result = "FAILED"
            (options.out / f"{name}.txt").write_text(done.stdout)  # the smallest case that fails
        row = {"kind": KINDS[name], "cases": cases, "result": result}
        append_row(options.out / "fuzzing.csv", row)
        print(row, flush=True)
    return int(bad > 0)


def cases_of(statistics: str) -> dict[str, list[int]]:
    """Passed cases of each test, a number for every phase of hypothesis and parameter.

    >>> cases_of("tests/reliability/test_fuzz.py::test_plans:\\n\\n  - during generate phase: 9 passing examples")
    {'test_plans': [9]}
    """
    passed_cases: dict[str, list[int]] = {}
    name = ""
    for line in statistics.splitlines():
        if (test := TEST.match(line.strip())) is not None:
            name = test[1]
        elif (passed := PASSED.search(line)) is not None and name:
            passed_cases.setdefault(name, []).append(int(passed[1]))
    return passed_cases


if __name__ == "__main__":
    raise SystemExit(main())
