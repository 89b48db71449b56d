"""What a search may spend."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(slots=True)
class Budget:
    """Work left, in evaluations of partial plans; the deadline only stops a search that a busy machine delays."""

    evaluations: float
    deadline: float

    @property
    def late(self) -> bool:
        return time.monotonic() >= self.deadline

    @property
    def spent(self) -> bool:
        return self.evaluations <= 0 or self.late
