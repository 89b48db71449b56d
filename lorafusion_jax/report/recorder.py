"""Writes `metrics.jsonl` (numbers) and `events.jsonl` (changes of state) of a run folder.

Rows of metrics.jsonl:
    {"kind": "step", "slot", "adapter", "step", "loss", "grad_norm", "lr", "loss_tokens", "time"}
    {"kind": "eval", "slot", "adapter", "step", "eval_loss", "eval_tokens", "time"}
    {"kind": "slot", "slot", "slots", "useful_tokens_per_s", "processed_tokens_per_s", "slot_seconds", "eta_s",
     "adapter_eta_s", "adapter_tokens_per_s", "paused_share", "paused_s", "eta_leaves_out", "bubble_share", "time"}
The loss is what the adapter's objective minimises: in supervised fine-tuning a mean over the loss tokens of its global
batch. Rows of a step and of an evaluation also have the objective's metrics, those of an evaluation with `eval_` before
the name. `slot` counts the slots of the plan that were done, `time` is seconds since the epoch. Rates and
`bubble_share` are null until measured; `bubble_share` is null with one stage; non-finite numbers are null. Each row
ends in `crc`, the CRC-32 of the row without it.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

from lorafusion_jax.files import naming, replace_bytes
from lorafusion_jax.log_file import encode_row, open_log, parse_row, split_lines
from lorafusion_jax.log_file import read_rows as read_rows
from lorafusion_jax.readable import LOG, read_bytes
from lorafusion_jax.report.events import AdapterChanged, PhaseBegun, RunEvent, StateSaved

METRICS = ("step", "eval", "slot")
# Events that a resumed run repeats.
REPEATED = ("adapter-done", "adapter-failed", "adapter-changed", "exported", "export-failed", "sample")
CHUNK = 1 << 20


class Recorder:
    """A listener that appends to the run folder.

    A resumed run repeats the changes at the slot of its checkpoint. Those that are in the file stay, so that each has
    one row; other listeners hear of them again.

    Args:
        directory: the run folder.
        resume_slot: first drops rows of later slots, because they will be written again.
    """

    def __init__(self, directory: Path, resume_slot: int | None = None):
        self._metrics, self._events = directory / "metrics.jsonl", directory / "events.jsonl"
        for file in (self._metrics, self._events):
            if file.exists():
                open_log(file).close()  # a pipe would make the run wait
        if resume_slot is not None:
            _cut_after(self._metrics, resume_slot)
            _drop_repeated(self._events, resume_slot)
        self._changes = {_change(row) for row in read_rows(self._events) if row["kind"] == AdapterChanged.kind}

    def __call__(self, event: RunEvent) -> None:
        if isinstance(event, PhaseBegun):
            return
        row = {key: _number(value) for key, value in event.row().items()} | {"time": round(time.time(), 3)}
        if isinstance(event, StateSaved) and self._metrics.exists():  # missing rows are detected later
            row["metrics_bytes"] = self._metrics.stat().st_size
        if isinstance(event, AdapterChanged):
            if _change(row) in self._changes:
                return
            self._changes.add(_change(row))
        path = self._metrics if event.kind in METRICS else self._events
        with naming(path), path.open("ab") as file:
            file.write(encode_row(row))


def _change(row: dict) -> tuple[int, str, str]:
    """What makes a change of an adapter the same as one before."""
    return row["slot"], row["adapter"], row.get("request", "")


def _number(value):
    return None if isinstance(value, float) and not math.isfinite(value) else value  # JSON has no NaN


def _cut_after(path: Path, slot: int) -> None:
    """Truncates a log after its last row of a checkpoint's slot or an earlier one.

    The pipeline is drained when a checkpoint is written, so later rows are of later slots. Damaged lines before that
    place stay.
    """
    if not path.exists():
        return
    with naming(path), path.open("r+b") as file:
        end, partial_line = file.seek(0, 2), b""
        while end:
            start = max(end - CHUNK, 0)
            file.seek(start)
            block = file.read(end - start) + partial_line
            lines = split_lines(block)
            partial_line = lines.pop(0) if start else b""  # it may start in the previous chunk
            line_end = start + len(block)
            for line in reversed(lines):
                row = parse_row(line)
                if row is not None and row["slot"] <= slot:
                    file.truncate(line_end)
                    return
                line_end -= len(line)
            end = start
        file.truncate(0)


def _drop_repeated(path: Path, slot: int) -> None:
    """Drops the events that a run repeats after a slot, and a truncated last line; other lines stay unchanged."""
    if not path.exists():
        return
    content = read_bytes(path, LOG)
    rows = [(line, parse_row(line)) for line in split_lines(content)]
    rows_once = [
        line
        for line, row in rows
        if line.endswith(b"\n") and (row is None or row["slot"] <= slot or row["kind"] not in REPEATED)
    ]
    if (text := b"".join(rows_once)) != content:
        replace_bytes(path, text)
