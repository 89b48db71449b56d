"""Plots of the planner benchmark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

Rows = list[dict]


def draw(part: str, rows: Rows, folder: Path) -> None:
    """Draws a part of the benchmark; does nothing for parts without a plot."""
    if part not in PLOTS:
        return
    figure, axes = plt.subplots(figsize=(9, 4.2), layout="constrained")
    PLOTS[part](axes, rows)
    axes.legend()
    figure.savefig(folder / f"{part}.png", dpi=110)
    plt.close(figure)


def draw_workloads(axes: Axes, rows: Rows) -> None:
    places = np.arange(len(rows))
    series = (("reference_slots", "reference solver"), ("first_plan_slots", "first plan"), ("slots", "plan"))
    for shift, (key, label) in zip((-0.27, 0, 0.27), series, strict=True):
        axes.bar(places + shift, [row[key] / row["bound"] for row in rows], 0.27, label=label)
    axes.set_xticks(places, [f"{row['workload']}\ng{row['global_batch']}" for row in rows])
    axes.set(ylim=(0.95, 1.65), ylabel="slots / plain lower bound", title="Shared workloads, capacity 6144, 4 stages")


def draw_growth(axes: Axes, rows: Rows) -> None:
    for key, label in (("us_per_sample", "first plan, wall"), ("cpu_us_per_sample", "first plan, processor time")):
        axes.loglog([row["samples"] for row in rows], [row[key] for row in rows], "o-", label=label)
    axes.set(xlabel="samples", ylabel="µs per sample", ylim=(5, 100), title="Planning time per sample")


def draw_heldout(axes: Axes, rows: Rows) -> None:
    for size in dict.fromkeys(row["global_batch"] for row in rows):
        ratios = sorted(row["slots"] / row["bound"] for row in rows if row["global_batch"] == size)
        axes.plot(np.linspace(0, 100, len(ratios)), ratios, label=f"global batch {size}")
    axes.set(xlabel="% of workloads", ylabel="slots / plain lower bound", title="Held-out workloads")


def draw_bubbles(axes: Axes, rows: Rows) -> None:
    """Plots idle time including fill and drain."""
    orders = list(dict.fromkeys(row["order"] for row in rows))
    names = list(dict.fromkeys(row["workload"] for row in rows))
    width = 0.85 / len(orders)
    for index, order in enumerate(orders):
        shares = [100 * row["idle_share"] for row in rows if row["order"] == order]
        axes.bar(np.arange(len(names)) + (index - len(orders) / 2 + 0.5) * width, shares, width, label=order)
    axes.set_xticks(np.arange(len(names)), names)
    axes.set(ylabel="predicted idle time, %", title="4 stages, 4 adapters, global batch 16", ylim=(0, 110))


PLOTS: dict[str, Callable[[Axes, Rows], None]] = {
    "workloads": draw_workloads, "growth": draw_growth, "heldout": draw_heldout, "bubbles": draw_bubbles,
}  # fmt: skip
