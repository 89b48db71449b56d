"""Many small cases in one process, one after another: starting a process takes longer than most of them."""

from __future__ import annotations

import os
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from campaigns.cases import HELD, LOST, Case, Row

LONGEST_S = 120  # of an item by the clock; who waits without end is lost
WORDS = 3000  # of a trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """What is tried once, in a process where others were tried before.

    Attributes:
        name: in its row.
        run: gets an empty folder and returns a row; whatever it raises is a loss.
    """

    name: str
    run: Callable[[Path], Row]


def in_batches(items: Sequence[Item], name: str, size: int) -> list[Case]:
    """A case for every `size` items."""
    parts = [items[start : start + size] for start in range(0, len(items), size)]
    return [Case(name=f"{name} {number} of {size}", run=partial(tried, part)) for number, part in enumerate(parts)]


def tried(items: Sequence[Item], work: Path) -> list[Row]:
    """The rows of items; a loss ends none but its item."""
    return [_row(item, work / "item") for item in items]


def _row(item: Item, folder: Path) -> Row:
    folder.mkdir()
    before = _seconds()
    try:
        with limited_to(LONGEST_S):
            row = {"result": HELD} | item.run(folder)
    except BaseException:  # also what stands for a kill
        row = {"result": LOST, "text": traceback.format_exc()[-WORDS:]}
    shutil.rmtree(folder, ignore_errors=True)
    return row | {"item": item.name, "cpu_s": round(_seconds() - before, 2)}


def _seconds() -> float:
    return sum(os.times()[:4])


@contextmanager
def limited_to(seconds: float) -> Iterator[None]:
    """
    Raises:
        TimeoutError: what is within takes longer by the clock.
    """

    def end(*_: object) -> None:
        raise TimeoutError(f"it did not end within {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
