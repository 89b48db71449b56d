"""A simulated run as one self-contained HTML page: jobs on GPUs over time, and the decisions. No libraries."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from scheduling.online.result import ClusterResult

# Okabe and Ito's palette, distinguishable with every kind of colour vision
COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c00", "#7f5ab6")
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
    from importlib.resources import files  # slow to import and rarely needed

    template = files("scheduling.online").joinpath("replay.html").read_text("utf-8")
    bases = sorted({job.base_name for result in results for job in result.jobs})
    data = {
        "bases": bases,
        "colors": [COLORS[i % len(COLORS)] for i in range(len(bases))],
        "runs": [_run(result, bases) for result in results],
    }
    page = {
        "@TITLE@": escape(title),
        "@TABLE@": _table(results),
        "@DATA@": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    for name, text in page.items():
        template = template.replace(name, text)
    return template


def _run(result: ClusterResult, bases: list[str]) -> dict[str, Any]:
    used = {span.worker for span in result.accounts.groups}
    workers = sorted(used, key=lambda name: (len(name), name))  # host2 before host10
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
        return f"{value:.0%}"
    return f"{value:.0f}" if name in ("preemptions", "refusals") else f"{value:.2f}"
