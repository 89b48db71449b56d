"""Completion times of several policies as a static SVG picture."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from scheduling.online.replay import COLORS
from scheduling.online.result import ClusterResult

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
        parts.append(f'<text x="{LEFT - 8}" y="{y(share) + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    for seconds, name in TICKS:
        if low <= np.log(seconds) <= high:
            parts.append(f'<text x="{x(seconds):.1f}" y="{floor + 18}" text-anchor="middle">{name}</text>')
    for number, (policy, completion_s) in enumerate(times.items()):
        color = COLORS[number % len(COLORS)]
        kept = (
            completion_s
            if len(completion_s) <= 400
            else completion_s[np.linspace(0, len(completion_s) - 1, 400).astype(int)]
        )
        shares = (np.searchsorted(completion_s, kept, side="right")) / len(completion_s)
        line = " ".join(f"{x(t):.1f},{y(s):.1f}" for t, s in zip(kept, shares, strict=True))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        at = LEFT + number * 110
        parts.append(f'<rect x="{at}" y="{HEIGHT - 18}" width="12" height="12" rx="3" fill="{color}"/>')
        parts.append(f'<text x="{at + 17}" y="{HEIGHT - 8}">{escape(policy)}</text>')
    return "\n".join([*parts, "</svg>"])
