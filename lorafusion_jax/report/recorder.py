"""Writes `metrics.jsonl` (numbers) and `events.jsonl` (changes of state) of a run folder, always.

Rows of metrics.jsonl:
    {"kind": "step", "slot", "adapter", "step", "loss", "grad_norm", "lr", "loss_tokens", "time"}
    {"kind": "eval", "slot", "adapter", "step", "eval_loss", "eval_tokens", "time"}
    {"kind": "slot", "slot", "useful_tokens_per_s", "processed_tokens_per_s", "seconds", "eta_s", "time"}
`time` is seconds since the epoch. Losses are means over the loss tokens of the adapter's global batch.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from lorafusion_jax.report.events import Event

METRICS = ("step", "eval", "slot")
SILENT = ("phase",)


class Recorder:
    """A listener that appends to the run folder.

    Args:
        directory: run folder.
        resume_slot: rows of later slots are dropped first, because they will be written again.
    """

    def __init__(self, directory: Path, resume_slot: int | None = None):
        self._metrics, self._events = directory / "metrics.jsonl", directory / "events.jsonl"
        if resume_slot is not None:
            _keep_until(self._metrics, resume_slot)

    def __call__(self, event: Event) -> None:
        if event.kind in SILENT:
            return
        row = {"kind": event.kind, "slot": event.slot}
        row |= {"adapter": event.adapter} if event.adapter else {}
        row |= {"step": event.step} if event.step is not None else {}
        row |= event.values | {"time": round(time.time(), 3)}
        path = self._metrics if event.kind in METRICS else self._events
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


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


def _keep_until(path: Path, slot: int) -> None:
    rows = [row for row in read_rows(path) if row["slot"] <= slot]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
