"""Plots the results of `end_to_end.py`: a panel per model, a bar per variant; published figures are hatched.

Published figures are those of LoRAFusion (Zhu et al., EuroSys 2026) and its baselines, from its authors' plot data:
H100-80GB, four adapters of rank 16 with dropout 0.1, random tokens of the same length distributions, global batches of
8 (16 at 70B). The jobs are the same, the hardware is not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.end_to_end_rows import LABELS, WORKLOADS, Row, devices_of, newest

PUBLISHED = {  # useful tokens/s by workload, in the order above
    "8b": {
        "one adapter at a time": (12353, 12232, 9754, 10744, 11271),
        "LoRAFusion": (14875, 14595, 13920, 14404, 14158),
    },
    "32b": {
        "Megatron FSDP": (3022, 3641, 3942, 3544, 3537),
        "Megatron PP": (2882, 3247, 3389, 3122, 3160),
        "mLoRA schedule": (4233, 4348, 4084, 4100, 4020),
        "LoRAFusion": (4969, 4973, 4947, 5121, 4955),
    },
    "70b": {
        "Megatron FSDP": (2697, 3476, 3124, 3142, 3110),
        "Megatron PP": (2337, 2568, 2985, 2491, 2595),
        "mLoRA schedule": (3902, 3989, 3868, 3746, 3517),
        "LoRAFusion": (4893, 5183, 5074, 5115, 5136),
    },
}
PUBLISHED_ON = "H100-80GB"
PUBLISHED_GPUS = {"8b": 1, "32b": 2, "70b": 4}
PUBLISHED_BATCH = {"8b": 8, "32b": 8, "70b": 16}
COLOURS = {
    "single_xla": "#e8a33d", "single": "#d9c17a", "fsdp_xla": "#c2703d", "fsdp": "#a9805f", "flush": "#8b5e3c",
    "mlora": "#7d8f53", "ours_xla": "#7fb3c8", "ours": "#1f6f8b", "frozen": "#9aa0a6",
    "one adapter at a time": "#e8a33d", "Megatron FSDP": "#c2703d", "Megatron PP": "#8b5e3c",
    "mLoRA schedule": "#7d8f53", "LoRAFusion": "#1f6f8b",
}  # fmt: skip
MODELS = ("tiny", *PUBLISHED, "gpt-oss-20b", "gemma-4-e2b", "qwen3-235b-a22b")
BAR_INCHES = 0.34
LEGEND_INCHES = 2.9  # of a column
GAP = 0.9  # between workloads, in bars


class Bar(NamedTuple):
    """One bar of a workload."""

    name: str
    tokens_per_s: float
    device: str
    published: bool = False

    @property
    def label(self) -> str:
        return f"{self.name}, published ({self.device})" if self.published else f"{LABELS[self.name]} ({self.device})"


def comparable(rows: list[Row], model: str) -> list[Row]:
    """Rows of a model with the published number of GPUs and global batch, or else the smallest ones."""
    matching = [row for row in rows if row["model"] == model]
    gpus = {devices_of(row) for row in matching}
    wanted = PUBLISHED_GPUS[model] if PUBLISHED_GPUS.get(model) in gpus else min(gpus)
    matching = [row for row in matching if devices_of(row) == wanted]
    batches = {row["global_batch"] for row in matching}
    wanted = PUBLISHED_BATCH[model] if PUBLISHED_BATCH.get(model) in batches else min(batches)
    return [row for row in matching if row["global_batch"] == wanted]


def groups_of(model_rows: list[Row], model: str) -> dict[str, list[Bar]]:
    """Bars of each workload: ours, then the published ones with the same number of GPUs."""
    chosen = newest(model_rows)
    published = PUBLISHED[model] if devices_of(model_rows[0]) == PUBLISHED_GPUS.get(model) else {}
    groups = {}
    for index, workload in enumerate(WORKLOADS):
        rows = [(name, chosen[workload, name]) for name in LABELS if (workload, name) in chosen]
        bars = [Bar(name, row["useful_tokens_per_s"], row["device"].removeprefix("NVIDIA ")) for name, row in rows]
        if bars:
            groups[workload] = bars + [Bar(who, rates[index], PUBLISHED_ON, True) for who, rates in published.items()]
    return groups


def draw(rows: list[Row], file: Path) -> None:
    """Draws a panel per model. Rows with other numbers of GPUs or global batches are only in the table."""
    models = sorted({row["model"] for row in rows}, key=MODELS.index)
    panels = {model: groups for model in models if (groups := groups_of(comparable(rows, model), model))}
    if not panels:
        return
    widths = [sum(len(bars) + GAP for bars in groups.values()) for groups in panels.values()]
    width = max(BAR_INCHES * sum(widths) + 0.9 * len(panels), 6)
    figure = Figure(figsize=(width, 5), layout="constrained")
    axes = figure.subplots(1, len(panels), width_ratios=widths, squeeze=False)[0]
    kinds: dict[Bar, Any] = {}
    for axis, (model, groups) in zip(axes, panels.items(), strict=True):
        kinds |= panel(axis, groups)
        row = comparable(rows, model)[0]
        axis.set_title(f"{model.upper()} on {devices_of(row)} × {row['device'].removeprefix('NVIDIA ')}")
    axes[0].set_ylabel("useful tokens/s, thousands")
    order = sorted(kinds, key=lambda bar: list(COLOURS).index(bar.name))
    figure.legend(
        [kinds[bar] for bar in order], [bar.label for bar in order],
        loc="outside lower center", ncols=min(4, int(width / LEGEND_INCHES)),
        fontsize=8, frameon=False, handleheight=1.2,
    )  # fmt: skip
    figure.savefig(file, dpi=130)


def panel(axis: Axes, groups: dict[str, list[Bar]]) -> dict[Bar, Any]:
    """Draws the bars of a model, grouped by workload; returns one of each kind for the legend."""
    kinds, start, ticks = {}, 0.0, []
    for bars in groups.values():
        for offset, bar in enumerate(bars, start=1):
            face, edge = ("white", COLOURS[bar.name]) if bar.published else (COLOURS[bar.name], "white")
            drawn = axis.bar(
                start + offset, bar.tokens_per_s / 1e3, 0.92, color=face, edgecolor=edge, hatch="////" * bar.published
            )
            axis.bar_label(drawn, fmt="%.1f", fontsize=7.5, padding=1.5)
            kinds[bar._replace(tokens_per_s=0.0)] = drawn
        ticks.append(start + (len(bars) + 1) / 2)
        start += len(bars) + GAP
    axis.set_xticks(ticks, list(groups))
    axis.tick_params(axis="x", length=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(x=0.02, y=0.08)
    return kinds
