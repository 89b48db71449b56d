"""CPU seconds of test files: whoever adds a slow one sees it at the end of a run."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from forked_commands import CPU_S

SLOW_S = 30.0  # CPU seconds of a file: CONTRIBUTING.md, "Tests"


class CpuSeconds:
    """A pytest plugin: reports carry what a phase cost, of any worker; the end of a run lists slow files."""

    def __init__(self) -> None:
        self.before = spent()
        self.files: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        now = spent()
        report.cpu_s, self.before = now - self.before, now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.files[report.nodeid.split("::")[0]] += getattr(report, "cpu_s", 0.0)

    def pytest_terminal_summary(self, terminalreporter) -> None:
        slow = [(path, seconds) for path, seconds in self.files.most_common() if seconds > SLOW_S]
        if slow:
            terminalreporter.section(f"files of more than {SLOW_S:.0f} CPU seconds")
        for path, seconds in slow:
            terminalreporter.line(f"{seconds:6.1f} s  {path}")


def spent() -> float:
    """CPU seconds of this process, of children that have ended, and of commands that have."""
    return sum(os.times()[:4]) + CPU_S[0]
