"""Makes the tables and the plot of the kernel benchmark from its JSON rows.

    python -m benchmarks.kernel_report RUN/ops.jsonl RUN/layer.jsonl --out RUN/kernels

Writes OUT_ops.csv (whole ops), OUT_summary.csv (the default backend over all shapes), OUT_layers.csv (decoder layers
and siblings), OUT_bytes.csv (device-memory traffic) and OUT.png, each if there are rows for it. Times are medians with
the 20th and 80th percentile, forward and backward in one program. Ratios compare rows of the same file, which is one
run on one GPU; means are arithmetic. A row of a later file replaces the same row of an earlier file; `files` of the
summary names the sources. floor_us is the time of the frozen layer and of the split graph at an H200's ceilings
(`pallas_kernels/cost.py`). program is the default backend of a call; the `default` row is that of this backend.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

CONDITIONS = ("device", "jax", "jaxlib", "driver", "power_limit_w", "date", "file")
TIMES = ("p20_us", "p50_us", "p80_us")
OPS = ("tokens", "in_features", "out_features", "variant", "adapters", "rank", "dropout", *TIMES, "over_frozen")
OPS += ("best_xla_over_this", "program", "floor_us", *CONDITIONS)
SUMMARY = ("tokens", "rank", "dropout", "adapters", "shapes", "over_frozen_mean", "over_frozen_worst")
SUMMARY += ("plain_xla_over_this_mean", "best_xla_over_this_worst", "ragged_dot_over_this_mean")
SUMMARY += ("over_one_adapter_mean", "over_one_adapter_worst", "files")
LAYERS = ("part", "tokens", "variant", "adapters", "dropout", *TIMES, "over_frozen", "best_xla_over_this", *CONDITIONS)
BYTES = (
    "case",
    "tokens",
    "in_features",
    "out_features",
    "kernels",
    "read_mb",
    "written_mb",
    "mb",
    "of_naive",
    *CONDITIONS,
)
XLA = ("xla", "xla_naive", "xla_wide")
FROZEN = ("frozen", "frozen_default")
OURS = ("default", "pallas_mosaic_gpu", "pallas_triton")
COLOURS = {"frozen": "#9aa0a6", "xla_naive": "#e8a33d", "xla_wide": "#e8a33d", "ours": "#2a6fb0"}
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="prefix of the output files")
    options = parser.parse_args()
    for file in write(options.results, options.out):
        print(file)


def write(results: Iterable[Path], out: Path) -> list[Path]:
    """Writes the tables that have rows; returns the written files."""
    runs = [read(file) for file in results]
    ops = newest(row for run in runs for row in op_rows(run))
    layers = [row for run in runs for row in layer_rows(run)]
    moved = [row for run in runs for row in byte_rows(run)]
    tables = {
        "ops": (OPS, ops),
        "summary": (SUMMARY, summary_rows(ops)),
        "layers": (LAYERS, layers),
        "bytes": (BYTES, moved + counted_rows() if moved else []),
    }
    written = []
    for name, (columns, rows) in tables.items():
        if rows:
            written.append(out.with_name(f"{out.name}_{name}.csv"))
            with written[-1].open("w", newline="") as stream:
                writer = csv.DictWriter(stream, columns, extrasaction="ignore")
                writer.writeheader()
                writer.writerows(rows)
    if draw(ops, layers, out.with_name(f"{out.name}.png")):
        written.append(out.with_name(f"{out.name}.png"))
    return written


def read(file: Path) -> list[Row]:
    """Rows of one run, each with its conditions, without failed and skipped ones."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    conditions = {"file": f"{file.parent.name}/{file.name}"} | next(
        (line["conditions"] for line in lines if "conditions" in line), {}
    )
    return [conditions | line for line in lines if not {"error", "conditions", "planned", "skipped"} & line.keys()]


def op_rows(run: Sequence[Row]) -> list[Row]:
    """Rows of whole ops, relative to the frozen row of their shape."""
    rows = [row for row in run if "shape" in row and "variant" in row]
    result = []
    for row in rows:
        same = [other for other in rows if other["shape"] == row["shape"]]
        alike = [r for r in same if all(r[key] == row[key] for key in ("adapters", "rank", "rate"))]
        tokens, shape = row["shape"].split("x")
        num_in, num_out = shape.split("->")
        sizes = {"tokens": int(tokens), "in_features": int(num_in), "out_features": int(num_out)}
        result.append(row | sizes | {"dropout": row["rate"]} | ratios(row, same, alike) | floor(row, sizes))
    return result


def newest(rows: Iterable[Row]) -> list[Row]:
    """The last row of every device, shape, job and variant."""
    chosen = {(row.get("device"), *shape_of(row)[1:], *job_of(row), row["variant"]): row for row in rows}
    return sorted(chosen.values(), key=lambda row: (row["tokens"], row["in_features"], row["out_features"]))


def summary_rows(ops: Sequence[Row]) -> list[Row]:
    """Summary of the default backend by number of tokens and job, over all shapes."""
    times = {(shape_of(row), *job_of(row), row["variant"]): row["p50_us"] for row in ops}
    groups: dict[tuple, list[Row]] = {}
    for row in ops:
        if row["variant"] == "default" and "over_frozen" in row:
            groups.setdefault((row["tokens"], *job_of(row)), []).append(row)
    return [summarised(rows, times) for _, rows in sorted(groups.items())]


def summarised(rows: Sequence[Row], times: dict[tuple, float]) -> Row:
    """One line of the summary.

    Args:
        times: microseconds of every row, by run and shape, job and variant.
    """
    rank, rate, adapters = job_of(rows[0])
    plain = "xla_naive" if adapters == 1 else "xla_wide"
    over = {"plain_xla": [], "ragged_dot": [], "one": []}
    for row in rows:
        shape, p50_us = shape_of(row), row["p50_us"]
        for name, key in (("plain_xla", (*job_of(row), plain)), ("ragged_dot", (*job_of(row), "ragged_dot"))):
            over[name] += [times[shape, *key] / p50_us] if (shape, *key) in times else []
        alone = (shape, rank, rate, 1, "default")
        over["one"] += [p50_us / times[alone]] if adapters > 1 and alone in times else []
    frozen = [row["over_frozen"] for row in rows]
    best = [row["best_xla_over_this"] for row in rows if "best_xla_over_this" in row]
    numbers = {
        "over_frozen_mean": fmean(frozen), "over_frozen_worst": max(frozen),
        "plain_xla_over_this_mean": mean_of(over["plain_xla"]), "best_xla_over_this_worst": min(best, default=None),
        "ragged_dot_over_this_mean": mean_of(over["ragged_dot"]), "over_one_adapter_mean": mean_of(over["one"]),
        "over_one_adapter_worst": max(over["one"], default=None),
    }  # fmt: skip
    job = {"tokens": rows[0]["tokens"], "rank": rank, "dropout": rate, "adapters": adapters, "shapes": len(rows)}
    files = {"files": " ".join(sorted({row["file"] for row in rows}))}
    return job | {name: None if number is None else round(number, 3) for name, number in numbers.items()} | files


def mean_of(numbers: Sequence[float]) -> float | None:
    return fmean(numbers) if numbers else None


def shape_of(row: Row) -> tuple:
    return row["file"], row["tokens"], row["in_features"], row["out_features"]


def job_of(row: Row) -> tuple:
    return row["rank"], row["dropout"], row["adapters"]


def floor(row: Row, sizes: dict[str, int]) -> Row:
    """Floor of our forms at an H200's ceilings; other forms do other work."""
    from pallas_kernels.cost import H200, LayerCost

    if "H200" not in row.get("device", "") or row["variant"] not in (*OURS, *FROZEN):
        return {}
    layer = LayerCost(**sizes, rank=row["rank"], adapters=row["adapters"], dropout=row["rate"] > 0)
    seconds = layer.frozen_floor_s(H200) if row["variant"] in FROZEN else layer.floor_s(H200)
    return {"floor_us": round(1e6 * seconds, 1)}


def layer_rows(run: Sequence[Row]) -> list[Row]:
    rows = [row for row in run if "part" in row and "variant" in row]
    result = []
    for row in rows:
        same = [other for other in rows if other["part"] == row["part"]]
        alike = [r for r in same if all(r[key] == row[key] for key in ("adapters", "rate"))]
        result.append(row | {"dropout": row["rate"]} | ratios(row, same, alike))
    return result


def ratios(row: Row, same: Sequence[Row], alike: Sequence[Row]) -> Row:
    """Ratios to the frozen layer, and of the fastest XLA form of the same job to the row."""
    frozen = [other["p50_us"] for other in same if other["variant"] == "frozen"]
    xla = [other["p50_us"] for other in alike if other["variant"] in XLA]
    times = {key: round(row[key], 1) for key in TIMES}
    over = {"over_frozen": round(row["p50_us"] / frozen[0], 4)} if frozen else {}
    ours = row["variant"] not in (*XLA, *FROZEN)
    return times | over | ({"best_xla_over_this": round(min(xla) / row["p50_us"], 4)} if xla and ours else {})


def byte_rows(run: Sequence[Row]) -> list[Row]:
    """Device-memory traffic by hardware counters, relative to plain XLA."""
    rows = [row for row in run if "dram__bytes_read.sum" in row]
    naive = next((row["bytes"] for row in rows if row["case"].startswith("xla_naive")), None)
    return [
        row
        | {"in_features": row["features"], "out_features": row["features"]}
        | {
            "read_mb": round(row["dram__bytes_read.sum"] / 1e6, 1),
            "written_mb": round(row["dram__bytes_write.sum"] / 1e6, 1),
            "mb": round(row["bytes"] / 1e6, 1),
            "of_naive": round(row["bytes"] / naive, 4) if naive else None,
        }
        for row in rows
    ]


def counted_rows() -> list[Row]:
    """The same traffic counted from shapes, without compiler fusion, also for shapes that were not measured."""
    from pallas_kernels.cost import LayerCost

    rows = []
    for num_in, num_out in ((4096, 4096), (4096, 14336), (14336, 4096)):
        for rate in (0.0, 0.1):
            layer = LayerCost(tokens=8192, in_features=num_in, out_features=num_out, rank=16, dropout=rate > 0)
            sizes = {"tokens": 8192, "in_features": num_in, "out_features": num_out, "file": "pallas_kernels/cost.py"}
            for case, moved in (("xla_naive", layer.naive_bytes), ("ours", layer.total.bytes)):
                numbers = {"mb": round(moved / 1e6, 1), "of_naive": round(moved / layer.naive_bytes, 4)}
                rows.append(sizes | {"case": f"{case} A1 p{rate:g}, counted"} | numbers)
    return rows


def draw(ops: Sequence[Row], layers: Sequence[Row], file: Path) -> bool:
    """Plots one op and one decoder layer relative to their frozen forms; False if rows are missing."""
    ops = [row for row in ops if row["tokens"] == 8192 and "over_frozen" in row]
    layers = [row for row in layers if row["part"] == "layer 8B" and "over_frozen" in row]
    if not ops or not layers:
        return False
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), width_ratios=(3, 2))
    draw_ops(left, ops)
    draw_layers(right, layers)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    return True


def draw_ops(axes: Any, rows: Sequence[Row]) -> None:
    """Plots ops with four adapters, rank 16, dropout 0.1, by layer shape, at 8192 tokens."""
    wanted = (("xla_wide", "XLA, one wide masked adapter"), ("pallas_mosaic_gpu", "these kernels"))
    over = {
        (row["in_features"], row["out_features"], row["variant"]): row["over_frozen"]
        for row in rows
        if (row["adapters"], row["rank"], row["dropout"]) == (4, 16, 0.1)
    }
    shapes = [shape for shape in dict.fromkeys(key[:2] for key in over) if all((*shape, v) in over for v, _ in wanted)]
    for offset, (variant, label) in enumerate(wanted):
        centres = [i + 0.38 * (offset - 0.5) for i in range(len(shapes))]
        colour = COLOURS["ours" if variant.startswith("pallas") else variant]
        heights = [100 * (over[*shape, variant] - 1) for shape in shapes]
        axes.bar_label(axes.bar(centres, heights, 0.36, color=colour, label=label), fmt="%.0f", fontsize=8)
    axes.set_xticks(range(len(shapes)), [f"{k} → {n}" for k, n in shapes], fontsize=8)
    axes.set_ylabel("time over the frozen layer, %")
    axes.set_title("One linear layer, forward + backward\n8192 tokens, 4 adapters, r 16, dropout 0.1", fontsize=9)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


BARS = {  # variant, adapters, dropout rate: label and colour
    ("xla_naive", 1, 0.1): ("XLA, 1 adapter", "xla_naive"),
    ("xla_wide", 4, 0.1): ("XLA, wide, 4", "xla_wide"),
    ("ours", 1, 0.1): ("ours, 1", "ours"),
    ("ours", 4, 0.1): ("ours, 4", "ours"),
    ("xla_wide", 4, 0.0): ("XLA, wide, 4, p 0", "xla_wide"),
    ("ours", 4, 0.0): ("ours, 4, p 0", "ours"),
}


def draw_layers(axes: Any, rows: Sequence[Row]) -> None:
    """Plots a decoder layer of 8B shape with LoRA on all seven linears, relative to the frozen layer."""
    over = {(row["variant"], row["adapters"], row["dropout"]): row["over_frozen"] for row in rows}
    shown = [(key, *text) for key, text in BARS.items() if key in over]
    for bar_index, (key, _, colour) in enumerate(shown):
        bars = axes.bar(bar_index, 100 * (over[key] - 1), 0.7, color=COLOURS[colour])
        axes.bar_label(bars, fmt="%.1f", fontsize=8)
    axes.set_xticks(range(len(shown)), [text for _, text, _ in shown], fontsize=7, rotation=25, ha="right")
    axes.set_title(
        "One decoder layer of 8B shape, forward + backward\n8192 tokens, all seven linears, dropout 0.1 but for p 0",
        fontsize=9,
    )
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    sys.exit(main())
