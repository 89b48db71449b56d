"""What hostile input may cost: time of the processor and memory, which no load of the machine changes."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

LONGEST_S = 5.0  # of the processor, with that of children
LARGEST_MB = 1 << 10  # more than before
CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


@dataclass(slots=True)
class Cost:
    """Of what ran within `limited`."""

    cpu_s: float = 0.0
    grown_mb: float = 0.0


MEASURED: list[Cost] = []  # of everything in this process


@contextmanager
def limited() -> Iterator[Cost]:
    """Measures what is within.

    Raises:
        AssertionError: it took more than it may.
    """
    cost, before, began = Cost(), _most_mb(from_here=True), _cpu_s()
    yield cost
    cost.cpu_s, cost.grown_mb = _cpu_s() - began, _most_mb() - before
    MEASURED.append(cost)
    assert cost.cpu_s < LONGEST_S, f"{cost.cpu_s:.1f} s of the processor"
    assert cost.grown_mb < LARGEST_MB, f"{cost.grown_mb:.0f} MB"


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _most_mb(*, from_here: bool = False) -> float:
    """Most memory that this process has had: in all, or since it was asked `from_here`, where Linux counts that."""
    if from_here:
        with suppress(OSError):
            CLEAR.write_text("5")
    with suppress(OSError, StopIteration):
        return next(int(line.split()[1]) / 1024 for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
