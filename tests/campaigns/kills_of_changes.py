"""A run that changes is killed before every call of the change that touches its folder.

A run begins, or it stands still and adapters are to join it, to be extended or dropped, or it is to move to another
mesh: the changes of `changing_runs`. The command is killed by SIGKILL just before one of its calls, also of libraries
without Python. Then the run is resumed to its end, and every adapter must be where it would be undisturbed. Runs are
of `quick_session`, without devices: all else is as it is.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from campaigns import tiny_run
from campaigns.cases import Case, Row, in_any_order
from campaigns.changing_runs import CHANGES, ask, assert_nothing_lost, stop_after_a_step, write_jobs
from campaigns.disk_calls import watched
from campaigns.forked import Child
from campaigns.quick_runs import Said, command, quick_runs

BEGIN = "begin"
ENDED = (0, 3)


def prepare_changes(home: Path) -> None:
    """A folder with the run of every change, as it is before the change; and the calls of each."""
    tiny_run.write_base(home / "base", num_layers=2)
    write_jobs(home, home / "base")
    for done in (False, True):
        stop_after_a_step(home, done=done)
    calls = {}
    for change in (BEGIN, *CHANGES):
        if change != BEGIN:
            ask(home, change, asked(home, change))
        run = copy_of(home, change, home / "counted")
        with watched(run) as seen:
            assert command(*arguments_of(home, change, run)).code in ENDED
        calls[change] = seen.calls
    (home / "calls.json").write_text(json.dumps(calls), encoding="utf-8")


def calls_of_changes(home: Path) -> dict[str, str]:
    """What `watched` saw of every change."""
    return json.loads((home / "calls.json").read_text(encoding="utf-8"))


def calls_of_kinds(calls: str, kinds: str) -> list[int]:
    """Numbers of the calls of these kinds."""
    return [number for number, kind in enumerate(calls, 1) if kind in kinds]


def asked(home: Path, change: str) -> Path:
    return home / "asked" / change.replace(" ", "-")


def copy_of(home: Path, change: str, run: Path) -> Path:
    """The run before a change, or the place of a run that is to begin."""
    shutil.rmtree(run, ignore_errors=True)
    if change != BEGIN:
        shutil.copytree(asked(home, change), run, symlinks=True)
    return run


def arguments_of(home: Path, change: str, run: Path) -> list[object]:
    return ["train", home / "jobs.yaml", "--out", run] if change == BEGIN else ["resume", run, *CHANGES[change][2]]


def in_a_process(*arguments: object, folder: Path, log: Path, at: int, error: int = 0, lasting: bool = False) -> Said:
    """Runs a command in a forked process in which a call below a folder kills or fails."""

    def work() -> int:
        with watched(folder, at=at, error=error, lasting=lasting):
            outcome = command(*arguments)
        print(outcome.text, flush=True)
        return outcome.code

    code = Child(log, work).wait()
    return Said(code, log.read_text(encoding="utf-8", errors="replace"))


def assert_it_goes_on(home: Path, run: Path, change: str) -> None:
    """What a disturbed change left can be resumed, or the run can begin there, and nothing is lost."""
    if change == BEGIN and not (run / "plan.json").exists():
        shutil.rmtree(run, ignore_errors=True)
        assert command(*arguments_of(home, change, run)).code == 0
    assert_nothing_lost(run, "move" if change == BEGIN else change)  # both end with the adapters of the job


class KillsOfChanges:
    name = "kills_of_changes"

    @quick_runs()
    def prepare(self, home: Path) -> None:
        prepare_changes(home)

    def cases(self, home: Path) -> Iterable[Case]:
        """Calls of names first; a kill before a call that makes something durable leaves what one after it leaves."""
        calls = calls_of_changes(home)
        for kinds in ("n", "w", "s"):
            cases = [
                Case(name=f"{change} @ {call}", run=partial(self._kill, home, change, call))
                for change in calls
                for call in calls_of_kinds(calls[change], kinds)
            ]
            yield from in_any_order(cases, f"{self.name} {kinds}")

    @staticmethod
    @quick_runs()
    def _kill(home: Path, change: str, call: int, work: Path) -> Row:
        run = copy_of(home, change, work / "run")
        outcome = in_a_process(*arguments_of(home, change, run), folder=run, log=work / "killed.log", at=call)
        assert outcome.code in (-signal.SIGKILL, *ENDED), outcome.text
        try:
            assert_it_goes_on(home, run, change)
        except BaseException as problem:
            problem.add_note(outcome.text[-1000:])
            raise
        return {"part": change, "code": outcome.code}
