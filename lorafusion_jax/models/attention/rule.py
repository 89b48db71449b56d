"""What attention does with a score, besides softmax, and which keys a query sees."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRule:
    """Scores cap(scale · q·k) of the keys t - window < s ≤ t,  cap(z) = soft_cap · tanh(z / soft_cap).

    Args:
        channels: width of a head.
        window: None: all earlier rows of the segment.
        soft_cap: None: no cap.
        sinks: whether the sum of a softmax has one more term, e^sink of the head.
    """

    channels: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether there is neither a window nor a cap, and no sink."""
        return self.window is None and self.soft_cap is None and not self.sinks
