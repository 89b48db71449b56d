"""A timeline as one self-contained HTML page: zoom, drag, hover; no network, no libraries."""

from __future__ import annotations

import json
from html import escape

from scheduling.plots.colors import adapter_colors, adapter_names
from scheduling.timeline import Timeline

MOST_SPANS = 60_000  # about 2 MB of page; browsers stay quick


def timeline_html(timeline: Timeline, *, note: str = "", compare: Timeline | None = None) -> str:
    """Draws a timeline, or two under each other on one scale of time (predicted and measured, ours and another's).

    Args:
        note: a sentence under the title, for example what limits the plan.
        compare: a second timeline.
    """
    shown = [timeline] if compare is None else [timeline, compare]
    from importlib.resources import files  # slow to import, and few runs draw

    template = files("scheduling.plots").joinpath("timeline.html").read_text("utf-8")
    data = json.dumps(
        [_data(one, adapter_colors(*shown)) for one in shown], separators=(",", ":"), allow_nan=False
    ).replace("<", "\\u003c")
    page = {
        "@TITLE@": escape(timeline.title or "timeline") if compare is None else "Two timelines",
        "@NOTE@": escape(note),
        "@TABLES@": "\n".join(map(_table, shown)),
        "@DATA@": data,
    }
    for name, text in page.items():
        template = template.replace(name, text)
    return template


def _data(timeline: Timeline, colors: dict[str, str]) -> dict:
    names = adapter_names(timeline)
    index_of = {name: index for index, name in enumerate(names)}
    spans, cut = timeline.spans, 0
    if len(spans) > MOST_SPANS:
        ordered = sorted(spans, key=lambda span: span.start_s)
        cut = len(spans) - MOST_SPANS
        spans = (*ordered[: MOST_SPANS // 2], *ordered[-MOST_SPANS // 2 :])
    return {
        "title": timeline.title,
        "stages": timeline.num_stages,
        "duration": timeline.duration_s,
        "cut": cut,
        "names": names,
        "colors": [colors[name] for name in names],
        "spans": [
            [
                ("forward", "backward", "update").index(span.kind),
                span.stage,
                span.slot,
                round(span.start_s - timeline.start_s, 7),
                round(span.end_s - timeline.start_s, 7),
                [index_of[name] for name in span.adapters or timeline.slot_adapters.get(span.slot, ())],
            ]
            for span in spans
        ],
    }


def _table(timeline: Timeline) -> str:
    figures = [
        ("duration", f"{timeline.duration_s:.4g} s"),
        ("tokens", f"{timeline.tokens_per_s:,.0f} / s"),
        ("bubbles", f"{timeline.bubble_share:.1%}"),
        ("fill and drain", f"{timeline.fill_drain_s:.3g} s"),
    ]
    tiles = "".join(f"<div class=tile><b>{value}</b><span>{name}</span></div>" for name, value in figures)
    rows = "".join(f"<tr><td>{escape(name)}<td>{seconds:.4g} s" for name, seconds in timeline.finish_s.items())
    stages = "".join(
        f"<tr><td>stage {stage}<td>{share:.1%}<td>{idle:.1%}"
        for stage, (share, idle) in enumerate(zip(timeline.bubble_shares, timeline.idle_share, strict=True))
    )
    return (
        f"<section><h2>{escape(timeline.title)}</h2><div class=tiles>{tiles}</div>"
        f"<details><summary>finish per adapter, idle time per stage</summary><div class=tables>"
        f"<table><tr><th>adapter<th>finishes at{rows}</table>"
        f"<table><tr><th>stage<th>bubbles<th>idle in all{stages}</table></div></details></section>"
    )
