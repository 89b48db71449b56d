"""Writes `metrics.jsonl` (numbers) and `events.jsonl` (changes of state) of a run folder, always.

Rows of metrics.jsonl:
    {"kind": "step", "slot", "adapter", "step", "loss", "grad_norm", "lr", "loss_tokens", "time"}
    {"kind": "eval", "slot", "adapter", "step", "eval_loss", "eval_tokens", "time"}
    {"kind": "slot", "slot", "slots", "useful_tokens_per_s", "processed_tokens_per_s", "slot_seconds", "eta_s",
     "adapter_eta_s", "adapter_tokens_per_s", "bubble_share", "time"}
`slot` counts the slots of the plan that were done, `time` is seconds since the epoch. Losses are means over the loss
tokens of the adapter's global batch. Rates and the idle share of the stages are null before there is something to
measure, the latter always with one stage, and so are numbers that are not finite.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

from lorafusion_jax.report.events import Event

METRICS = ("step", "eval", "slot")
SILENT = ("phase",)
REPEATED = ("adapter-done", "adapter-failed", "exported", "export-failed")  # events that a resumed run tells again


class Recorder:
    """A listener that appends to the run folder.

    Args:
        directory: run folder.
        resume_slot: rows of later slots are dropped first, because they will be written again.
    """

    def __init__(self, directory: Path, resume_slot: int | None = None):
        self._metrics, self._events = directory / "metrics.jsonl", directory / "events.jsonl"
        if resume_slot is not None:
            _keep_until(self._metrics, resume_slot, METRICS)
            _keep_until(self._events, resume_slot, REPEATED)

    def __call__(self, event: Event) -> None:
        if event.kind in SILENT:
            return
        row = {"kind": event.kind, "slot": event.slot}
        row |= {"adapter": event.adapter} if event.adapter else {}
        row |= {"step": event.step} if event.step is not None else {}
        row |= {key: _number(value) for key, value in event.values.items()} | {"time": round(time.time(), 3)}
        path = self._metrics if event.kind in METRICS else self._events
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")


def read_rows(path: Path) -> list[dict]:
    """Reads a .jsonl file of a run folder; a last line cut off by a crash is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def _number(value):
    return None if isinstance(value, float) and not math.isfinite(value) else value  # JSON has no NaN


def _keep_until(path: Path, slot: int, kinds: Sequence[str]) -> None:
    """Drops the rows of some kinds that are later than a slot; a cut-off last line goes, too."""
    if not path.exists():
        return
    rows = [row for row in read_rows(path) if row["slot"] <= slot or row["kind"] not in kinds]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
