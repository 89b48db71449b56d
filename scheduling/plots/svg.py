"""A timeline as one static SVG picture."""

from __future__ import annotations

from html import escape

from scheduling.plots.colors import adapter_colors
from scheduling.timeline import Span, Timeline

ROW, GAP, LEFT, TOP = 34, 8, 64, 30


def timeline_svg(
    timeline: Timeline, *, width: int = 1100, start_s: float | None = None, end_s: float | None = None
) -> str:
    """Draws stages as rows and time from left to right; forward pale, backward full, update dark.

    Args:
        start_s: left edge, from the start of the run (None: the start). With `end_s`, a part of a long run.
    """
    start = 0.0 if start_s is None else start_s
    end = timeline.duration_s if end_s is None else end_s
    scale = (width - LEFT - 10) / max(end - start, 1e-12)
    colors = adapter_colors(timeline)
    height = TOP + timeline.num_stages * (ROW + GAP) + 24 + 20 * (1 + len(colors) // 6)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' font-family="system-ui, sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="18" fill="#222">{escape(timeline.title)} · bubbles {timeline.bubble_share:.1%}</text>',
    ]
    for stage in range(timeline.num_stages):
        y = TOP + stage * (ROW + GAP)
        parts.append(f'<text x="8" y="{y + ROW / 2 + 4}" fill="#222">stage {stage}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{width - LEFT - 10}" height="{ROW}" fill="#eeeeee"/>')
    for span in timeline.spans:
        left, right = span.start_s - timeline.start_s - start, span.end_s - timeline.start_s - start
        if right > 0 and left < end - start:
            parts += _bars(
                timeline, span, LEFT + max(0, left) * scale, (min(right, end - start) - max(0, left)) * scale, colors
            )
    parts += _axis(start, end, width, TOP + timeline.num_stages * (ROW + GAP) + 6)
    parts += _legend(colors, TOP + timeline.num_stages * (ROW + GAP) + 34)
    return "\n".join([*parts, "</svg>"])


def _bars(timeline: Timeline, span: Span, x: float, wide: float, colors: dict[str, str]) -> list[str]:
    """One band per adapter in the microbatch."""
    y = TOP + span.stage * (ROW + GAP)
    if span.kind == "update":
        return [f'<rect x="{x:.2f}" y="{y}" width="{max(wide, 1):.2f}" height="{ROW}" fill="#111111"/>']
    adapters = timeline.slot_adapters.get(span.slot, ()) or ("",)
    band = ROW / len(adapters)
    opacity = 0.45 if span.kind == "forward" else 1.0
    label = escape(f"{span.kind} of slot {span.slot}: {', '.join(adapters)}")
    bars = [
        f'<rect x="{x:.2f}" y="{y + index * band:.2f}" width="{max(wide - 0.4, 0.2):.2f}" height="{band:.2f}"'
        f' fill="{colors.get(name, "#999999")}" fill-opacity="{opacity}"/>'
        for index, name in enumerate(adapters)
    ]
    return [f"<g><title>{label}</title>", *bars, "</g>"]


def _axis(start: float, end: float, width: int, y: float) -> list[str]:
    marks = []
    for index in range(6):
        x = LEFT + (width - LEFT - 10) * index / 5
        anchor = "start" if index == 0 else "end" if index == 5 else "middle"
        seconds = start + (end - start) * index / 5
        marks.append(f'<text x="{x:.1f}" y="{y + 8}" text-anchor="{anchor}" fill="#555">{seconds:.3g} s</text>')
    return marks


def _legend(colors: dict[str, str], y: float) -> list[str]:
    parts = []
    for index, (name, color) in enumerate(colors.items()):
        x, row = LEFT + index % 6 * 170, y + index // 6 * 20
        parts.append(f'<rect x="{x}" y="{row - 10}" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{x + 17}" y="{row}" fill="#222">{escape(name[:22])}</text>')
    return parts
