"""Draws the measured times of whole ops and decoder layers over the layer without LoRA, and prints the bytes table.

python benchmarks/kernel_plot.py
"""

from __future__ import annotations

import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
RUN = "kernels_h200_2026-11-22b"
COLOURS = {"frozen": "#9aa0a6", "xla_naive": "#e8a33d", "xla_wide": "#e8a33d", "ours": "#2a6fb0"}


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), width_ratios=(3, 2))
    draw_ops(left)
    draw_layers(right)
    figure.tight_layout()
    figure.savefig(RESULTS / "kernels_h200.png", dpi=110)
    print_bytes()


def records(section: str) -> list[dict]:
    lines = (RESULTS / f"{RUN}.{section}.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "error" not in record]


def draw_ops(axes) -> None:
    """Four adapters, rank 16, dropout 0.1; one group of bars per layer shape at 8192 tokens."""
    rows = [row for row in records("ops") if row["shape"].startswith("8192x")]
    wanted = (("xla_wide", 4, "XLA, one wide masked adapter"), ("pallas_mosaic_gpu", 4, "these kernels"))
    needed = {("frozen", 1, 0.0), *((variant, adapters, 0.1) for variant, adapters, _ in wanted)}
    made = {(row["shape"], row["variant"], row["adapters"], row["rate"]) for row in rows if row["rank"] == 16}
    shapes = [
        shape
        for shape in dict.fromkeys(row["shape"] for row in rows)
        if needed <= {r[1:] for r in made if r[0] == shape}
    ]
    for place, (variant, adapters, label) in enumerate(wanted):
        heights = [over_frozen(rows, shape, variant, adapters) for shape in shapes]
        centres = [i + 0.38 * (place - 0.5) for i in range(len(shapes))]
        colour = COLOURS["ours" if variant.startswith("pallas") else variant]
        bars = axes.bar(centres, [100 * (h - 1) for h in heights], 0.36, color=colour, label=label)
        axes.bar_label(bars, fmt="%.0f", fontsize=8)
    axes.set_xticks(range(len(shapes)), [shape.split("x")[1].replace("->", " → ") for shape in shapes], fontsize=8)
    axes.set_ylabel("time over the frozen layer, %")
    axes.set_title("One linear layer, forward + backward\n8192 tokens, 4 adapters, r 16, dropout 0.1", fontsize=9)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def over_frozen(rows: list[dict], shape: str, variant: str, adapters: int) -> float:
    time = {(r["variant"], r["adapters"], r["rank"], r["rate"]): r["p50_us"] for r in rows if r["shape"] == shape}
    return time[(variant, adapters, 16, 0.1)] / time[("frozen", 1, 16, 0.0)]


LAYERS = {  # variant, adapters, rate of dropout: what it says and its colour
    ("xla_naive", 1, 0.1): ("XLA, 1 adapter", "xla_naive"),
    ("xla_wide", 4, 0.1): ("XLA, wide, 4", "xla_wide"),
    ("ours", 1, 0.1): ("ours, 1", "ours"),
    ("ours", 4, 0.1): ("ours, 4", "ours"),
    ("xla_wide", 4, 0.0): ("XLA, wide, 4, p 0", "xla_wide"),
    ("ours", 4, 0.0): ("ours, 4, p 0", "ours"),
}


def draw_layers(axes) -> None:
    """A whole decoder layer of 8B shape, LoRA on all seven linears, over the frozen one compiled alike."""
    rows = [row for row in records("layer") if row["part"] == "layer 8B"]
    time = {(row["variant"], row["adapters"], row["rate"]): row["p50_us"] for row in rows}
    for place, (variant, (_, colour)) in enumerate(LAYERS.items()):
        bars = axes.bar(place, 100 * (time[variant] / time[("frozen", 1, 0.0)] - 1), 0.7, color=COLOURS[colour])
        axes.bar_label(bars, fmt="%.1f", fontsize=8)
    axes.set_xticks(range(len(LAYERS)), [text for text, _ in LAYERS.values()], fontsize=7, rotation=25, ha="right")
    axes.set_title(
        "One decoder layer of 8B shape, forward + backward\n8192 tokens, all seven linears, dropout 0.1 but for p 0",
        fontsize=9,
    )
    axes.spines[["top", "right"]].set_visible(False)


def print_bytes() -> None:
    """Counted bytes through device memory: the split graph against the plain form, nothing fused by a compiler."""
    sys.path.insert(0, str(ROOT))
    from pallas_kernels.cost import LayerCost

    for k, n in ((4096, 4096), (4096, 14336), (14336, 4096)):
        for dropout in (False, True):
            layer = LayerCost(tokens=8192, in_features=k, out_features=n, rank=16, dropout=dropout)
            own, plain = layer.total.bytes, layer.naive_bytes
            case = f"8192, {k} -> {n}, p {0.1 if dropout else 0:g}"
            print(f"| {case} | {plain / 1e6:.0f} MB | {own / 1e6:.0f} MB | {own / plain - 1:+.0%} |")


if __name__ == "__main__":
    main()
