"""What the devices of a run did: its measured timeline, and the part of it that a prediction is about."""

from __future__ import annotations

from pathlib import Path

from lorafusion_jax.errors import CheckpointError
from scheduling import Plan, Timeline

FILE = "timeline.json"  # in a run folder, of its last sitting


def read_timeline(run: Path) -> Timeline:
    """The measured timeline of a run's last sitting.

    Raises:
        CheckpointError: `run.no-timeline`, there is none.
        PlanError: `plan.timeline-format`, the file is damaged.
    """
    file = run / FILE
    if not file.is_file():
        raise CheckpointError(
            "run.no-timeline",
            f"there is no {FILE} in {run}.",
            why="a sitting writes it when it ends",
            fix=f"lorafusion status {run}",
        )
    return Timeline.from_json(file.read_text(encoding="utf-8"))


def settled_slots(plan: Plan, timeline: Timeline) -> range:
    """Slots of a sitting after every adapter's first optimizer step in it; all of them if too few are left.

    The first ones fill the pipeline, caches and queues and bring a GPU to its temperature, and a prediction knows
    nothing of that. S more slots are left out, which were in the pipeline meanwhile.
    """
    seen = sorted({span.slot for span in timeline.spans})
    if not seen:
        return range(0)
    first: dict[str, int] = {}
    for slot, adapter, _ in plan.batches_ending():
        if seen[0] <= slot <= seen[-1]:
            first[adapter] = min(slot, first.get(adapter, slot))
    start, end = max(first.values(), default=seen[0]) + 1 + timeline.num_stages, seen[-1] + 1
    return range(start, end) if end - start > 2 * timeline.num_stages else range(seen[0], end)
