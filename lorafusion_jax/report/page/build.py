"""Builds the report page of one or more runs."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.log_file import read_rows
from lorafusion_jax.report.console import LARGEST, MOST_LINES
from lorafusion_jax.report.format import count, duration, percent
from lorafusion_jax.report.measured import read_timeline, reference_share
from lorafusion_jax.report.page.collect import (
    differing_settings,
    points_of_curve,
    read_curves,
    read_texts,
    thin,
    tokens_trained,
)
from lorafusion_jax.report.ranking import OUT_OF_RACE, Measure, measures_of
from scheduling import Timeline
from scheduling.plots.colors import colors_of
from scheduling.plots.html import page_of
from scheduling.plots.svg import timeline_svg

BEST_SHOWN = 6  # of a crowd, beside the worst
SECONDARY = ("seed",)  # differs wherever something is swept, and says nothing of a point
TIMELINE_SLOTS = 40  # of a session that are drawn: more would be too narrow to see
FULL_DENSITY, LOW_WAIT, LOW_IDLE = 0.9, 0.05, 0.05  # what limits speed is said beyond these
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRun:
    """A run folder and the numbers of its status."""

    folder: Path
    numbers: Mapping[str, Any]


def report_page(runs: Sequence[ReportedRun], *, refresh_s: int | None = None) -> str:
    """Builds one self-contained page: no network, no libraries.

    Args:
        runs: shown over each other; adapters of several runs are named run/adapter.
        refresh_s: the page loads itself again after so many seconds (None: never).
    """
    page = files("lorafusion_jax.report.page")
    names = _run_names(runs)
    points = points_of_curve(sum(len(run.numbers["adapters"]) for run in runs))
    run_rows = [_describe_run(run, name, points) for run, name in zip(runs, names, strict=True)]
    adapters = [
        adapter | {"run": name, "label": f"{name}/{adapter['name']}" if len(runs) > 1 else adapter["name"]}
        for name, run in zip(names, run_rows, strict=True)
        for adapter in run.pop("adapters")
    ]
    color_by_label = colors_of(adapter["label"] for adapter in adapters)
    for adapter in adapters:
        adapter["color"] = color_by_label[adapter["label"]]
    rankings = rank_adapters(adapters)
    crowd = _crowd(adapters, best_shown(rankings))
    data = {"runs": run_rows, "adapters": adapters, "several": len(runs) > 1, "crowd": crowd, "rankings": rankings}
    shown = {adapter["label"] for adapter in adapters if adapter.get("is_best")} | set(crowd["shown"] if crowd else ())
    fields = {
        "@TITLE@": escape(" · ".join(names)),
        "@REFRESH@": f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else "",
        "@STYLE@": page.joinpath("report.css").read_text("utf-8"),
        "@SCRIPT@": page.joinpath("report.js").read_text("utf-8"),
        "@TIMELINES@": "".join(
            _timeline(run.folder, name, [entry for entry in adapters if entry["run"] == name], shown)
            for run, name in zip(runs, names, strict=True)
        ),
        "@DATA@": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    return page_of("lorafusion_jax.report.page", "report.html", fields)


def _run_names(runs: Sequence[ReportedRun]) -> list[str]:
    """The folders' names, or their paths where two folders have one name."""
    short = [run.folder.resolve().name for run in runs]
    return short if len(set(short)) == len(short) else [str(run.folder) for run in runs]


def _describe_run(run: ReportedRun, name: str, points: int) -> dict[str, Any]:
    numbers, config = run.numbers, RunFolder(run.folder).read_config()
    curves = read_curves(run.folder, list(numbers["adapters"]))
    texts = read_texts(run.folder)
    tokens = tokens_trained(run.folder, numbers["slot"])
    speed, seconds = numbers["throughput"] or {}, _trained_seconds(run)
    settings = differing_settings(config)
    record = RunFolder(run.folder).read_record()
    held_out, measures = record.get("eval", {}), measures_of(record)
    total = sum(tokens.values()) or 1
    adapters = [
        {
            "name": adapter,
            "status": row["status"],
            "step": row["step"],
            "steps": row["steps"],
            "reason": row["reason"],
            "stopped": numbers["early_stops"].get(adapter, ""),
            "objective": config.adapter(adapter).objective.chosen.name,
            "compared": (held_out.get(adapter), measure),
            "before": row["held_out_before"],
            "after": row["held_out_after"],
            "best": curves[adapter].best(measure),
            "best_by": measure.label,
            "rises": measure.rises,
            "train": curves[adapter].train_loss,
            "tokens": tokens.get(adapter, 0),
            "texts": texts.get(adapter, []),
            "seconds": None if seconds is None else seconds * tokens.get(adapter, 0) / total,
            "series": {key: thin(curve, points) for key, curve in curves[adapter].series.items()},
            "settings": {key: values.get(adapter) for key, values in settings.items()},
        }
        for adapter, row in numbers["adapters"].items()
        for measure in [measures.get(adapter, Measure())]
    ]
    return {
        "name": name,
        "state": numbers["state"],
        "reason": numbers["reason"],
        "tiles": _tiles(numbers, speed, seconds),
        "limits": _limits(run.folder, speed, seconds),
        "adapters": adapters,
    }


def _tiles(numbers: Mapping[str, Any], speed: Mapping[str, Any], seconds: float | None) -> list[tuple[str, str]]:
    mesh = {key: size for key, size in (numbers["mesh"] or {}).items() if size > 1}
    tiles = [("state", numbers["state"]), ("microbatches", f"{numbers['slot']} of {numbers['slots']}")]
    if speed:
        now_or_median = "now" if numbers["state"] == "running" else "median"
        tiles.append((f"useful tokens/s with pauses, {now_or_median}", count(speed["useful_tokens_per_s"])))
    if seconds is not None:
        tiles.append(("training", duration(seconds)))
    if numbers["eta_s"] is not None and numbers["state"] == "running":
        tiles.append(("left", duration(numbers["eta_s"])))
    if numbers["peak_bytes"]:
        tiles.append(("peak memory", f"{numbers['peak_bytes'] / GIB:.1f} GiB"))
    if numbers["device"]:
        tiles.append(("device", numbers["device"]))
    return [*tiles, ("mesh", " × ".join(f"{key} {size}" for key, size in mesh.items()) or "one device")]


def _trained_seconds(run: ReportedRun) -> float | None:
    """Seconds of slots: of a finished run as it says, of another from its rate."""
    events = read_rows(run.folder / "events.jsonl")
    totals = [event["seconds"] for event in events if event["kind"] == "finished"]
    if totals:
        return totals[-1]
    slot_s = (run.numbers["throughput"] or {}).get("slot_seconds")
    return None if slot_s is None else slot_s * run.numbers["slot"]


def _limits(folder: Path, speed: Mapping[str, Any], seconds: float | None) -> list[str]:
    """Sentences on what costs the run time, the largest first."""
    events = read_rows(folder / "events.jsonl")
    start = next((event for event in reversed(events) if event["kind"] == "started"), {})
    limits: list[tuple[float, str]] = []
    if (density := start.get("density")) is not None and density < FULL_DENSITY:
        why = "microbatches are {} full; another batch.capacity_tokens or more adapters may fill them better"
        limits.append((1 - density, why.format(percent(density))))
    if (pause_share := speed.get("paused_share")) and pause_share > LOW_WAIT:
        parts = ", ".join(f"{label} {duration(s)}" for label, s in (speed.get("paused_s") or {}).items())
        limits.append((pause_share, f"training waited for {percent(pause_share)} of the time ({parts})"))
    if references := reference_share(events, seconds):
        limits.append(references)
    try:
        timeline = read_timeline(folder)
    except LoraFusionError:
        timeline = None
    if timeline is not None and timeline.num_stages > 1 and timeline.bubble_share > LOW_IDLE:
        limits.append((timeline.bubble_share, f"stages were idle for {percent(timeline.bubble_share)} of the time"))
    return [text for _, text in sorted(limits, reverse=True)]


def _crowd(adapters: Sequence[dict[str, Any]], best: Sequence[str] = ()) -> dict[str, Any] | None:
    """What the page says of adapters that are too many for a row each, and which it shows; None for few.

    Args:
        best: those that it shows beside the worst.
    """
    if len(adapters) <= MOST_LINES:
        return None

    def result(adapter: dict[str, Any]) -> float:
        losses = (adapter["after"], adapter["train"])
        return next((loss for loss in losses if loss is not None), float("-inf"))

    worst = sorted(adapters, key=lambda adapter: (adapter["status"] != "failed", -result(adapter)))[:LARGEST]
    the_best = f"the {len(best)} best and " if best else ""
    lines = [f"{len(adapters)} adapters; {the_best}the {LARGEST} worst are shown, failed ones first."]
    for name, key in (("loss, last 10 % of steps", "train"), ("held-out loss now", "after"), ("tokens", "tokens")):
        if values := [adapter[key] for adapter in adapters if adapter[key] is not None]:
            least, low, median, high, greatest = np.quantile(values, (0, 0.1, 0.5, 0.9, 1))
            lines.append(
                f"{name}: median {median:z.4g}, 10 % {low:z.4g}, 90 % {high:z.4g}, from {least:z.4g} to {greatest:z.4g}"
            )
    return {"lines": lines, "shown": list(dict.fromkeys([*best, *(adapter["label"] for adapter in worst)]))}


def _timeline(folder: Path, name: str, adapters: Sequence[Mapping[str, Any]], shown: Collection[str]) -> str:
    """The newest slots of the last session as a drawing; empty where a run has not ended yet.

    Args:
        adapters: of the run.
        shown: labels of those that the page shows where they are many.
    """
    try:
        timeline: Timeline = read_timeline(folder)
    except LoraFusionError:
        return ""
    slots = sorted({span.slot for span in timeline.spans})[-TIMELINE_SLOTS:]
    if not slots:
        return ""
    drawing = timeline_svg(
        timeline.of_slots(range(slots[0], slots[-1] + 1)),
        colors={adapter["name"]: adapter["color"] for adapter in adapters},
        named={adapter["name"] for adapter in adapters if adapter["label"] in shown},
    )
    head = f"<h3>{escape(name)}: microbatches {slots[0] + 1} to {slots[-1] + 1}</h3>"
    return f"{head}<div class=timeline>{drawing}</div>"


def rank_adapters(adapters: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Marks the best of adapters with the same held-out data and measure, and returns a ranking of each such group.

    Adapters that were cancelled or failed come last, with those that have no result. One that nothing can be compared
    with is in no ranking.
    """
    groups: dict[Any, list[dict[str, Any]]] = {}
    for adapter in adapters:
        groups.setdefault(adapter.pop("compared"), []).append(adapter)
    rankings = []
    for (held_out, measure), group in groups.items():
        compared = [adapter for adapter in group if _competes(adapter)]
        if held_out is None or len(compared) < 2:
            continue
        compared.sort(key=lambda adapter: measure.sort_key(adapter["best"][1]))
        compared[0]["is_best"] = True
        out = [adapter["label"] for adapter in group if not _competes(adapter)]
        rankings.append(
            {
                "measure": measure.label,
                "labels": [adapter["label"] for adapter in compared] + out,
                "placed": len(compared),
                "swept": _swept(group),
            }
        )
    return rankings


def best_shown(rankings: Sequence[dict[str, Any]]) -> list[str]:
    """The adapters that a page of many shows for their results, the first of each ranking before the second."""
    orders = [ranking["labels"][: ranking["placed"]] for ranking in rankings]
    in_turn = [labels[number] for number in range(BEST_SHOWN) for labels in orders if number < len(labels)]
    return in_turn[:BEST_SHOWN]


def _competes(adapter: dict[str, Any]) -> bool:
    return adapter["best"] is not None and adapter["status"] not in OUT_OF_RACE


def _swept(group: Sequence[dict[str, Any]]) -> list[str]:
    """The settings in which the members of a group differ."""
    keys = dict.fromkeys(key for adapter in group for key in adapter["settings"])
    values = {key: {repr(adapter["settings"].get(key)) for adapter in group} for key in keys}
    differing = [key for key in keys if len(values[key]) > 1]
    return [key for key in differing if key not in SECONDARY] or differing
