"""Simulated runs as pictures: one self-contained HTML page of jobs on GPUs over time, and completion times as SVG."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from scheduling.online.result import ClusterResult
from scheduling.plots.colors import palette
from scheduling.plots.html import page_of

MOST_DECISIONS = 20_000
COLUMNS = (
    ("mean completion", "jct_mean_s"),
    ("median", "jct_p50_s"),
    ("p95", "jct_p95_s"),
    ("p99", "jct_p99_s"),
    ("makespan", "makespan_s"),
    ("busy while jobs wait", "utilisation"),
    ("slowdown p99", "slowdown_p99"),
    ("fairness", "fairness"),
    ("preemptions", "preemptions"),
    ("refused", "refusals"),
)


def replay_html(results: Sequence[ClusterResult], *, title: str = "Cluster replay") -> str:
    """Draws one or more runs of the same jobs: a row per GPU, a colour per base, the queue, and the decisions."""
    bases = sorted({job.base_name for result in results for job in result.jobs})
    data = {
        "bases": bases,
        "colors": palette(len(bases)),
        "runs": [_run(result, bases) for result in results],
    }
    fields = {
        "@TITLE@": escape(title),
        "@TABLE@": _table(results),
        "@DATA@": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    return page_of("scheduling.online", "replay.html", fields)


def _run(result: ClusterResult, bases: list[str]) -> dict[str, Any]:
    worker_names = {span.worker for span in result.accounts.groups}
    workers = sorted(worker_names, key=lambda name: (len(name), name))  # host2 before host10
    rows = {worker: row for row, worker in enumerate(workers)}
    width = max((gpu + 1 for span in result.accounts.groups for gpu in span.gpus), default=1)
    names = [job.name for job in result.jobs]
    index = {name: number for number, name in enumerate(names)}
    return {
        "policy": result.policy,
        "workers": workers,
        "gpus": width,
        "end": max(result.finish_s.values(), default=1.0),
        "jobs": names,
        "spans": [
            [
                rows[span.worker],
                span.gpus[0],
                len(span.gpus),
                bases.index(span.base),
                round(span.start_s),
                round(span.ready_s),
                round(span.end_s),
                round(span.density, 2),
                round(span.tokens_per_s),
                [index[name] for name in span.members],
            ]
            for span in result.accounts.groups
            if span.members
        ],
        "queue": _queue(result),
        "decisions": [[round(time_s), text] for time_s, text in result.decisions[:MOST_DECISIONS]],
    }


def _queue(result: ClusterResult, points: int = 600) -> list[int]:
    """Number of jobs that wait for their first start, at evenly spaced times."""
    end = max(result.finish_s.values(), default=1.0)
    changes = sorted(
        [(job.arrival_s, 1) for job in result.jobs] + [(start_s, -1) for start_s in result.start_s.values()]
    )
    counts: list[int] = []
    waiting, position = 0, 0
    for point in range(points):
        while position < len(changes) and changes[position][0] <= end * point / points:
            waiting += changes[position][1]
            position += 1
        counts.append(waiting)
    return counts


def _table(results: Sequence[ClusterResult]) -> str:
    head = "".join(f"<th>{escape(name)}" for name, _ in COLUMNS)
    rows = ""
    for result in results:
        summary = result.summary()
        cells = "".join(f"<td>{format_figure(name, summary[name])}" for _, name in COLUMNS)
        rows += f"<tr><th>{escape(result.policy)}{cells}"
    return f"<table><tr><th>policy{head}{rows}</table>"


def format_figure(name: str, value: float) -> str:
    """Formats a figure of `ClusterResult.summary`."""
    if name == "tokens_per_s":
        return f"{value:,.0f}"
    if name.endswith("_s"):
        return f"{value / 3600:.2f} h" if value >= 3600 else f"{value / 60:.1f} min"
    if name in ("utilisation", "overall_utilisation", "deadlines_met"):
        return f"{100 * value:.0f} %"
    return f"{value:.0f}" if name in ("preemptions", "refusals") else f"{value:.2f}"


WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 760, 380, 56, 34, 46
TICKS = ((60, "1 min"), (600, "10 min"), (3600, "1 h"), (6 * 3600, "6 h"), (86400, "1 d"), (5 * 86400, "5 d"))


def completion_svg(results: Sequence[ClusterResult]) -> str:
    """Draws the share of jobs that are complete by time since arrival, one curve per policy."""
    times = {result.policy: np.sort([*result.jct_s.values()]) for result in results}
    everything = np.concatenate([*times.values(), [60.0, 3600.0]])
    low, high = np.log(max(1.0, everything.min())), np.log(everything.max())
    right, floor = WIDTH - 16, HEIGHT - BOTTOM

    def x(seconds: float) -> float:
        return LEFT + (np.log(max(1.0, seconds)) - low) / (high - low) * (right - LEFT)

    def y(share: float) -> float:
        return floor - share * (floor - TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        ' font-family="system-ui, sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="18" font-size="13">share of jobs complete, by time since their arrival</text>',
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{y(share):.1f}" y2="{y(share):.1f}" stroke="#e3e6ea"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(share) + 4:.1f}" text-anchor="end">{100 * share:.0f} %</text>')
    for seconds, name in TICKS:
        if low <= np.log(seconds) <= high:
            parts.append(f'<text x="{x(seconds):.1f}" y="{floor + 18}" text-anchor="middle">{name}</text>')
    for number, ((policy, completion_s), color) in enumerate(zip(times.items(), palette(len(times)), strict=True)):
        points_s = (
            completion_s
            if len(completion_s) <= 400
            else completion_s[np.linspace(0, len(completion_s) - 1, 400).astype(int)]
        )
        shares = (np.searchsorted(completion_s, points_s, side="right")) / len(completion_s)
        line = " ".join(f"{x(t):.1f},{y(s):.1f}" for t, s in zip(points_s, shares, strict=True))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        at = LEFT + number * 110
        parts.append(f'<rect x="{at}" y="{HEIGHT - 18}" width="12" height="12" rx="3" fill="{color}"/>')
        parts.append(f'<text x="{at + 17}" y="{HEIGHT - 8}">{escape(policy)}</text>')
    return "\n".join([*parts, "</svg>"])
