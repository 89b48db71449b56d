"""Does a run that changes survive a kill before every system call of the change?

    python -m campaigns.kills_of_changes --work FOLDER --out benchmarks/results/kills_of_changes_cpu_DATE [--stride 5]

A run stands still, and adapters are to join it, to be extended or dropped, or it is to move to another mesh, as in
`test_kills_at_calls`, whose changes these are. Its resume is killed by SIGKILL just before one of the calls of Python
and of all libraries that change a folder or make a file durable. Then it is resumed to its end, and every adapter must
be where it would be undisturbed. Runs are of `quick_session`, without devices: all else is as it is.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
from campaigns import kills, tiny_run
from campaigns.changing_runs import CHANGES, ask, assert_nothing_lost, stop_after_a_step, write_jobs
from campaigns.quick_runs import command, quick_runs

from benchmarks.csv_rows import append_row

ENDED = (0, 3)


class Changes:
    """The runs that stand still, and what is done to copies of them; all of it in forked processes."""

    def __init__(self, work: Path, file: Path):
        self.work, self.file, self.log = work, file, work / "log"

    def prepare(self) -> None:
        self._must(lambda: bool(tiny_run.write_base(self.work / "base", num_layers=2)))
        write_jobs(self.work, self.work / "base")
        for done in (False, True):
            self._must(lambda done=done: stop_after_a_step(self.work, done=done).exists())

    def kill_at_calls(self, change: str, offset: int, stride: int, end: float) -> int:
        """Kills at each n-th call; returns the number of attempts that lost something."""
        run, options = self._asked(change)
        count = self.work / "calls"
        self._must(kills.killed_at_call(0, lambda: int(command("resume", run, *options).code not in ENDED), count), 0)
        calls, lost = int(count.read_text()), 0
        for call in range(1 + offset % stride, calls + 1, stride):
            if time.monotonic() > end:
                break
            run, options = self._asked(change)
            resume = kills.killed_at_call(call, lambda run=run, options=options: command("resume", run, *options).code)
            code = kills.Child(self.log, resume).wait()
            again = kills.Child(self.log, lambda run=run: self._check(run, change)).wait()
            good = again == 0 and code in (-9, *ENDED)
            lost += not good
            row = {"change": change, "call": call, "calls": calls, "code": code, "result": "whole" if good else "LOST"}
            append_row(self.file, row)
            if not good:
                print(row, self.log.read_text(errors="replace")[-1500:], flush=True)
        return lost

    def _asked(self, change: str) -> tuple[Path, list[str]]:
        self._must(lambda: bool(ask(self.work, change)))
        return self.work / "run", CHANGES[change][2]

    @staticmethod
    def _check(run: Path, change: str) -> int:
        assert_nothing_lost(run, change)
        return 0

    def _must(self, work: Callable[[], int | bool], code: int = 1) -> None:
        if kills.Child(self.log, lambda: int(work())).wait() != code:
            raise RuntimeError(self.log.read_text(errors="replace")[-3000:])


def main() -> int:
    parser = tiny_run.arguments_of_a_run(__doc__, work="folder for runs; they are removed")
    parser.add_argument("--stride", type=int, default=1, help="of the calls that are tried")
    parser.add_argument("--changes", nargs="+", choices=list(CHANGES), default=list(CHANGES))
    parser.add_argument("--limit-s", type=float, default=10**9)
    arguments: argparse.Namespace = parser.parse_args()
    work = arguments.work.resolve()
    kills.count_calls_of_all_libraries(work / "library", "campaigns.kills_of_changes")
    shutil.rmtree(work / "runs", ignore_errors=True)
    (work / "runs").mkdir(parents=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_num_cpu_devices", 4)  # a run that moves counts them
    end, lost = time.monotonic() + arguments.limit_s, 0
    with quick_runs():
        changes = Changes(work / "runs", arguments.out / "kills_of_changes.csv")
        changes.prepare()
        for number, change in enumerate(arguments.changes):
            part = time.monotonic() + (end - time.monotonic()) / (len(arguments.changes) - number)
            lost += changes.kill_at_calls(change, number, arguments.stride, part)
    print(f"{lost} lost")
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
