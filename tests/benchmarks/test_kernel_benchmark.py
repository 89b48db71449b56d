"""The kernel benchmark makes all tables and fails if a planned row has no result."""

import argparse
import csv
import json
import os
import subprocess
import sys

import pytest
from forked_commands import Command

from benchmarks import kernel_bytes, kernels

CASES = {
    case: {"bytes": moved, "kernels": 2, "dram__bytes_read.sum": moved - 1e6, "dram__bytes_write.sum": 1e6}
    for case, moved in (("xla_naive A1 p0.1", 1657e6), ("ours A1 p0.1", 954e6))
}


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def count_bytes(monkeypatch, tmp_path):
    """Runs kernel_bytes.py in this process, without asking a device for the conditions."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["kernel_bytes.py", "--out", str(tmp_path), "--cases", *CASES, *arguments])
        monkeypatch.setattr(kernel_bytes, "made_with", lambda: {"device": "cpu"})
        kernel_bytes.main()
        return lines(tmp_path / "bytes.jsonl")

    return run


def test_missing_rows_are_listed_by_shape():
    lines = [
        {"conditions": {}},
        {"group": "8192x4096->4096", "planned": ["frozen", "xla", "ours", "wide"]},
        {"group": "8192x8192->8192", "planned": ["frozen 8192", "ours 8192"]},
        {"group": "2048x8192->8192", "planned": ["frozen 2048"]},
        {"name": "frozen", "p50_us": 1.0}, {"name": "xla", "error": "no time left"},
        {"name": "ours", "error": "ValueError: too large"},  # a failure is told as one
        {"name": "frozen 2048", "p50_us": 1.0},
    ]  # fmt: skip
    assert kernels.missing("ops", lines) == [
        "ops, 8192x4096->4096: 2 of 4 rows: xla, wide",
        "ops, 8192x8192->8192: 2 of 2 rows: all",
    ]
    assert kernels.missing("ops", lines[3:4] + lines[7:]) == []


def test_a_section_that_is_killed_at_its_deadline_fails(monkeypatch, tmp_path):
    class Hangs:
        killed = False

        def __init__(self, command, **options):
            assert "ops.jsonl" not in [file.name for file in tmp_path.iterdir()]  # of an earlier run

        def wait(self, timeout=None):
            if timeout:
                raise subprocess.TimeoutExpired("child", timeout)

        def kill(self):
            Hangs.killed = True

    (tmp_path / "ops.jsonl").write_text("{}\n")
    monkeypatch.setattr(kernels.subprocess, "Popen", Hangs)
    options = argparse.Namespace(out=tmp_path, only=[], variants=[], matching="", tiny=True)
    assert not kernels.run_section("ops", options, 1.0)
    assert Hangs.killed


@pytest.mark.parametrize(
    ("chosen", "rows"), [((), 15), (("--variants", "frozen", "xla", "--matching", "^frozen|A4_p0$"), 2)]
)
def test_running_out_of_time_fails_and_names_the_rows(tmp_path, chosen, rows):
    words = ["-m", "benchmarks.kernels", "--tiny", "--sections", "ops", "--budget", "1", "--out"]
    command = Command([*words, str(tmp_path), *chosen], os.environ)
    out, err = command.communicate()
    assert command.returncode == 1, err
    assert f"MISSING: no time was left for\n  ops, 256x256->512: {rows} of {rows} rows: all" in out


def test_bytes_are_skipped_without_a_profiler(monkeypatch, count_bytes, tmp_path, capsys):
    monkeypatch.setattr(kernel_bytes.shutil, "which", lambda program: None)
    _, skipped = count_bytes()
    assert skipped == {"skipped": "the profiler ncu is not on the path"}
    assert kernels.report(tmp_path, ["bytes"]) == 0
    assert "bytes: skipped, the profiler ncu is not on the path" in capsys.readouterr().out


def test_bytes_are_a_section_with_a_table_like_the_others(monkeypatch, count_bytes, tmp_path, capsys):
    monkeypatch.setattr(kernel_bytes, "not_here", lambda: None)
    monkeypatch.setattr(kernel_bytes, "count", lambda case, *options: CASES[case])
    count_bytes()
    monkeypatch.setattr(kernels, "run_section", lambda section, options, budget_s: section == "bytes")
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--sections", "bytes", "--out", str(tmp_path)])
    assert kernels.main() == 0
    assert "ours A1 p0.1            954.0 MB in 2 kernels" in capsys.readouterr().out
    with (tmp_path / "kernels_bytes.csv").open(newline="") as stream:
        measured = [row for row in csv.DictReader(stream) if row["device"] == "cpu"]
    assert [(row["case"], float(row["of_naive"])) for row in measured] == [
        ("xla_naive A1 p0.1", 1.0), ("ours A1 p0.1", pytest.approx(954 / 1657, abs=1e-4)),
    ]  # fmt: skip


def test_a_case_that_fails_or_has_no_time_fails_the_command(monkeypatch, count_bytes, tmp_path):
    monkeypatch.setattr(kernel_bytes, "not_here", lambda: None)
    monkeypatch.setattr(kernel_bytes, "CASE_S", 0.0)
    rows = count_bytes("--budget", "0")  # cases start and are stopped at once
    assert [line["error"] for line in rows if "error" in line] == ["no time left"] * 2
    assert kernels.report(tmp_path, ["bytes"]) == 0  # not failed ...
    assert kernels.missing("bytes", rows) == ["bytes, 4096 features, rank 16: 2 of 2 rows: all"]
    count_bytes()
    assert kernels.report(tmp_path, ["bytes"]) == 2  # ... as these are
