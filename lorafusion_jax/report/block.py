"""Lines of the live view: progress of the run and its adapters, fitted to the width of the terminal."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from rich.text import Text

from lorafusion_jax.report.events import SlotDone
from lorafusion_jax.report.format import count, duration, exact, last_result, loss_text, omissions, percent, rate, waits

COLUMNS = ("steps", "share", "loss", "metrics", "gnorm", "lr", "held-out", "speed", "eta")
DROPPED_FIRST = ("gnorm", "lr", "share", "metrics", "held-out", "speed")  # where the terminal is too narrow for all
GAP = 2
MOST_FAILURES = 5  # of many adapters
MOST_IN_LINE = 6  # adapters of a line in a log


@dataclass(slots=True)
class Row:
    """State of one adapter in the live view.

    Attributes:
        metrics: further metrics of its objective.
        stopped: "paused" or "cancelled"; empty otherwise.
        failure: reason and step of its failure; empty if it has not failed.
    """

    num_steps: int
    step: int = 0
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    grad_norm: float | None = None
    lr: float | None = None
    eval_loss: float | None = None
    done: bool = False
    stopped: str = ""
    failure: str = ""


def head_line(
    name: str, slot: int, slots: int, speed: SlotDone | None, width: int, predicted_bubbles: float | None = None
) -> Text:
    """One line about the whole run. Details that do not fit are omitted."""
    parts = [f"{name}  {exact(slot)}/{exact(slots)} mb  {100 * slot / max(slots, 1):.0f} %"]
    if speed is not None and speed.eta_s is not None and slot < slots:
        tokens = f"{count(speed.processed_tokens_per_s or 0)} tok/s"
        eta = f"eta {duration(speed.eta_s)}{omissions(speed.eta_leaves_out)}"
        ends = time.strftime("%H:%M", time.localtime(time.time() + speed.eta_s))
        useful = f"{tokens} ({count(speed.useful_tokens_per_s or 0)} useful)"
        idle, beside_plan = _bubbles(speed.bubble_share, predicted_bubbles)
        pauses = waits(speed.paused_share, speed.paused_s).strip(" ·")
        choices = (
            [useful, beside_plan, pauses, f"{eta}, at {ends}"],
            [useful, beside_plan, f"{eta}, at {ends}"],
            [useful, beside_plan, eta],
            [tokens, beside_plan, eta],  # the useful share is constant: the plan's density
            [tokens, idle, eta],
            [tokens, eta],
            [eta],
        )
        choices = ([text for text in texts if text] for texts in choices)
        parts = next(([*parts, *more] for more in choices if len("  ·  ".join([*parts, *more])) <= width), parts)
    return Text("  ·  ".join(parts), style="bold", no_wrap=True, overflow="ellipsis")


def _bubbles(measured: float | None, predicted: float | None) -> tuple[str, str]:
    """Idle share of the stages, without and with the prediction; empty if it is not measured."""
    if measured is None:
        return "", ""
    idle = f"bubbles {percent(measured)}"
    return idle, idle if predicted is None else f"{idle} (plan {100 * predicted:.1f})"


def adapter_lines(rows: Mapping[str, Row], speed: SlotDone | None, width: int) -> list[Text]:
    """One line per adapter with aligned columns; a failure may take more lines."""
    longest = max((len(name) for name in rows), default=0)
    name_width = min(longest, max(12, width // 3))
    cells = {name: _cells(name, row, speed) for name, row in rows.items() if not row.failure}
    columns = _fit_columns(cells, width - name_width - 1)
    lines = []
    for name, row in rows.items():
        label = name if len(name) <= name_width else name[: name_width - 1] + "…"
        start = f" {label:<{name_width}}"
        if row.failure:
            lines += _failure(start, row.failure, width)
            continue
        line = Text(start, no_wrap=True, overflow="ellipsis")
        for column, column_width in columns.items():
            line.append(" " * GAP + f"{cells[name][column]:>{column_width}}", style=_style(column, row))
        lines.append(line)
    return lines


def summary_lines(rows: Mapping[str, Row], width: int) -> list[Text]:
    """One line about adapters that are too many for a line each, and the first failures."""
    steps, num_steps = sum(row.step for row in rows.values()), sum(row.num_steps for row in rows.values())
    parts = [
        f" {exact(len(rows))} adapters",
        f"{exact(sum(row.done for row in rows.values()))} done",
        f"{exact(steps)}/{exact(num_steps)} steps",
    ]
    if failures := {name: row for name, row in rows.items() if row.failure}:
        parts.insert(2, f"{exact(len(failures))} failed")
    losses = {name: row.loss for name, row in rows.items() if row.loss is not None and not row.failure}
    if losses:
        low, median, high = np.quantile([*losses.values()], (0.1, 0.5, 0.9))
        worst = max(losses, key=lambda name: losses[name])
        parts += [f"loss {loss_text(median, 3)} ({loss_text(low, 3)} to {loss_text(high, 3)})"]
        parts += [f"highest {loss_text(losses[worst], 3)} {worst}"]
    first = {name: failures[name] for name in [*failures][:MOST_FAILURES]}
    return [Text("  ·  ".join(parts), no_wrap=True, overflow="ellipsis"), *adapter_lines(first, None, width)]


def plain_state(rows: Mapping[str, Row]) -> str:
    """The adapters in one line of a log; many adapters are summarised."""
    if len(rows) <= MOST_IN_LINE:
        return "  |  ".join(f"{name} {_plain(row)}" for name, row in rows.items())
    num_done = sum(row.done for row in rows.values())
    num_failed = sum(bool(row.failure) for row in rows.values())
    losses = [row.loss for row in rows.values() if row.loss is not None and not row.failure]
    mean = f", mean loss {loss_text(sum(losses) / len(losses), 3)}" if losses else ""
    return f"{len(rows)} adapters: {num_done} done, {num_failed} failed{mean}"


def _plain(row: Row) -> str:
    if row.failure:
        return "failed"
    return (
        f"{row.step}/{row.num_steps}"
        + (f" {_result(row)}" if row.loss is not None else "")
        + (" done" if row.done else f" {row.stopped}" if row.stopped else "")
    )


def _result(row: Row) -> str:
    """What a step says of an adapter."""
    if row.metrics.get("reward") is not None:
        return last_result(row.metrics)
    return "" if row.loss is None else f"loss {loss_text(row.loss, 3)}"


def _cells(name: str, row: Row, speed: SlotDone | None) -> dict[str, str]:
    tokens = speed.adapter_tokens_per_s.get(name) if speed else None
    eta = speed.adapter_eta_s.get(name) if speed else None
    return {
        "steps": f"{exact(row.step)}/{exact(row.num_steps)}",
        "share": f"{100 * row.step / max(row.num_steps, 1):.0f} %",
        "loss": _result(row),
        "metrics": "  ".join(f"{key} {value:z.3g}" for key, value in row.metrics.items()),
        "gnorm": "" if row.grad_norm is None else f"gnorm {row.grad_norm:.2f}",
        "lr": "" if row.lr is None else f"lr {rate(row.lr)}",
        "held-out": "" if row.eval_loss is None else f"held-out {loss_text(row.eval_loss, 3)}",
        "speed": "" if tokens is None or row.done or row.stopped else f"{count(tokens)} tok/s",
        "eta": "done" if row.done else row.stopped if row.stopped else "" if eta is None else f"eta {duration(eta)}",
    }


def _fit_columns(cells: Mapping[str, Mapping[str, str]], width: int) -> dict[str, int]:
    """Column → width, for the columns that fit."""
    columns = {
        column: longest
        for column in COLUMNS
        if (longest := max((len(row[column]) for row in cells.values()), default=0))
    }
    for column in DROPPED_FIRST:
        if sum(columns.values()) + GAP * len(columns) <= width:
            break
        columns.pop(column, None)
    return columns


def _style(column: str, row: Row) -> str:
    if column == "eta" and (row.done or row.stopped):
        return "green" if row.done else "yellow"
    return "dim" if column in ("share", "metrics", "gnorm", "lr") else ""


def _failure(start: str, text: str, width: int) -> list[Text]:
    indent = " " * (len(start) + GAP)
    lines = textwrap.wrap(
        text,
        max(width, len(indent) + 20),
        initial_indent=start + " " * GAP,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
    return [Text(line, style="bold red", no_wrap=True, overflow="ellipsis") for line in lines]
