"""A timeline as one self-contained HTML page with zoom, drag and hover; no network, no libraries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape

from scheduling.plots.colors import adapter_colors, adapter_names
from scheduling.timeline import Span, Timeline

MOST_SPANS = 60_000  # about 2 MB of page; browsers stay quick


def timeline_html(timeline: Timeline, *, title: str = "", note: str = "", compare: Timeline | None = None) -> str:
    """Draws a timeline, or two timelines on one time scale (for example predicted and measured).

    Args:
        title: title of the page (empty: the timeline's title).
        note: a sentence under the title, for example what limits the plan.
        compare: a second timeline.
    """
    charts = [timeline] if compare is None else [timeline, compare]
    data = json.dumps(
        [_data(chart, adapter_colors(*charts)) for chart in charts], separators=(",", ":"), allow_nan=False
    ).replace("<", "\\u003c")
    fields = {
        "@TITLE@": escape(title or (timeline.title or "timeline" if compare is None else "Two timelines")),
        "@NOTE@": f"<p>{escape(note)}</p>\n" if note else "",
        "@TABLES@": "\n".join(_table(chart, None if chart is timeline else timeline) for chart in charts),
        "@DATA@": data,
    }
    return page_of("scheduling.plots", "timeline.html", fields)


def page_of(package: str, template: str, fields: Mapping[str, str]) -> str:
    """Fills a template of a package, with the colours and charts of all pages. No other file is needed to show it."""
    text = _read(package, template)
    for mark, content in {"@THEME@": theme_css(), "@CHARTS@": charts_js(), **fields}.items():
        text = text.replace(mark, content)
    return text


def theme_css() -> str:
    """Returns the colours of all pages."""
    return _read("scheduling.plots", "theme.css")


def charts_js() -> str:
    """Returns the charts of all pages as a part of a script that is not a module."""
    return _read("scheduling.plots", "charts.js").replace("\nexport ", "\n")


def _read(package: str, name: str) -> str:
    from importlib.resources import files  # slow to import and rarely needed

    return files(package).joinpath(name).read_text("utf-8")


def _data(timeline: Timeline, colors: dict[str, str]) -> dict[str, object]:
    names = adapter_names(timeline)
    index_of = {name: index for index, name in enumerate(names)}
    spans = _ends(timeline.spans, MOST_SPANS)
    return {
        "title": timeline.title,
        "stages": timeline.num_stages,
        "duration": timeline.duration_s,
        "cut": len(timeline.spans) - len(spans),
        "names": names,
        "colors": [colors[name] for name in names],
        "spans": [
            [
                *_span_data(timeline, span),
                [index_of[name] for name in span.adapters or timeline.slot_adapters.get(span.slot, ())],
            ]
            for span in spans
        ],
        "host": [_span_data(timeline, span) for span in _ends(timeline.host, MOST_SPANS)],
        "pauses": [
            [round(at - timeline.start_s, 7) for at in (pause.start_s, pause.end_s)] + [pause.what]
            for pause in timeline.pauses
        ],
    }


def _span_data(timeline: Timeline, span: Span) -> list[float]:
    kind = ("forward", "backward", "update").index(span.kind)
    times = [round(at - timeline.start_s, 7) for at in (span.start_s, span.end_s)]
    return [kind, span.stage, span.slot, *times]


def _ends(spans: tuple[Span, ...], most: int) -> tuple[Span, ...]:
    """The first and the last spans, if there are too many."""
    if len(spans) <= most:
        return spans
    by_start = sorted(spans, key=lambda span: span.start_s)
    return (*by_start[: most // 2], *by_start[-most // 2 :])


def _table(timeline: Timeline, reference: Timeline | None) -> str:
    paused_s = timeline.duration_s - timeline.working_s
    figures = [
        ("duration", f"{timeline.duration_s:.4g} s"),
        *([("of the first's duration", _ratio(timeline, reference))] if reference else []),
        ("useful tokens/s without pauses", f"{timeline.tokens_per_s:,.0f}"),
        ("bubbles", f"{100 * timeline.bubble_share:.1f} %"),
        ("fill and drain", f"{timeline.fill_drain_s:.3g} s"),
        *([("pauses between microbatches", f"{paused_s:.3g} s")] if paused_s > 0 else []),
    ]
    tiles = "".join(f"<div class=tile><b>{value}</b><span>{name}</span></div>" for name, value in figures)
    rows = "".join(f"<tr><td>{escape(name)}<td>{seconds:.4g} s" for name, seconds in timeline.finish_s.items())
    stages = "".join(
        f"<tr><td>stage {stage}<td>{100 * share:.1f} %<td>{100 * idle:.1f} %"
        for stage, (share, idle) in enumerate(zip(timeline.bubble_shares, timeline.idle_share, strict=True))
    )
    return (
        f"<section><h2>{escape(timeline.title)}</h2><div class=tiles>{tiles}</div>"
        f"<details><summary>finish per adapter, idle time per stage</summary><div class=tables>"
        f"<table><tr><th>adapter<th>finishes at{rows}</table>"
        f"<table><tr><th>stage<th>bubbles<th>idle in all{stages}</table></div></details></section>"
    )


def _ratio(timeline: Timeline, reference: Timeline) -> str:
    return f"{timeline.working_s / reference.working_s:.3f}" if reference.working_s else "–"
