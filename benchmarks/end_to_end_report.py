"""Makes the table, the plot and Perfetto traces of `end_to_end.py`'s results.

    python benchmarks/end_to_end_report.py results/end_to_end.jsonl --timelines results --out benchmarks/results

Published figures of LoRAFusion (H100-80GB, its authors' plot data) stand beside ours: other hardware, same jobs.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder: its scheduling.py is a benchmark

from scheduling import Pause, Span, Timeline, to_perfetto  # noqa: E402
from scheduling.comparison import host_wait_s  # noqa: E402

COLUMNS = (
    "model", "workload", "variant", "useful_tokens_per_s", "slots", "density", "noops", "slot_s", "bubbles",
    "simulated_over_measured", "host_s_per_slot", "host_wait_s", "compile_s", "peak_gb", "capacity_tokens",
    "global_batch", "adapters", "mesh", "layers_per_stage", "keep", "settings", "device", "jax", "jaxlib", "driver",
    "power_limit_w", "sm_mhz", "watts", "date", "run",
)  # fmt: skip
PUBLISHED = {  # useful tokens/s on H100-80GB
    ("8b", "single"): {"xsum": 12353, "cnn": 12232, "wiki": 9754, "mix": 10744, "het": 11271},
    ("8b", "LoRAFusion"): {"xsum": 14875, "cnn": 14595, "wiki": 13920, "mix": 14404, "het": 14158},
    ("32b", "FSDP"): {"xsum": 3022, "cnn": 3641, "wiki": 3942, "mix": 3544, "het": 3537},
    ("32b", "LoRAFusion"): {"xsum": 4969, "cnn": 4973, "wiki": 4947, "mix": 5121, "het": 4955},
    ("70b", "FSDP"): {"xsum": 2697, "cnn": 3476, "wiki": 3124, "mix": 3142, "het": 3110},
    ("70b", "LoRAFusion"): {"xsum": 4893, "cnn": 5183, "wiki": 5074, "mix": 5115, "het": 5136},
}
PUBLISHED_GPUS = {"8b": 1, "32b": 2, "70b": 4}
LABELS = {
    "ours": "ours", "ours_xla": "ours, XLA LoRA", "single_xla": "one at a time, XLA LoRA",
    "single": "one at a time, our kernels",
    "fsdp_xla": "FSDP, one at a time, XLA LoRA", "flush": "pipeline flushed at every step", "mlora": "mLoRA order",
    "frozen": "frozen base without LoRA (the floor)",
}  # fmt: skip
COLOURS = {
    "single_xla": "#e8a33d", "single": "#d9c17a", "fsdp_xla": "#c2703d", "flush": "#8b5e3c", "mlora": "#a89f68",
    "ours_xla": "#7fb3c8", "ours": "#1f6f8b", "frozen": "#9aa0a6",
}  # fmt: skip
ORDER = ("single_xla", "single", "fsdp_xla", "flush", "mlora", "ours_xla", "ours", "frozen")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--timelines", type=Path, help="folder with timeline_*.json")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.results.read_text().splitlines()]
    rows = without_repeated_peaks([row for row in rows if "useful_tokens_per_s" in row])
    write_csv(rows, options.out / f"{options.results.stem}.csv")
    draw(rows, options.out / f"{options.results.stem}.png")
    for file in sorted(options.timelines.glob("timeline_*.json")) if options.timelines else []:
        trace = to_perfetto(Timeline.from_json(file.read_text()))
        (options.out / f"{options.results.stem}_{file.stem}.perfetto.json").write_text(json.dumps(trace))
    for file in sorted(options.out.glob(f"{options.results.stem}_timeline_*.perfetto.json")):
        timeline = from_perfetto(json.loads(file.read_text()))
        late = f"{max(host_wait_s(timeline)) * 1e3:.1f} ms of {timeline.duration_s:.1f} s"
        print(f"{file.name}: the worst stage waited {late} for the host")


def from_perfetto(trace: dict[str, Any]) -> Timeline:
    """What `to_perfetto` was given, as far as waiting goes: of older runs only the trace is kept."""
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    spans, host = [], []
    for event in events:
        start, end, kind = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6, event["cat"]
        if kind == "host":  # "forward 3 to stage 1"
            kind, *_, stage = event["name"].split()
        elif kind != "pause":
            stage = event["tid"]
        else:
            continue
        adapters = tuple(event["args"]["adapters"].split(", "))
        own = host if event["cat"] == "host" else spans
        own.append(Span(kind, int(stage), event["args"]["slot"], start, end, adapters))
    pauses = (Pause(e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events if e["cat"] == "pause")
    stages = max(span.stage for span in spans) + 1
    return Timeline(spans=tuple(spans), num_stages=stages, host=tuple(host), pauses=tuple(pauses))


def devices_of(row: dict[str, Any]) -> int:
    return math.prod(row["mesh"].values())


def without_repeated_peaks(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leaves out peaks that are those of an earlier row of the same run, model and number of devices.

    A device knows the most that its process ever used. Rows used to show that, so a variant that needed less repeats
    the peak of one before it. Where two processes of a run had the same peak, by rounding, one of them is lost.
    """
    seen: dict[tuple, set[float]] = {}
    kept = []
    for row in rows:
        devices = devices_of(row)
        before = [seen.setdefault((row.get("run"), row["model"], devices, place), set()) for place in range(devices)]
        peaks = row["peak_gb"] or [None] * devices
        own = [None if peak in earlier else peak for peak, earlier in zip(peaks, before, strict=True)]
        for earlier, peak in zip(before, peaks, strict=True):
            earlier.add(peak)
        kept.append(row | {"peak_gb": own if any(own) else None})
    return kept


def write_csv(rows: list[dict[str, Any]], file: Path) -> None:
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(
            {key: json.dumps(v) if isinstance(v, list | dict) else v for key, v in row.items()} for row in rows
        )


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """A panel per model, on as many GPUs as was published (other rows are in the table); a bar per variant."""
    panels = [
        own
        for model, gpus in PUBLISHED_GPUS.items()
        if (own := [row for row in rows if row["model"] == model and devices_of(row) == gpus])
    ]
    if not panels:
        return
    groups = [len({row["workload"] for row in own}) for own in panels]
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(3 * len(panels) + 1.2 * sum(groups), 4.6),
        width_ratios=[2 + count for count in groups],
        squeeze=False,
        layout="constrained",
    )
    for axis, own in zip(axes[0], panels, strict=True):
        model = own[0]["model"]
        workloads = [name for name in ("xsum", "cnn", "wiki", "mix", "het") if any(r["workload"] == name for r in own)]
        variants = [name for name in ORDER if any(r["variant"] == name for r in own)]
        published = [(who, figures) for (which, who), figures in PUBLISHED.items() if which == model]
        width = 0.85 / (len(variants) + len(published))
        for place, name in enumerate(variants):
            found = {r["workload"]: r["useful_tokens_per_s"] for r in own if r["variant"] == name}
            heights = [found.get(w, 0) for w in workloads]
            drawn = bars(axis, place * width, width, heights, LABELS[name], COLOURS[name])
            if name in ("ours", "frozen"):
                axis.bar_label(drawn, [f"{height / 1000:.1f} k" if height else "" for height in heights], fontsize=7)
        for place, (who, figures) in enumerate(published, start=len(variants)):
            heights = [figures[w] for w in workloads]
            hatch = "//" if who == "LoRAFusion" else "xx"
            bars(axis, place * width, width, heights, f"{who}, published, H100", "#dddddd", hatch=hatch)
        axis.set_xticks([n + 0.42 for n in range(len(workloads))], workloads)
        axis.set_title(f"{model.upper()} on {PUBLISHED_GPUS[model]} × {own[0]['device'].removeprefix('NVIDIA ')}")
        axis.set_ylabel("useful tokens/s")
        axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2)
    figure.savefig(file, dpi=130)


def bars(axis: Any, start: float, width: float, heights: list[float], label: str, colour: str, hatch: str = "") -> Any:
    places = [n + start for n in range(len(heights))]
    return axis.bar(places, heights, width, align="edge", label=label, color=colour, hatch=hatch, edgecolor="white")


if __name__ == "__main__":
    main()
