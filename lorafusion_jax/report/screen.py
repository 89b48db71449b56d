"""The live view of a run: a redrawn block on a terminal, occasional lines otherwise."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from lorafusion_jax.report.block import Row, adapter_lines, head_line, plain_state, summary_lines
from lorafusion_jax.report.console import MOST_LINES
from lorafusion_jax.report.events import (
    AdapterChanged,
    AdapterDone,
    AdapterEvaluated,
    AdapterEvent,
    AdapterExported,
    AdapterFailed,
    AdapterSampled,
    CacheSkipped,
    CheckSkipped,
    ExportFailed,
    FilesDamaged,
    PhaseBegun,
    PlanRevised,
    ProgramCompiled,
    ReferencesComputed,
    RequestRefused,
    RunEvent,
    RunMoved,
    RunStarted,
    SlotDone,
    StartedUp,
    StateSaved,
    StepTaken,
)
from lorafusion_jax.report.format import count, duration, exact, layout, loss_text, percent, sizes
from lorafusion_jax.signals import shown_by

LINE_EVERY_S = 10.0
REDRAW_EVERY_S = 0.2
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class LiveView(Protocol):
    """Something that redraws: `rich.live.Live`, or a notebook's output."""

    def start(self) -> None: ...

    def refresh(self) -> None: ...

    def stop(self) -> None: ...


class Screen:
    """A listener that draws the live view.

    Args:
        name: of the run.
        console: where to draw; a terminal gets the redrawn block, anything else plain lines.
        line_every_s: least time between two plain lines about progress.
        live: what redraws the block elsewhere than on a terminal, of a function that makes it.
    """

    def __init__(
        self,
        name: str,
        console: Console | None = None,
        line_every_s: float = LINE_EVERY_S,
        live: Callable[[Callable[[], Group]], LiveView] | None = None,
    ):
        self._name, self._console, self._line_every_s = name, console or Console(), line_every_s
        self._rows: dict[str, Row] = {}
        self._slots, self._slot = 0, 0
        self._speed: SlotDone | None = None
        self._predicted_bubbles: float | None = None
        self._phase, self._phase_since, self._line_at = "", 0.0, float("-inf")
        self._last_line = ""  # last line about progress, without the time of day
        self._started, self._stopping = False, ""
        redrawn = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live: LiveView | None = None
        if live is not None:
            self._live = live(self.block)
        elif redrawn:
            self._live = Live(console=self._console, auto_refresh=False, get_renderable=self.block)
        self._drawing, self._end = threading.Lock(), threading.Event()
        self._redrawer = threading.Thread(target=self._redraw, daemon=True)
        self._signals = ExitStack()

    def __enter__(self) -> Screen:
        if self._live:
            self._live.start()
            self._redrawer.start()
            self._signals.enter_context(shown_by(self._acknowledge))
        return self

    def __exit__(self, *problem) -> None:
        self._phase = ""
        if self._live:
            self._signals.close()
            self._end.set()
            self._redrawer.join()
            self._live.stop()

    def __call__(self, event: RunEvent) -> None:
        match event:
            case PhaseBegun():
                self._on_phase(event)
            case RunStarted():
                self._on_started(event)
            case RunMoved():
                self._on_moved(event)
            case StartedUp():
                self._on_started_up(event)
            case ProgramCompiled():
                self._on_compiled(event)
            case ReferencesComputed():
                self._on_references(event)
            case SlotDone():
                self._on_slot(event)
            case StepTaken():
                self._on_step(event)
            case AdapterSampled():
                self._phase = ""
            case AdapterEvaluated():
                self._on_eval(event)
            case AdapterDone():
                self._row(event).done = True
            case AdapterChanged():
                self._on_changed(event)
            case PlanRevised():
                self._slots, self._phase = event.slots, ""
                slots, before = exact(event.slots_left), exact(event.slots_left_before)
                self._line(f"planned again: {slots} slots left instead of {before}", always=True)
            case RequestRefused():
                self._line(f"request refused: {event.text}", always=True, style="bold yellow")
            case AdapterFailed():
                self._on_failed(event)
            case StateSaved():
                self._phase = ""
                self._line(f"saved {event.path}")
            case FilesDamaged() | CacheSkipped() | CheckSkipped():
                self._line(event.text, always=True, style="bold yellow")
            case ExportFailed():
                self._line(f"{event.adapter}  step {event.step} not written: {event.what}", style="bold red")
            case AdapterExported():
                self._line(f"{event.adapter}  step {event.step}  written to {event.path}")

    def block(self) -> Group:
        """The current content of the live view."""
        width = self._console.width
        lines = (
            [
                head_line(self._name, self._slot, self._slots, self._speed, width, self._predicted_bubbles),
                *(
                    adapter_lines(self._rows, self._speed, width)
                    if len(self._rows) <= MOST_LINES
                    else summary_lines(self._rows, width)
                ),
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
        if self._stopping:
            lines.append(Text(self._stopping, style="bold yellow"))
        return Group(*lines)

    def _acknowledge(self, text: str) -> None:
        """A signal's answer is a line of the block from the next redrawing on."""
        self._stopping = text

    def _on_phase(self, event: PhaseBegun) -> None:
        self._phase, self._phase_since = event.text, time.monotonic()
        if not self._started or self._phase.startswith("compiling"):  # other phases report their result
            self._line(f"{self._phase} …")

    def _on_started(self, event: RunStarted) -> None:
        self._started, self._slots, self._slot, self._phase = True, event.slots, event.slot, ""
        self._predicted_bubbles = event.predicted_bubble_share
        self._rows = _rows_at(event)
        devices = layout(event.mesh, event.layers, event.remat) if event.mesh else ""
        for text in (
            f"{self._name}  plan {event.plan[:12]}  ·  {exact(event.slots)} microbatches of "
            f"{sizes(map(int, event.sizes)) or exact(event.capacity_tokens)} tokens, {percent(event.density)} used",
            f"  {count(event.trainable)} trainable and {count(event.frozen)} frozen parameters  ·  "
            f"{event.device}" + (f"  ·  resumed at microbatch {exact(event.slot)}" if event.slot else ""),
            *([f"  {devices}"] if devices else ()),
        ):
            self._line(text, always=True)
        for note in () if event.slot else event.data_notes:
            self._line(f"  {note}", always=True, style="yellow")
        if event.memory_warning:
            self._line(f"  {event.memory_warning}", always=True, style="bold yellow")

    def _on_moved(self, event: RunMoved) -> None:
        slots, before = exact(event.slots_left), exact(event.slots_left_before)
        mesh_text = " and ".join(
            f"{count} {unit}{'' if count == 1 else 's'}"
            for unit, count in (("stage", event.stages), ("replica", event.replicas))
        )
        self._line(f"planned again for {mesh_text}: {slots} slots left instead of {before}", always=True)

    def _on_started_up(self, event: StartedUp) -> None:
        self._phase = ""
        began, ended = event.parts["base"]
        programs = f"  ·  {exact(event.compiled)} programs compiled, {exact(event.from_cache)} from the cache"
        compilations = programs if event.compiled or event.from_cache else ""
        cache_note = ", quantised by an earlier run," * event.base_from_cache
        self._line(f"read the base{cache_note} in {duration(ended - began)}{compilations}")

    def _on_compiled(self, event: ProgramCompiled) -> None:
        self._phase, self._phase_since = "first steps", time.monotonic()
        self._line(f"compiled the {event.program} in {duration(event.seconds)}", always=True)

    def _on_references(self, event: ReferencesComputed) -> None:
        names, tokens = ", ".join(event.adapters), count(event.tokens)
        share = ""
        if event.beside_s:
            share = f", {percent(event.seconds / event.beside_s)} of {duration(event.beside_s)} in which others trained"
        self._line(
            f"computed the references of {names} in {duration(event.seconds)} ({tokens} tokens){share}", always=True
        )

    def _on_slot(self, event: SlotDone) -> None:
        self._slot, self._speed = event.slot, event
        if event.eta_s is not None:
            self._phase = ""
        now = time.monotonic()
        if now - self._line_at >= self._line_every_s or self._slot == self._slots:
            self._line_at = now
            head = head_line("", self._slot, self._slots, event, 200, self._predicted_bubbles).plain
            text = f"{head.replace('  ·  ', '  ')}  |  {plain_state(self._rows)}"
            if text != self._last_line:  # the last slot is reported when it is due and at the end
                self._line(time.strftime("%H:%M:%S") + text)
            self._last_line = text

    def _on_step(self, event: StepTaken) -> None:
        row = self._row(event)
        row.step, row.loss, row.grad_norm, row.lr = event.step, event.loss, event.grad_norm, event.lr
        row.metrics = event.metrics

    def _on_eval(self, event: AdapterEvaluated) -> None:
        self._phase = ""
        self._row(event).eval_loss = event.eval_loss
        metrics = "".join(f"  {name.removeprefix('eval_')} {value:z.4g}" for name, value in event.metrics.items())
        self._line(f"{event.adapter}  step {event.step}  held-out loss {loss_text(event.eval_loss)}{metrics}")

    def _on_failed(self, event: AdapterFailed) -> None:
        self._row(event).failure = _failure(event.reason, event.kept_step)
        self._line(f"{event.adapter}  {self._row(event).failure}", style="bold red")

    def _on_changed(self, event: AdapterChanged) -> None:
        row = self._rows.setdefault(event.adapter, Row(event.num_steps))  # one that has joined is new
        row.num_steps, row.done = event.num_steps, event.status == "done"
        row.stopped = event.status if event.status in ("paused", "cancelled") else ""
        change = f"weight {event.weight:g}" if event.weight is not None else event.status
        if event.action == "stop":
            self._line(f"{event.adapter}  ends early, {event.reason}", always=True)
            return
        self._line(f"{event.adapter}  step {event.step}/{event.num_steps}  {event.action}: {change}", always=True)

    def _row(self, event: AdapterEvent) -> Row:
        return self._rows[event.adapter]

    def _line(self, text: str, *, always: bool = False, style: str = "") -> None:
        if self._live is None or always:
            with self._drawing:
                self._console.print(text, highlight=False, soft_wrap=True, markup=False, style=style or None)

    def _redraw(self) -> None:
        """Redraws from this thread; Live's own thread could draw into a line that is being printed."""
        while self._live and not self._end.wait(REDRAW_EVERY_S):
            with self._drawing:
                self._live.refresh()


def _rows_at(event: RunStarted) -> dict[str, Row]:
    """Rows of the adapters at the start of a session; resumed adapters have taken steps and may be done."""
    rows = {}
    for name, steps in event.adapters.items():
        step = event.taken.get(name, 0)
        failure = _failure(event.failed[name], step) if name in event.failed else ""
        rows[name] = Row(steps, step=step, done=step == steps, failure=failure)
        rows[name].stopped = event.stopped.get(name, "")
    return rows


def _failure(reason: str, kept_step: int) -> str:
    return f"FAILED: {reason}. kept step {kept_step}. others unaffected"
