"""Loss curves as SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scheduling.plots.colors import colors_of

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 640, 240, 56, 28, 12, 12
GRID, INK = "#8884", "#888"


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
