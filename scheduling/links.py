"""Links between the stages of a pipeline, and what a message over one costs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from scheduling.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    """Seconds from the end of a pass until its activations, or their gradients, are on the other stage.

    A link sends one message at a time in each direction. The next one starts when the last has left, after
    `token_s · tokens`; the latency `fixed_s` of one passes while the next is sent.

    >>> LinkCost(fixed_s=1.0, token_s=0.5).seconds(4)
    (3.0, 2.0)
    """

    fixed_s: float = 0.0
    token_s: float = 0.0

    def __post_init__(self):
        for name, value in asdict(self).items():
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value >= 0):
                raise PlanError("plan.cost", f"{name} of a link must be a number of seconds, not {value!r}")

    def seconds(self, tokens: float) -> tuple[float, float]:
        """Seconds until a message arrives, and those in which it occupies the link."""
        occupied_s = self.token_s * tokens
        return self.fixed_s + occupied_s, occupied_s
