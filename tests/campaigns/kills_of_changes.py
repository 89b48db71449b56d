"""A run that changes is killed before every call of the change that touches its folder.

A run begins, or it stands still and adapters are to join it, to be extended or dropped, or it is to move to another
mesh: the changes of `changing_runs`. What SIGKILL would leave before a call, also of libraries without Python, is the
folder as it is then. So the folder is copied before every call of one undisturbed command, while all other calls wait,
and each copy is resumed to its end: every adapter must be where it would be undisturbed. Copies that equal the one
before are not resumed again: the call between them made something durable, or opened a file. Runs are of
`quick_session`, without devices: all else is as it is.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from campaigns import tiny_run
from campaigns.batches import Item, tried
from campaigns.cases import Case, Row, in_any_order
from campaigns.changing_runs import CHANGES, ask, assert_nothing_lost, stop_after_a_step, write_jobs
from campaigns.disk_calls import ALL, copied, watched
from campaigns.forked import Child
from campaigns.quick_runs import Said, command, quick_runs

BEGIN = "begin"
ENDED = (0, 3)
CALLS = 60


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
        """Each of `CALLS` calls of a command; the last of a command has all that are left.

        A command makes some calls more at one time than at another, so the last case begins well before the end.
        """
        cases = []
        for change, calls in calls_of_changes(home).items():
            starts = range(1, max(len(calls) - CALLS, 1) + 1, CALLS)
            ends = [start - 1 for start in starts[1:]] + [ALL]
            for first, last in zip(starts, ends, strict=True):
                kill = partial(self._kill, home, change, first, last)
                cases.append(Case(name=f"{change} from {first}", run=kill))
        return in_any_order(cases, self.name)

    @staticmethod
    @quick_runs()
    def _kill(home: Path, change: str, first: int, last: int, work: Path) -> list[Row]:
        run = copy_of(home, change, work / "run")
        (copies := work / "copies").mkdir()
        with copied(run, copies, first, last) as seen:
            outcome = command(*arguments_of(home, change, run))
        assert outcome.code in ENDED, outcome.text
        return resumed(
            copies,
            range(first, min(last, len(seen.calls)) + 1),
            change,
            lambda left: assert_it_goes_on(home, left, change),
        )


def resumed(copies: Path, calls: Iterable[int], part: str, check: Callable[[Path], object]) -> list[Row]:
    """A row for every call before which the folder was copied: `check` gets the copies that differ from one before."""
    rows: list[Row] = []
    content, result = None, {}
    for call in calls:
        left = copies / str(call)
        if content != (content := contents(left)) or not rows:
            (result,) = tried([Item(name="", run=lambda _, left=left: {"kind": str(check(left) or "")})], copies.parent)
            result |= {"resumed": 1}
        else:
            result = result | {"resumed": 0, "cpu_s": 0.0}
        rows.append(result | {"part": part, "call": call, "item": f"{part} @ {call}"})
        shutil.rmtree(left, ignore_errors=True)
    return rows


def contents(folder: Path) -> dict[str, bytes | str | None]:
    """All that is in a folder: of files their bytes, of links where they lead."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else (path.read_bytes() if path.is_file() else None)
        for path in folder.rglob("*")
    }
