"""Runs cases of campaigns, each in a forked process with a folder of its own, on as many cores as there may be.

A case ends with rows, or with an error, which is a loss. Its processor time and its largest memory are those of the
process and its children, so they do not depend on what else the machine does. Rows are appended to a file as they
come: whoever starts again with the same file makes no case twice.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

Row = dict[str, Any]
HELD, LOST = "held", "LOST"
PROCESSOR_S = 300  # of a case; more is a loss
PATIENCE_S = 600  # by the clock; whoever waits without end uses no processor
END_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is tried once.

    Attributes:
        name: unique in its campaign, and the same in every sitting.
        run: gets an empty folder and returns a row or several; whatever it raises is a loss.
    """

    name: str
    run: Callable[[Path], Row | list[Row]]


class Campaign(Protocol):
    """Cases of one kind.

    Attributes:
        name: of its rows.
    """

    name: str

    def prepare(self, home: Path) -> None:
        """Writes what its cases share, in a process of its own."""

    def cases(self, home: Path) -> Iterable[Case]:
        """In the order in which they are best made."""


@dataclass(slots=True)
class Rows:
    """A file of rows, one in a line."""

    file: Path
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.file.exists():
            lines = self.file.read_text(encoding="utf-8").splitlines()
            self.rows = [json.loads(line) for line in lines if line.endswith("}")]  # the last may be cut

    def add(self, row: Row) -> None:
        self.rows.append(row)
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")

    @property
    def done(self) -> set[tuple[str, str]]:
        return {(row["campaign"], row["case"]) for row in self.rows}

    @property
    def lost(self) -> list[Row]:
        return [row for row in self.rows if row["result"] == LOST]


@dataclass(slots=True)
class Started:
    """A case that is under way."""

    campaign: str
    case: str
    folder: Path
    began: float


class Pool:
    """Runs cases in turn of their campaigns: whichever has used the least of the processor is next."""

    def __init__(self, rows: Rows, work: Path, cores: int):
        self._rows, self._work, self._cores = rows, work, cores
        self._under_way: dict[int, Started] = {}
        self._used: Counter[str] = Counter()
        self._number = 0
        gc.collect()
        gc.freeze()  # forked processes need not look through what is there, which would copy it
        gc.set_threshold(50_000, 20, 20)

    def prepare(self, campaigns: Sequence[Campaign], homes: Mapping[str, Path]) -> None:
        """Prepares all campaigns side by side.

        Raises:
            RuntimeError: one of them could not.
        """
        for campaign in campaigns:
            while len(self._under_way) >= self._cores:
                self._must_have_ended()
            home = homes[campaign.name]
            home.mkdir(parents=True)
            self._start(campaign.name, Case(name="preparation", run=lambda _, c=campaign, h=home: c.prepare(h) or []))
        while self._under_way:
            self._must_have_ended()

    def run(self, campaigns: Mapping[str, Iterable[Case]], until: float) -> None:
        """Begins cases until the clock says `until`; those under way end."""
        done = self._rows.done
        left = {
            name: iter([case for case in cases if (name, case.name) not in done]) for name, cases in campaigns.items()
        }
        while left and time.monotonic() < until:
            if len(self._under_way) >= self._cores:
                self._take_rows(*self._wait())
                continue
            under_way = Counter(started.campaign for started in self._under_way.values())
            name = min(left, key=lambda name: (self._used[name] + under_way[name], name))
            case = next(left[name], None)
            if case is None:
                del left[name]
            else:
                self._start(name, case)
        while self._under_way:
            self._take_rows(*self._wait())

    def _start(self, campaign: str, case: Case) -> None:
        self._number += 1
        folder = self._work / "cases" / str(self._number)
        folder.mkdir(parents=True)
        pid = os.fork()
        if pid == 0:
            _run_here(case, folder)
        self._under_way[pid] = Started(campaign, case.name, folder, time.monotonic())

    def _wait(self) -> tuple[Started, int, resource.struct_rusage]:
        """Waits for a case, and ends one that does not end."""
        while True:
            for pid, started in self._under_way.items():
                ended, status, used = os.wait4(pid, os.WNOHANG)
                if ended:
                    del self._under_way[pid]
                    return started, os.waitstatus_to_exitcode(status), used
                if time.monotonic() > started.began + PATIENCE_S:
                    os.killpg(pid, signal.SIGKILL)
            time.sleep(0.005)

    def _take_rows(self, started: Started, code: int, used: resource.struct_rusage) -> None:
        file = started.folder / "rows.json"
        rows = json.loads(file.read_text(encoding="utf-8")) if code == 0 else [{"text": _last_words(started, code)}]
        seconds = used.ru_utime + used.ru_stime
        measured = {"cpu_s": round(seconds, 2), "peak_mb": used.ru_maxrss >> 10}
        self._used[started.campaign] += seconds
        for row in rows:
            result = {"result": HELD if code == 0 else LOST}
            whole = {"campaign": started.campaign, "case": started.case} | result | measured | row
            self._rows.add(whole)
            if whole["result"] == LOST:
                print(json.dumps(whole)[:4000], flush=True)
        shutil.rmtree(started.folder, ignore_errors=True)

    def _must_have_ended(self) -> None:
        started, code, _ = self._wait()
        if code != 0:
            raise RuntimeError(f"{started.campaign}: {started.case}: {_last_words(started, code)}")
        shutil.rmtree(started.folder, ignore_errors=True)


def in_any_order(cases: list[Case], seed: str) -> list[Case]:
    """Shuffled, always alike: if the time ends early, what was tried is a sample of all."""
    random.Random(seed).shuffle(cases)
    return cases


def shards(cases: Iterable[Case], number: int, count: int) -> Iterator[Case]:
    """Every `count`-th case, from the `number`-th on; the first is 1."""
    yield from list(cases)[number - 1 :: count]


def _run_here(case: Case, folder: Path) -> None:
    """In the forked process, which ends with it."""
    code = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(END_SIGNAL, signal.SIGKILL)  # the pool was killed
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_S, PROCESSOR_S))
        (folder / "work").mkdir()
        rows = case.run(folder / "work")
        (folder / "rows.json").write_text(json.dumps(rows if isinstance(rows, list) else [rows]), encoding="utf-8")
        code = 0
    except BaseException:  # also of a simulated kill
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _last_words(started: Started, code: int) -> str:
    log = started.folder / "log"
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return f"exit {code}\n{text[-3000:]}"
