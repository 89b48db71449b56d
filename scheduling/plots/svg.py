"""A timeline as a static SVG picture."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import NamedTuple

from scheduling.plots.colors import adapter_colors
from scheduling.timeline import Pause, Span, Timeline

ROW, GAP, LEFT, TOP, HOST = 34, 8, 64, 30, 14
MOST_NAMED = 12  # adapters of the legend; the bars name all of theirs


def timeline_svg(
    timeline: Timeline,
    *,
    width: int = 1100,
    start_s: float | None = None,
    end_s: float | None = None,
    compare: Timeline | None = None,
    colors: Mapping[str, str] | None = None,
    named: Collection[str] = (),
) -> str:
    """Draws stages as rows and time from left to right: forward pale, backward full, update dark, host grey.

    Pauses are in the background, slightly darker than idle time.

    Args:
        start_s: left edge, in seconds from the first forward (None: the first forward). With `end_s`, a part of a run.
        compare: a second timeline, under the first on the same time scale.
        colors: adapter → colour, for a page that draws the adapters elsewhere, too (None: by first appearance).
        named: adapters that a legend of more than `MOST_NAMED` has first, where they are drawn.
    """
    charts = [timeline] if compare is None else [timeline, compare]
    start = 0.0 if start_s is None else start_s
    end = max(chart.duration_s for chart in charts) if end_s is None else end_s
    window = _Window(start, end, (width - LEFT - 10) / max(end - start, 1e-12))
    drawn = adapter_colors(*charts)
    colors = drawn | dict(colors or {})
    legend = [name for name in colors if name in drawn]
    legend.sort(key=lambda name: name not in named)  # otherwise in their order
    bottom = sum(map(_height, charts))
    height = bottom + 24 + 20 * (1 + min(len(legend), MOST_NAMED + 1) // 6)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' font-family="system-ui, sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    top = 0
    for chart in charts:
        parts += _drawing(chart, window, colors, top, width)
        top += _height(chart)
    parts += _axis(start, end, width, bottom + 6)
    parts += _legend(legend, colors, bottom + 34)
    return "\n".join([*parts, "</svg>"])


class _Window(NamedTuple):
    """The visible part of the run."""

    start: float
    end: float
    scale: float

    def extent(self, timeline: Timeline, span: Span | Pause) -> tuple[float, float] | None:
        """Left edge and width of a bar; None if it is not visible."""
        left, right = (at - timeline.start_s - self.start for at in (span.start_s, span.end_s))
        duration = self.end - self.start
        if right <= 0 or left >= duration:
            return None
        left, right = max(0.0, left), min(right, duration)
        return LEFT + left * self.scale, (right - left) * self.scale


def _height(timeline: Timeline) -> int:
    return TOP + timeline.num_stages * (ROW + GAP) + (HOST + GAP) * bool(timeline.host)


def _drawing(timeline: Timeline, window: _Window, colors: dict[str, str], top: int, width: int) -> list[str]:
    title = f"{timeline.title} · bubbles {100 * timeline.bubble_share:.1f} %"
    parts = [f'<text x="{LEFT}" y="{top + 18}" fill="#222">{escape(title)}</text>']
    rows = [(f"stage {stage}", ROW) for stage in range(timeline.num_stages)] + [("host", HOST)] * bool(timeline.host)
    y = top + TOP
    for name, tall in rows:
        parts.append(f'<text x="8" y="{y + tall / 2 + 4}" fill="#222">{name}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{width - LEFT - 10}" height="{tall}" fill="#eeeeee"/>')
        y += tall + GAP
    for pause in timeline.pauses:
        if extent := window.extent(timeline, pause):
            tall = timeline.num_stages * (ROW + GAP) - GAP
            bar = f'<rect x="{extent[0]:.2f}" y="{top + TOP}" width="{extent[1]:.2f}" height="{tall}" fill="#d4d9dd"/>'
            parts += [f"<g><title>pause: {escape(pause.what)}</title>", bar, "</g>"]
    for span in timeline.spans:
        if extent := window.extent(timeline, span):
            parts += _bars(timeline, span, *extent, top + TOP + span.stage * (ROW + GAP), colors)
    y = top + TOP + timeline.num_stages * (ROW + GAP)
    for span in timeline.host:
        if extent := window.extent(timeline, span):
            label = f"host: {span.kind} of slot {span.slot} to stage {span.stage}"
            bar = (
                f'<rect x="{extent[0]:.2f}" y="{y}" width="{max(extent[1], 0.3):.2f}" height="{HOST}" fill="#777777"/>'
            )
            parts += [f"<g><title>{label}</title>", bar, "</g>"]
    return parts


def _bars(timeline: Timeline, span: Span, x: float, wide: float, y: float, colors: dict[str, str]) -> list[str]:
    """One band per adapter in the microbatch."""
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
    marks: list[str] = []
    for index in range(6):
        x = LEFT + (width - LEFT - 10) * index / 5
        anchor = "start" if index == 0 else "end" if index == 5 else "middle"
        seconds = start + (end - start) * index / 5
        marks.append(f'<text x="{x:.1f}" y="{y + 8}" text-anchor="{anchor}" fill="#555">{seconds:.3g} s</text>')
    return marks


def _legend(names: Sequence[str], colors: Mapping[str, str], y: float) -> list[str]:
    parts: list[str] = []
    for index, name in enumerate(names[:MOST_NAMED]):
        x, row = LEFT + index % 6 * 170, y + index // 6 * 20
        parts.append(f'<rect x="{x}" y="{row - 10}" width="12" height="12" fill="{colors[name]}"/>')
        parts.append(f'<text x="{x + 17}" y="{row}" fill="#222">{escape(name[:22])}</text>')
    if len(names) > MOST_NAMED:
        row = y + MOST_NAMED // 6 * 20
        parts.append(f'<text x="{LEFT}" y="{row}" fill="#222">and {len(names) - MOST_NAMED} more adapters</text>')
    return parts
