"""The measured timeline of a run, and the part of it to compare with a prediction."""

from __future__ import annotations

from pathlib import Path

from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.readable import PLAN, read_text
from scheduling import Plan, PlanError, Timeline

FILE = "timeline.json"  # in a run folder; of its last session


def read_timeline(run: Path) -> Timeline:
    """Reads the measured timeline of a run's last session.

    Raises:
        CheckpointError: `run.no-timeline`, there is no timeline.
        PlanError: `plan.timeline-format`, the file is damaged.
    """
    file = run / FILE
    if not file.is_file():
        raise CheckpointError(
            "run.no-timeline",
            f"there is no {FILE} in {run}.",
            why="a run writes it when it ends",
            fix=f"lorafusion status {run}",
        )
    try:
        text = read_text(file, PLAN)
    except (OSError, UnicodeDecodeError) as problem:
        raise PlanError("plan.timeline-format", f"{file} cannot be read as text", why=str(problem)) from None
    return Timeline.from_json(text)


def settled_slots(plan: Plan, timeline: Timeline) -> range:
    """Slots of a session after every adapter's first optimizer step; all slots if too few remain.

    In the first slots pipeline, caches and queues fill and the GPU warms up, which predictions do not model. S more
    slots are excluded, because they were in the pipeline at that time.
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
