"""Objects that print as the command line does, and show the same in a notebook, with curves and timelines."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import ClassVar

from rich.console import Console

from lorafusion_jax.files import write_output
from scheduling import Timeline, timeline_html
from scheduling.plots.colors import colors_of

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 640, 240, 56, 28, 12, 12  # of curves, in pixels
GRID, INK = "#8884", "#888"
COLUMNS = 110  # without a terminal
PRE = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:1.3;'
    "font-family:Menlo,'DejaVu Sans Mono',consolas,monospace\">{code}</pre>"
)


class Shown:
    """Base class of objects with a screen: `str()` returns its text, and a notebook shows its HTML and drawings."""

    __slots__ = ()

    def _show(self, console: Console) -> None:
        raise NotImplementedError

    def _drawings(self) -> str:
        """HTML that follows the screen in a notebook."""
        return ""

    def __str__(self) -> str:
        return as_text(self._show)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return as_html(self._show) + self._drawings()


def as_text(show: Callable[[Console], None]) -> str:
    """Returns what `show` prints, without colours."""
    text = StringIO()
    show(Console(file=text, width=COLUMNS, force_jupyter=False, force_terminal=False))
    return "\n".join(line.rstrip() for line in text.getvalue().strip("\n").splitlines())


def as_html(show: Callable[[Console], None]) -> str:
    """Returns what `show` prints as HTML, with colours."""
    console = recording_console()
    show(console)
    return console.export_html(code_format=PRE, inline_styles=True)


def recording_console() -> Console:
    """Returns a console without output whose record becomes HTML."""
    return Console(file=StringIO(), record=True, width=COLUMNS, force_jupyter=False, force_terminal=True)


class Page:
    """Base class of pages: a notebook shows one in a frame."""

    __slots__ = ()
    height: ClassVar[int]  # of the frame

    def _page(self) -> str:
        raise NotImplementedError

    def save(self, path: str | Path) -> Path:
        """Writes the page as one HTML file."""
        write_output(Path(path), self._page())
        return Path(path)

    def _repr_html_(self) -> str:
        frame = f'width="100%" height="{self.height}" style="border:0"'
        return f'<iframe srcdoc="{html.escape(self._page())}" {frame}></iframe>'


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Losses of one adapter.

    Args:
        steps: optimizer steps of `loss`.
        eval_steps: steps after which held-out loss was measured.
    """

    steps: tuple[int, ...] = ()
    loss: tuple[float, ...] = ()
    eval_steps: tuple[int, ...] = ()
    eval_loss: tuple[float, ...] = ()


def draw_curves(curves: Mapping[str, Curve]) -> str:
    """Draws training losses as lines and held-out losses as dots, one colour for each adapter.

    >>> draw_curves({"law": Curve(steps=(1, 2), loss=(3.0, 2.5))}).count("<polyline")
    1
    """
    points = [point for curve in curves.values() for point in _points(curve)]
    if not points:
        return ""
    last = max(max(step for step, _ in points), 1)
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    span = (high - low) or max(abs(high), 1.0)

    def to_pixels(step: float, loss: float) -> tuple[float, float]:
        x = LEFT + step / last * (WIDTH - LEFT - RIGHT)
        return round(x, 1), round(TOP + (high - loss) / span * (HEIGHT - TOP - BOTTOM), 1)

    parts = [_axes(to_pixels, last, low, low + span)]
    for name, color in colors_of(curves).items():
        curve = curves[name]
        line = [to_pixels(*point) for point in _finite(curve.steps, curve.loss)]
        dots = [to_pixels(*point) for point in _finite(curve.eval_steps, curve.eval_loss)]
        path = " ".join(f"{x},{y}" for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>' if line else "")
        title = f"<title>{html.escape(name)}, held out</title>"
        parts += [f'<circle cx="{x}" cy="{y}" r="3.5" fill="{color}">{title}</circle>' for x, y in dots]
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    font = "font-family:sans-serif;font-size:11px"
    drawing = f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="{font}">{"".join(parts)}</svg>'
    return f'<div>{drawing}<div style="{font}">{_legend(curves)}</div></div>'


def _points(curve: Curve) -> list[tuple[int, float]]:
    return [*_finite(curve.steps, curve.loss), *_finite(curve.eval_steps, curve.eval_loss)]


def _finite(steps: Sequence[int], losses: Sequence[float]) -> list[tuple[int, float]]:
    return [(step, loss) for step, loss in zip(steps, losses, strict=True) if math.isfinite(loss)]


def _axes(to_pixels, last: int, low: float, high: float) -> str:
    parts = []
    for share in (0, 0.5, 1):
        loss = low + share * (high - low)
        x, y = to_pixels(0, loss)
        parts.append(f'<line x1="{x}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="{GRID}"/>')
        parts.append(f'<text x="{x - 6}" y="{y + 4}" text-anchor="end" fill="{INK}">{loss:.3g}</text>')
    for step in sorted({0, last // 2, last}):
        x, y = to_pixels(step, low)
        parts.append(f'<text x="{x}" y="{y + 18}" text-anchor="middle" fill="{INK}">{step}</text>')
    return "".join(parts)


def _legend(curves: Mapping[str, Curve]) -> str:
    names = [
        f'<span style="color:{color}">&#9632;</span> {html.escape(name)}' for name, color in colors_of(curves).items()
    ]
    return "&ensp;".join(names) + f'&ensp;<span style="color:{INK}">loss by step; dots: held out</span>'


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineView(Page):
    """A predicted or measured timeline of the stages.

    Args:
        timeline: every span of time.
        note: a sentence above the drawing.
    """

    timeline: Timeline
    note: str = ""
    height = 420

    def _page(self) -> str:
        return timeline_html(self.timeline, note=self.note)
