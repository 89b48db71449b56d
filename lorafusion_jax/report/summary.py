"""Summary of a run, from its metrics."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from lorafusion_jax.log_file import LONGEST_LINE, open_log, parse_row, read_rows
from lorafusion_jax.report.format import loss_text

SLOT_ROWS = 1000  # newest rows for the rates: about half an hour
SPARE = 3  # newest steps of an adapter, in case the last row is damaged
STEP, SLOT, ADAPTER = b'{"kind": "step"', b'{"kind": "slot"', b'"adapter": "'


@dataclass(slots=True, kw_only=True)
class MetricsSummary:
    """Summary of metrics.jsonl.

    Attributes:
        adapters: per adapter its last training loss and reward, held-out loss before training and at the end, last
            step, and under "evaluated" all that its newest evaluation says.
        slots: the newest rows of kind "slot", oldest first.
        slot: number of slots of the plan that are done.
        time: time of the newest row.
    """

    adapters: dict[str, dict] = field(default_factory=dict)
    slots: list[dict] = field(default_factory=list)
    slot: int = 0
    time: float | None = None


def read_summary(folder: Path) -> MetricsSummary:
    """Reads metrics.jsonl in one pass and parses only a few lines.

    Only the last step of an adapter matters, so rows of steps are recognised by their first bytes.
    """
    summary, slots = MetricsSummary(), deque(maxlen=SLOT_ROWS)
    steps: dict[bytes, deque[bytes]] = defaultdict(lambda: deque(maxlen=SPARE))
    path = folder / "metrics.jsonl"
    if not path.exists():
        return summary
    with open_log(path) as file:
        while line := file.readline(LONGEST_LINE):
            if line.startswith(STEP):
                start = line.find(ADAPTER) + len(ADAPTER)
                steps[line[start : line.find(b'"', start)]].append(line)
            elif line.startswith(SLOT):
                slots.append(line)
            elif (row := parse_row(line)) is not None:
                _take(summary, row)
    for line in (*chain.from_iterable(steps.values()), *slots):
        if (row := parse_row(line)) is not None:
            _take(summary, row)
    return summary


def _take(summary: MetricsSummary, row: dict) -> None:
    summary.slot = max(summary.slot, row["slot"])
    summary.time = max(summary.time or 0.0, row.get("time", 0.0))
    if row["kind"] == "slot":
        summary.slots.append(row)
        return
    numbers = summary.adapters.setdefault(row["adapter"], {}) if "adapter" in row else {}
    if row["kind"] == "step":
        numbers |= {key: row.get(key) for key in ("loss", "step", "lr", "grad_norm", "reward")}
    elif row["kind"] == "eval":
        when = "before" if row["step"] == 0 else "after"
        numbers |= {when: row.get("eval_loss"), f"accuracy {when}": row.get("eval_rewards/accuracies")}
        if row["step"]:
            numbers["evaluated"] = {key: value for key, value in row.items() if key.startswith("eval_")}


def final_rows(folder: Path) -> dict[str, dict]:
    """Per adapter: last training loss, held-out loss before training and at the end, last step.

    "accuracy before" and "accuracy after" are shares of held-out pairs whose chosen answer gained more; None for
    adapters without pairs.
    """
    return read_summary(folder).adapters


def got_worse(name: str, before: float | None, after: float | None) -> str | None:
    """Warns if an adapter's held-out loss is higher than before training.

    >>> got_worse("law", 4.6575, 8.0301)
    'law: held-out loss rose from 4.6575 to 8.0301 in training; a smaller optim.lr or fewer steps may help'
    >>> got_worse("law", 4.6575, 3.1)
    """
    if before is None or after is None or not after > before:
        return None
    risen = f"held-out loss rose from {loss_text(before)} to {loss_text(after)} in training"
    return f"{name}: {risen}; a smaller optim.lr or fewer steps may help"


KEYS = ("useful_tokens_per_s", "processed_tokens_per_s", "slot_seconds")


def throughput(folder: Path) -> dict[str, Any] | None:
    """The `rates` of a run folder, as medians."""
    return rates(read_summary(folder), read_rows(folder / "events.jsonl"), newest=False)


def rates(metrics: MetricsSummary, events: Sequence[dict], *, newest: bool) -> dict[str, Any] | None:
    """Useful and processed tokens/s, seconds per slot, and what training waited for, since the run is on this mesh.

    Args:
        newest: the newest rates, as the live view shows them, instead of medians.

    Returns:
        None where nothing was measured.
    """
    rows = _measured_rows(metrics, events)
    if not rows:
        return None
    speed = {key: rows[-1][key] if newest else statistics.median(row[key] for row in rows) for key in KEYS}
    return speed | {key: rows[-1].get(key) for key in ("paused_share", "paused_s", "eta_leaves_out")}


def _measured_rows(metrics: MetricsSummary, events: Sequence[dict]) -> list[dict]:
    """Rows of slots with rates since the run is on this mesh."""
    began, mesh = 0.0, None
    for event in events:
        if event["kind"] == "started" and event.get("mesh") != mesh:
            began, mesh = event.get("time", 0.0), event.get("mesh")
    return [
        row
        for row in metrics.slots
        if row.get("time", 0.0) >= began and all(isinstance(row.get(key), int | float) for key in KEYS)
    ]
