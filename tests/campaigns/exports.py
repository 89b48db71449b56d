"""`lorafusion export` is killed before every call that touches its folder, and each of these calls fails.

What it leaves is the whole export or nothing, and repeated it is whole. The run is a real one, of a tiny model.
"""

from __future__ import annotations

import errno
import json
import shutil
import signal
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from campaigns import tiny_run
from campaigns.cases import Case, Row, in_any_order
from campaigns.disk_calls import watched
from campaigns.kills_of_changes import in_a_process
from campaigns.quick_runs import command
from campaigns.write_errors import ERRORS, checked

NAMES = ("ask", "cards")
KINDS: dict[str, list[str]] = {"export": [], "export --merge": ["--merge"]}
KILL = 0


class Exports:
    name = "exports"

    def prepare(self, home: Path) -> None:
        base = tiny_run.write_base(home / "base")
        entries = [{"name": name, "data": {"train": tiny_run.write_rows(home, name)}} for name in NAMES]
        lora = {"rank": 4, "targets": ["down_proj"]}
        job = tiny_run.write_job(home, base, entries, lora=lora, save={"every_steps": 3, "keep": 1})
        assert command("train", job, "--out", home / "run").code == 0
        calls = {}
        for kind in KINDS:
            parent = home / "expected" / kind
            parent.mkdir(parents=True)
            with watched(parent) as seen:
                outcome = command(*_arguments(home, kind, parent / "out"))
            assert outcome.code == 0, outcome.text
            calls[kind] = seen.calls
        (home / "calls.json").write_text(json.dumps(calls), encoding="utf-8")

    def cases(self, home: Path) -> Iterable[Case]:
        calls = json.loads((home / "calls.json").read_text(encoding="utf-8"))
        points = [(kind, call) for kind in KINDS for call in range(1, len(calls[kind]) + 1)]
        kills = [_case(home, kind, call, KILL, lasting=False) for kind, call in points]
        errors = [
            _case(home, kind, call, error, lasting)
            for kind, call in points
            for error in ERRORS
            for lasting in (False, True)
        ]
        return in_any_order(kills, self.name) + in_any_order(errors, self.name)


def _case(home: Path, kind: str, call: int, error: int, lasting: bool) -> Case:
    how = f"{errno.errorcode[error]} {'lasting' if lasting else 'once'}" if error else "SIGKILL"
    return Case(name=f"{kind} @ {call} {how}", run=partial(_disturb, home, kind, call, error, lasting))


def _arguments(home: Path, kind: str, to: Path) -> list[object]:
    return ["export", home / "run", NAMES[0], "--to", to, *KINDS[kind]]


def _disturb(home: Path, kind: str, call: int, error: int, lasting: bool, work: Path) -> Row:
    (parent := work / "exports").mkdir()
    arguments, expected = _arguments(home, kind, parent / "out"), contents(home / "expected" / kind / "out")
    outcome = in_a_process(*arguments, folder=parent, log=work / "export.log", at=call, error=error, lasting=lasting)

    def check() -> None:
        left = contents(parent / "out")
        assert left in ({}, expected), "half an export is there"
        if not left:
            shutil.rmtree(parent / "out", ignore_errors=True)
            assert (again := command(*arguments)).code == 0, again.text
        assert contents(parent / "out") == expected
        assert [path.name for path in parent.iterdir()] == ["out"], "something is left over"

    if error:
        return checked(kind, outcome, check)
    assert outcome.code in (0, -signal.SIGKILL), outcome.text
    check()
    return {"part": kind, "code": outcome.code, "failed": int(outcome.code != 0)}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
