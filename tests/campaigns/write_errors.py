"""Calls of commands that change a folder fail: the disk is full, broken, read only or not ours, once or from then on.

Every call of a run that begins, of the command that asks for an adapter to join, of resumes that change a run, and of
exports. A command says what is wrong; nothing half written is ever current; and what is there can go on to the end
where it would be undisturbed, or the command can be repeated.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from pathlib import Path

from campaigns.cases import Case, Row, in_any_order
from campaigns.changing_runs import ADD_TAX, CHANGES, assert_nothing_lost
from campaigns.disk_calls import watched
from campaigns.kills_of_changes import (
    BEGIN,
    ENDED,
    arguments_of,
    assert_it_goes_on,
    calls_of_changes,
    calls_of_kinds,
    copy_of,
    in_a_process,
    prepare_changes,
)
from campaigns.quick_runs import Said, command, quick_runs

from lorafusion_jax.checkpoint.requests import request_files

ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT, errno.EACCES)
ASK = "ask to add"


class WriteErrors:
    """
    Attributes:
        parts: what of `BEGIN`, `ASK` and `CHANGES` is tried.
    """

    name = "write_errors"

    def __init__(self, parts: Iterable[str] = (BEGIN, ASK, *CHANGES)):
        self._parts = list(parts)

    @quick_runs()
    def prepare(self, home: Path) -> None:
        prepare_changes(home)
        calls = calls_of_changes(home)
        run = copy_of(home, "move", home / "counted")
        with watched(run) as seen:
            assert command("add", run, home / "more.yaml").code == 0
        (home / "calls.json").write_text(json.dumps(calls | {ASK: seen.calls}), encoding="utf-8")

    def cases(self, home: Path) -> Iterable[Case]:
        """First every call with one of the errors, then with another, until it had all."""
        calls = calls_of_changes(home)
        for shift in range(len(ERRORS)):
            cases = [
                self._case(home, part, call, ERRORS[(call + shift) % len(ERRORS)], lasting)
                for part, lasting in product(self._parts, (False, True))
                for call in calls_of_kinds(calls[part], "nws")
            ]
            yield from in_any_order(cases, f"{self.name} {shift}")

    def _case(self, home: Path, part: str, call: int, error: int, lasting: bool) -> Case:
        name = f"{part} @ {call} {errno.errorcode[error]} {'lasting' if lasting else 'once'}"
        fail = self._fail_request if part == ASK else partial(self._fail_change, change=part)
        return Case(name=name, run=partial(fail, home, call, error, lasting))

    @staticmethod
    @quick_runs()
    def _fail_change(home: Path, call: int, error: int, lasting: bool, work: Path, change: str) -> Row:
        run = copy_of(home, change, work / "run")
        arguments, log = arguments_of(home, change, run), work / "failed.log"
        outcome = in_a_process(*arguments, folder=run, log=log, at=call, error=error, lasting=lasting)
        return checked(change, outcome, lambda: assert_it_goes_on(home, run, change))

    @staticmethod
    @quick_runs()
    def _fail_request(home: Path, call: int, error: int, lasting: bool, work: Path) -> Row:
        run, log = copy_of(home, "move", work / "run"), work / "failed.log"
        arguments = [ADD_TAX[0], run, home / ADD_TAX[1]]
        outcome = in_a_process(*arguments, folder=run, log=log, at=call, error=error, lasting=lasting)

        def check() -> None:
            if not request_files(run):
                assert outcome.code != 0
                assert command(*arguments).code == 0
            assert_nothing_lost(run, "add")

        return checked(ASK, outcome, check)


def checked(part: str, outcome: Said, check: Callable[[], None]) -> Row:
    """The row of a command that met an error: it said so, or could do without; and what it left is good."""
    try:
        assert outcome.code in (0, 1, 2, 3), f"it ended with {outcome.code}"
        assert outcome.code in ENDED or outcome.error, "it says nothing"
        assert "Traceback" not in outcome.text
        check()
    except BaseException as problem:
        problem.add_note(outcome.text[-2500:])
        raise
    return {"part": part, "code": outcome.code, "error": outcome.error}
