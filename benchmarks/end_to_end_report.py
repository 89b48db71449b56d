"""Makes the table, the plot and Perfetto traces from the results of `end_to_end.py`.

    python -m benchmarks.end_to_end_report RUN/end_to_end.jsonl --timelines RUN --out RUN

`end_to_end.py` calls it at its end; run it by hand for results of several runs.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scheduling import Pause, Span, Timeline, to_perfetto
from scheduling.comparison import host_wait_s

COLUMNS = (
    "model", "workload", "variant", "useful_tokens_per_s", "slots", "density", "noops", "slot_s", "bubbles",
    "simulated_over_measured", "host_s_per_slot", "host_wait_s", "compile_s", "peak_gb", "capacity_tokens",
    "global_batch", "adapters", "mesh", "layers_per_stage", "keep", "settings", "device", "jax", "jaxlib", "driver",
    "power_limit_w", "sm_mhz", "watts", "date", "run",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--timelines", type=Path, help="folder with timeline_*.json")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    report(options.results, options.timelines, options.out)


def report(results: Path, timelines: Path | None, out: Path) -> None:
    """Writes table, plot (if matplotlib is installed) and traces, with the name of the results."""
    for file in sorted(timelines.glob("timeline_*.json")) if timelines else []:
        trace = to_perfetto(Timeline.from_json(file.read_text()))
        (out / f"{results.stem}_{file.stem}.perfetto.json").write_text(json.dumps(trace))
    for file in sorted(out.glob(f"{results.stem}_timeline_*.perfetto.json")):
        timeline = from_perfetto(json.loads(file.read_text()))
        late = f"{max(host_wait_s(timeline)) * 1e3:.1f} ms of {timeline.duration_s:.1f} s"
        print(f"{file.name}: the worst stage waited {late} for the host")
    write(results, out / results.stem)


def write(results: Path, out: Path) -> list[Path]:
    """Writes OUT.csv and OUT.png; returns the written files."""
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    rows = without_repeated_peaks([row for row in rows if "useful_tokens_per_s" in row])
    table, plot = out.with_name(f"{out.name}.csv"), out.with_name(f"{out.name}.png")
    write_csv(rows, table)
    if find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed")
        return [table]
    from benchmarks.end_to_end_plot import draw

    draw(rows, plot)
    return [table, plot]


def from_perfetto(trace: dict[str, Any]) -> Timeline:
    """Reads a timeline from a Perfetto trace, as far as host wait needs it; old runs have only the trace."""
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
        target = host if event["cat"] == "host" else spans
        target.append(Span(kind, int(stage), event["args"]["slot"], start, end, adapters))
    pauses = (Pause(e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events if e["cat"] == "pause")
    stages = max(span.stage for span in spans) + 1
    return Timeline(spans=tuple(spans), num_stages=stages, host=tuple(host), pauses=tuple(pauses))


def without_repeated_peaks(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Removes peaks that repeat those of an earlier row of the same run, model and number of devices.

    A device reports the peak of its process, and old rows contain it, so a variant that needed less repeats the peak of
    an earlier one. If two processes of a run have the same rounded peak, one of them is lost.
    """
    seen: dict[tuple, set[float]] = {}
    kept = []
    for row in rows:
        devices = math.prod(row["mesh"].values())
        before = [seen.setdefault((row.get("run"), row["model"], devices, device), set()) for device in range(devices)]
        peaks = row["peak_gb"] or [None] * devices
        new_peaks = [None if peak in earlier else peak for peak, earlier in zip(peaks, before, strict=True)]
        for earlier, peak in zip(before, peaks, strict=True):
            earlier.add(peak)
        kept.append(row | {"peak_gb": new_peaks if any(new_peaks) else None})
    return kept


def write_csv(rows: list[dict[str, Any]], file: Path) -> None:
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(
            {key: json.dumps(v) if isinstance(v, list | dict) else v for key, v in row.items()} for row in rows
        )


if __name__ == "__main__":
    main()
