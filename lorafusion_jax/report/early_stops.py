"""What early stops spared a run, from its events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lorafusion_jax.report.events import AdapterChanged, PlanRevised
from lorafusion_jax.report.format import duration, exact


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStops:
    """Early stops of a run.

    Attributes:
        reasons: adapter → why it ended early.
        spared: microbatches that need not run.
    """

    reasons: Mapping[str, str]
    spared: int

    def lines(self, slot_seconds: float | None) -> list[str]:
        """Texts for a screen: one for each adapter, and one about all of them."""
        if not self.reasons:
            return []
        time = f", about {duration(self.spared * slot_seconds)}" if slot_seconds else ""
        lines = [f"{name}: ended early {reason}" for name, reason in self.reasons.items()]
        return [*lines, f"early stops spared {exact(self.spared)} microbatches{time}"]


def early_stops(events: Iterable[Mapping[str, Any]]) -> EarlyStops:
    """Collects the early stops from the rows of events.jsonl. An adapter that was extended has ended no longer.

    >>> stop = {"kind": "adapter-changed", "adapter": "b", "action": "stop", "reason": "at step 4 of 9: …"}
    >>> again = {"kind": "replanned", "stopped": ["b"], "slots_left": 3, "slots_left_before": 8}
    >>> early_stops([stop, again]).lines(2.0)
    ['b: ended early at step 4 of 9: …', 'early stops spared 5 microbatches, about 10 s']
    """
    reasons, microbatches = {}, 0
    for event in events:
        if event["kind"] == AdapterChanged.kind and event["action"] == "stop":
            reasons[event["adapter"]] = event.get("reason", "")
        elif event["kind"] == AdapterChanged.kind and event["action"] == "extend":
            reasons.pop(event["adapter"], None)
        elif event["kind"] == PlanRevised.kind and event.get("stopped"):
            microbatches += event["slots_left_before"] - event["slots_left"]
    return EarlyStops(reasons=reasons, spared=microbatches)
