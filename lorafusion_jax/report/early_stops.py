"""What early stops spared a run, from its events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lorafusion_jax.report.events import AdapterChanged, PlanRevised, RunStarted
from lorafusion_jax.report.format import duration, exact


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStops:
    """Early stops of a run.

    Attributes:
        reasons: adapter → why it ended early.
        steps: that need not be taken.
        slots: microbatches that need not run.
    """

    reasons: Mapping[str, str]
    steps: int
    slots: int

    def lines(self, slot_seconds: float | None) -> list[str]:
        """Texts for a screen: one for each adapter, and one about all of them."""
        if not self.reasons:
            return []
        time = f", about {duration(self.slots * slot_seconds)}" if slot_seconds else ""
        lines = [f"{name}: ended early, {reason}" for name, reason in self.reasons.items()]
        steps, slots = (
            f"{exact(number)} {unit}{'' if number == 1 else suffix}"
            for number, unit, suffix in ((self.steps, "step", "s"), (self.slots, "microbatch", "es"))
        )
        return [*lines, f"early stops spared {steps} and {slots}{time}"]


def early_stops(events: Iterable[Mapping[str, Any]]) -> EarlyStops:
    """Collects the early stops from the rows of events.jsonl. An adapter that was extended has ended no longer.

    >>> start = {"kind": "started", "adapters": {"a": 9, "b": 9}}
    >>> stop = {"kind": "adapter-changed", "adapter": "b", "action": "stop", "num_steps": 4, "reason": "at step 4 …"}
    >>> again = {"kind": "replanned", "stopped": ["b"], "slots_left": 3, "slots_left_before": 8}
    >>> early_stops([start, stop, again]).lines(2.0)
    ['b: ended early, at step 4 …', 'early stops spared 5 steps and 5 microbatches, about 10 s']
    """
    reasons, planned, ends, microbatches = {}, {}, {}, 0
    for event in events:
        if event["kind"] == RunStarted.kind:
            planned = event["adapters"] | planned
        elif event["kind"] == AdapterChanged.kind and event["action"] == "stop":
            reasons[event["adapter"]], ends[event["adapter"]] = event.get("reason", ""), event["num_steps"]
        elif event["kind"] == AdapterChanged.kind and event["action"] == "add":
            planned[event["adapter"]] = event["num_steps"]
        elif event["kind"] == AdapterChanged.kind and event["action"] == "extend":
            reasons.pop(event["adapter"], None)
        elif event["kind"] == PlanRevised.kind and event.get("stopped"):
            microbatches += event["slots_left_before"] - event["slots_left"]
    steps = sum(planned.get(name, ends[name]) - ends[name] for name in reasons)
    return EarlyStops(reasons=reasons, steps=steps, slots=microbatches)
