"""Calls of commands that change a folder fail: the disk is full, broken, read only or not ours, once or from then on.

Every call of a run that begins, of the command that asks for an adapter to join, of resumes that change a run, and of
exports. A command says what is wrong; nothing half written is ever current; and what is there can go on to the end
where it would be undisturbed, or the command can be repeated.
"""

from __future__ import annotations

import errno
import json
import random
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from pathlib import Path

from campaigns.batches import Item, in_batches
from campaigns.cases import Case, Row
from campaigns.changing_runs import ADD_TAX, CHANGES, assert_nothing_lost
from campaigns.disk_calls import watched
from campaigns.kills_of_changes import (
    BEGIN,
    ENDED,
    arguments_of,
    assert_it_goes_on,
    calls_of_changes,
    copy_of,
    prepare_changes,
)
from campaigns.quick_runs import Said, command, quick_runs

from lorafusion_jax.checkpoint.requests import request_files

ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT, errno.EACCES)
ASK = "ask to add"
FIRST = (BEGIN, ASK, "add")
ITEMS = 25  # of a process


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
        """Of a run that begins and of an addition first; every call with one error, then with another, until all."""
        for parts in (FIRST, [part for part in self._parts if part not in FIRST]):
            for shift in range(len(ERRORS)):
                items = self._items(home, [part for part in parts if part in self._parts], shift)
                random.Random(f"{self.name} {shift}").shuffle(items)
                yield from in_batches(items, f"{'first' if parts is FIRST else 'others'} {shift}:", ITEMS)

    def _items(self, home: Path, parts: Iterable[str], shift: int) -> list[Item]:
        calls = calls_of_changes(home)
        return [
            self._item(home, part, call, ERRORS[(call + shift) % len(ERRORS)], lasting)
            for part, lasting in product(parts, (False, True))
            for call in range(1, len(calls[part]) + 1)
        ]

    def _item(self, home: Path, part: str, call: int, error: int, lasting: bool) -> Item:
        name = f"{part} @ {call} {errno.errorcode[error]} {'lasting' if lasting else 'once'}"
        fail = self._fail_request if part == ASK else partial(self._fail_change, change=part)
        return Item(name=name, run=partial(fail, home, call, error, lasting))

    @staticmethod
    @quick_runs()
    def _fail_change(home: Path, call: int, error: int, lasting: bool, work: Path, change: str) -> Row:
        run = copy_of(home, change, work / "run")
        with watched(run, at=call, error=error, lasting=lasting) as seen:
            outcome = command(*arguments_of(home, change, run))
        row = checked(change, outcome, lambda: assert_it_goes_on(home, run, change))
        return row | {"failed": int(len(seen.calls) >= call)}

    @staticmethod
    @quick_runs()
    def _fail_request(home: Path, call: int, error: int, lasting: bool, work: Path) -> Row:
        run = copy_of(home, "move", work / "run")
        arguments = [ADD_TAX[0], run, home / ADD_TAX[1]]
        with watched(run, at=call, error=error, lasting=lasting) as seen:
            outcome = command(*arguments)

        def check() -> None:
            if not request_files(run):
                assert outcome.code != 0
                assert command(*arguments).code == 0
            assert_nothing_lost(run, "add")

        return checked(ASK, outcome, check) | {"failed": int(len(seen.calls) >= call)}


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
