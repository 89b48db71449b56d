"""Budget of a search."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(slots=True)
class Budget:
    """Remaining work, in evaluations of partial plans. The deadline only stops a search on a busy machine."""

    evaluations: float
    deadline: float

    @property
    def late(self) -> bool:
        return time.monotonic() >= self.deadline

    @property
    def spent(self) -> bool:
        return self.evaluations <= 0 or self.late
