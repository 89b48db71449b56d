"""Budget of a search."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Budget:
    """Remaining work, counted in evaluations of partial plans.

    No clock is read, so a plan depends only on its inputs and is the same on a busy machine.
    """

    evaluations: float

    @property
    def spent(self) -> bool:
        return self.evaluations <= 0
