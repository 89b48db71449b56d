"""The live view of a run: a block that is redrawn on a terminal, one line per log step otherwise."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lorafusion_jax.report.events import Event
from lorafusion_jax.report.format import count, duration, rate


@dataclass(slots=True)
class Row:
    """What is known of one adapter."""

    num_steps: int
    step: int = 0
    loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    eval_loss: float | None = None
    note: str = ""


class Screen:
    """A listener that draws.

    Args:
        name: of the run.
        console: where to draw; a terminal gets the redrawn block, anything else plain lines.
    """

    def __init__(self, name: str, console: Console | None = None):
        self._name, self._console = name, console or Console()
        self._rows: dict[str, Row] = {}
        self._slots, self._slot, self._speed = 0, 0, {}
        self._phase = ""
        self._live = Live(console=self._console, refresh_per_second=4, transient=False) if self._console.is_terminal else None
        self._started = False

    def __enter__(self) -> Screen:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *problem) -> None:
        self._phase = ""
        if self._live:
            self._live.update(self._block(), refresh=True)
            self._live.stop()

    def __call__(self, event: Event) -> None:
        getattr(self, "_on_" + event.kind.replace("-", "_"), lambda event: None)(event)
        if self._live:
            self._live.update(self._block())

    def _on_phase(self, event: Event) -> None:
        self._phase = event.values["text"]
        if not self._started:
            self._line(self._phase)

    def _on_started(self, event: Event) -> None:
        values = event.values
        self._started, self._slots, self._slot = True, values["slots"], event.slot
        self._rows = {name: Row(steps) for name, steps in values["adapters"].items()}
        self._phase = "compiling"
        self._line(f"{self._name}  plan {values['plan']}  {values['slots']} microbatches of {values['capacity_tokens']} "
                   f"tokens, {100 * values['density']:.1f} % used  ·  {values['device']}  ·  "
                   f"{count(values['trainable'])} trainable of {count(values['frozen'])} frozen parameters", always=True)

    def _on_compiled(self, event: Event) -> None:
        self._phase = ""
        self._line(f"compiled {event.values['program']} in {duration(event.values['seconds'])}", always=True)

    def _on_slot(self, event: Event) -> None:
        self._slot, self._speed = event.slot, event.values
        if self._slot and event.values["eta_s"] is not None:
            self._phase = ""
        self._line(self._head() + "  " + "  ".join(f"{name} {self._state(row)}" for name, row in self._rows.items()))

    def _on_step(self, event: Event) -> None:
        row = self._rows[event.adapter]
        row.step, row.loss = event.step, event.values["loss"]
        row.grad_norm, row.lr = event.values["grad_norm"], event.values["lr"]

    def _on_eval(self, event: Event) -> None:
        self._rows[event.adapter].eval_loss = event.values["eval_loss"]
        self._line(f"{event.adapter}  step {event.step}  held-out loss {event.values['eval_loss']:.4f}")

    def _on_adapter_done(self, event: Event) -> None:
        self._rows[event.adapter].note = "done"

    def _on_adapter_failed(self, event: Event) -> None:
        values = event.values
        self._rows[event.adapter].note = f"FAILED: {values['reason']}. kept step {values['kept_step']}. others unaffected"
        self._line(f"{event.adapter}  {self._rows[event.adapter].note}", always=True)

    def _on_saved(self, event: Event) -> None:
        self._line(f"saved {event.values['path']}")

    def _on_exported(self, event: Event) -> None:
        self._line(f"{event.adapter}  adapter written to {event.values['path']}")

    def _line(self, text: str, *, always: bool = False) -> None:
        if self._live is None or always:
            self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def _head(self) -> str:
        share = f"{100 * self._slot / self._slots:.0f} %" if self._slots else ""
        head = f"{self._name}  {self._slot}/{self._slots} mb  {share}"
        if self._speed.get("eta_s") is not None:
            head += (f"  ·  {count(self._speed['processed_tokens_per_s'])} tok/s "
                     f"({count(self._speed['useful_tokens_per_s'])} useful)  ·  eta {duration(self._speed['eta_s'])}")
        return head + (f"  ·  {self._phase} …" if self._phase else "")

    def _state(self, row: Row) -> str:
        if row.note:
            return row.note
        return f"{row.step}/{row.num_steps}" + (f" loss {row.loss:.3f}" if row.loss is not None else "")

    def _block(self) -> Text | Table:
        if not self._started:
            return Text(f"{self._name}  {self._phase} …" if self._phase else "")
        table = Table.grid(padding=(0, 2))
        for justify in ("left", "right", "right", "left", "left", "left", "left", "left"):
            table.add_column(justify=justify, no_wrap=True)
        etas = self._speed.get("adapter_eta_s", {})
        for name, row in self._rows.items():
            if row.note.startswith("FAILED"):
                table.add_row(f" {name}", "–", "", Text(row.note, style="bold red", no_wrap=False))
                continue
            done = row.note == "done"
            table.add_row(
                f" {name}", f"{row.step}/{row.num_steps}", f"{100 * row.step / max(row.num_steps, 1):.0f} %",
                f"loss {row.loss:.3f}" if row.loss is not None else "",
                f"gnorm {row.grad_norm:.2f}" if row.grad_norm is not None else "",
                f"lr {rate(row.lr)}" if row.lr is not None else "",
                f"held-out {row.eval_loss:.3f}" if row.eval_loss is not None else "",
                "[green]done[/green]" if done else f"eta {duration(etas[name])}" if name in etas else "")
        frame = Table.grid()
        frame.add_row(Text(self._head(), style="bold"))
        frame.add_row(table)
        return frame
