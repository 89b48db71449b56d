"""The measured timeline of a run, the part of it to compare with a prediction, and what references took."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lorafusion_jax.errors import CheckpointError, quoted
from lorafusion_jax.readable import PLAN, read_text
from lorafusion_jax.report.format import duration, percent
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
            fix=f"lorafusion status {quoted(run)}",
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
    slots = sorted({span.slot for span in timeline.spans})
    if not slots:
        return range(0)
    first: dict[str, int] = {}
    for slot, adapter, _ in plan.batches_ending():
        if slots[0] <= slot <= slots[-1]:
            first[adapter] = min(slot, first.get(adapter, slot))
    start, end = max(first.values(), default=slots[0]) + 1 + timeline.num_stages, slots[-1] + 1
    return range(start, end) if end - start > 2 * timeline.num_stages else range(slots[0], end)


def reference_share(events: Iterable[Mapping[str, Any]], trained_s: float | None) -> tuple[float, str] | None:
    """Returns the share of a run's time that its references took, and a sentence; None if there were none.

    Args:
        trained_s: time of the slots, in which references of adapters that joined were computed.

    >>> reference_share([{"kind": "references", "seconds": 2.0, "beside_s": None}], 6.0)
    (0.25, 'references took 2.0 s, 25.0 % of the time')
    """
    rows = [row for row in events if row["kind"] == "references"]
    if not rows or trained_s is None:
        return None
    seconds = sum(row["seconds"] for row in rows)
    share = seconds / max(trained_s + sum(row["seconds"] for row in rows if row.get("beside_s") is None), 1e-9)
    return share, f"references took {duration(seconds)}, {percent(share)} of the time"
