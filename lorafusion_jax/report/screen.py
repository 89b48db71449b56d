"""The live view of a run: a block that is redrawn on a terminal, one line now and then otherwise."""

from __future__ import annotations

import threading
import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from lorafusion_jax.report.block import Row, adapter_lines, head_line, plain_state
from lorafusion_jax.report.events import Event
from lorafusion_jax.report.format import count, duration, layout, percent, whole

LINE_EVERY_S = 10.0
REDRAW_EVERY_S = 0.2
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class Screen:
    """A listener that draws.

    Args:
        name: of the run.
        console: where to draw; a terminal gets the redrawn block, anything else plain lines.
        line_every_s: least time between two plain lines about progress.
    """

    def __init__(self, name: str, console: Console | None = None, line_every_s: float = LINE_EVERY_S):
        self._name, self._console, self._line_every_s = name, console or Console(), line_every_s
        self._rows: dict[str, Row] = {}
        self._slots, self._slot = 0, 0
        self._speed: dict[str, Any] = {}
        self._predicted_bubbles: float | None = None
        self._phase, self._phase_since, self._line_at = "", 0.0, float("-inf")
        self._told = ""  # the last line about progress, without the time of day
        self._started = False
        redrawn = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = Live(console=self._console, auto_refresh=False, get_renderable=self.block) if redrawn else None
        self._drawing, self._end = threading.Lock(), threading.Event()
        self._redrawer = threading.Thread(target=self._redraw, daemon=True)

    def __enter__(self) -> Screen:
        if self._live:
            self._live.start()
            self._redrawer.start()
        return self

    def __exit__(self, *problem) -> None:
        self._phase = ""
        if self._live:
            self._end.set()
            self._redrawer.join()
            self._live.stop()

    def __call__(self, event: Event) -> None:
        getattr(self, "_on_" + event.kind.replace("-", "_"), lambda event: None)(event)

    def block(self) -> Group:
        """What stands on the terminal now."""
        width = self._console.width
        lines = (
            [
                head_line(self._name, self._slot, self._slots, self._speed, width),
                *adapter_lines(self._rows, self._speed, width),
            ]
            if self._started
            else []
        )
        if self._phase:
            now = time.monotonic()
            lines.append(
                Text(
                    f" {SPINNER[int(now * 5) % len(SPINNER)]} {self._phase} … {duration(now - self._phase_since)}",
                    style="cyan",
                    no_wrap=True,
                    overflow="ellipsis",
                )
            )
        return Group(*lines)

    def _on_phase(self, event: Event) -> None:
        self._phase, self._phase_since = event.values["text"], time.monotonic()
        if not self._started or self._phase.startswith("compiling"):  # of the others, the result is told
            self._line(f"{self._phase} …")

    def _on_started(self, event: Event) -> None:
        values = event.values
        self._started, self._slots, self._slot, self._phase = True, values["slots"], event.slot, ""
        self._predicted_bubbles = values.get("predicted_bubble_share")
        self._rows = _rows_at(values)
        devices = layout(values["mesh"], values["layers"], values["keep"]) if "mesh" in values else ""
        for text in (
            f"{self._name}  plan {values['plan'][:12]}  ·  {whole(values['slots'])} microbatches of "
            f"{whole(values['capacity_tokens'])} tokens, {percent(values['density'])} used",
            f"  {count(values['trainable'])} trainable parameters beside {count(values['frozen'])} frozen ones  ·  "
            f"{values['device']}" + (f"  ·  resumed at microbatch {whole(event.slot)}" if event.slot else ""),
            *([f"  {devices}"] if devices else ()),
        ):
            self._line(text, always=True)
        for note in () if event.slot else values.get("data_notes", ()):
            self._line(f"  {note}", always=True, style="yellow")
        if warning := values.get("memory_warning"):
            self._line(f"  {warning}", always=True, style="bold yellow")

    def _on_moved(self, event: Event) -> None:
        left, before = (whole(event.values[key]) for key in ("slots_left", "slots_left_before"))
        there = " and ".join(
            f"{count} {what}{'' if count == 1 else 's'}"
            for what, count in (("stage", event.values["stages"]), ("replica", event.values["replicas"]))
        )
        self._line(f"planned again for {there}: {left} slots left instead of {before}", always=True)

    def _on_compiled(self, event: Event) -> None:
        self._phase, self._phase_since = "first steps", time.monotonic()
        self._line(f"compiled the {event.values['program']} in {duration(event.values['seconds'])}", always=True)

    def _on_slot(self, event: Event) -> None:
        self._slot, self._speed = event.slot, event.values | {"predicted_bubble_share": self._predicted_bubbles}
        if event.values["eta_s"] is not None:
            self._phase = ""
        now = time.monotonic()
        if now - self._line_at >= self._line_every_s or self._slot == self._slots:
            self._line_at = now
            head = head_line("", self._slot, self._slots, self._speed, 200).plain
            text = f"{head.replace('  ·  ', '  ')}  |  {plain_state(self._rows)}"
            if text != self._told:  # the last slot is told when it is due, and when all is done
                self._line(time.strftime("%H:%M:%S") + text)
            self._told = text

    def _on_step(self, event: Event) -> None:
        row = self._row(event)
        row.step, row.loss = event.step or 0, event.values["loss"]
        row.grad_norm, row.lr = event.values["grad_norm"], event.values["lr"]

    def _on_eval(self, event: Event) -> None:
        self._phase = ""
        self._row(event).eval_loss = event.values["eval_loss"]
        self._line(f"{event.adapter}  step {event.step}  held-out loss {event.values['eval_loss']:.4f}")

    def _on_adapter_done(self, event: Event) -> None:
        self._row(event).done = True

    def _on_adapter_failed(self, event: Event) -> None:
        self._row(event).failure = _failure(event.values["reason"], event.values["kept_step"])
        self._line(f"{event.adapter}  {self._row(event).failure}", style="bold red")

    def _on_saved(self, event: Event) -> None:
        self._phase = ""
        self._line(f"saved {event.values['path']}")

    def _on_exported(self, event: Event) -> None:
        self._line(f"{event.adapter}  step {event.step}  written to {event.values['path']}")

    def _on_damaged(self, event: Event) -> None:
        self._line(event.values["text"], always=True, style="bold yellow")

    _on_unchecked = _on_damaged

    def _on_export_failed(self, event: Event) -> None:
        self._line(f"{event.adapter}  step {event.step} not written: {event.values['what']}", style="bold red")

    def _row(self, event: Event) -> Row:
        return self._rows[event.adapter or ""]

    def _line(self, text: str, *, always: bool = False, style: str = "") -> None:
        if self._live is None or always:
            with self._drawing:
                self._console.print(text, highlight=False, soft_wrap=True, markup=False, style=style or None)

    def _redraw(self) -> None:
        """Redraws while the run computes; Live's own thread may draw into a line that is just being printed."""
        while self._live and not self._end.wait(REDRAW_EVERY_S):
            with self._drawing:
                self._live.refresh()


def _rows_at(values: dict[str, Any]) -> dict[str, Row]:
    """The adapters where a sitting begins: a resumed one has taken steps, and some adapters may be at their end."""
    taken, failed = values.get("taken", {}), values.get("failed", {})
    rows = {}
    for name, steps in values["adapters"].items():
        step = taken.get(name, 0)
        failure = _failure(failed[name], step) if name in failed else ""
        rows[name] = Row(steps, step=step, done=step == steps, failure=failure)
    return rows


def _failure(reason: str, kept_step: int) -> str:
    return f"FAILED: {reason}. kept step {kept_step}. others unaffected"
