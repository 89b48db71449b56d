"""The results of an adapter for its model card: losses by step, from the metrics of its run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from lorafusion_jax.log_file import read_rows
from lorafusion_jax.report.format import loss_text

MOST_ROWS = 12
BARS = "▁▂▃▄▅▆▇█"


def rows_by_adapter(log: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of a log by adapter."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in read_rows(log):
        rows.setdefault(str(row.get("adapter")), []).append(row)
    return rows


def results(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a section of Markdown about the metrics of an adapter; "" without."""
    train, held_out = {}, {}
    for row in rows:
        if row["kind"] in ("step", "eval"):
            losses, key = (train, "loss") if row["kind"] == "step" else (held_out, "eval_loss")
            if row.get(key) is not None:
                losses[row["step"]] = row[key]
    if not train:
        return ""
    lines = ["", "## Results", "", "| step | training loss | held-out loss |", "|---|---|---|"]
    steps = _spread(sorted(held_out)) if len(held_out) > 1 else _spread(sorted({*train, *held_out}))
    lines += [f"| {step} | {loss_text(train.get(step))} | {loss_text(held_out.get(step))} |" for step in steps]
    lines += ["", f"Training loss of steps {min(train)} to {max(train)}: `{curve([train[s] for s in sorted(train)])}`"]
    return "\n".join(lines) + "\n"


def curve(values: list[float], width: int = 40) -> str:
    """A line of bars, each the mean of its part.

    >>> curve([4.0, 3.0, 2.0, 1.0])
    '█▆▃▁'
    """
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in means)


def _spread(steps: list[int]) -> list[int]:
    """At most `MOST_ROWS` of them, first and last included."""
    if len(steps) <= MOST_ROWS:
        return steps
    return [steps[round(index * (len(steps) - 1) / (MOST_ROWS - 1))] for index in range(MOST_ROWS)]
