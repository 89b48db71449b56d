"""Progress of a run, from its folder: its numbers and its screen."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lorafusion_jax.checkpoint.begun_folder import PLAN, read_start
from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.checkpoint.run_lock import held_by
from lorafusion_jax.checkpoint.saved_states import read_position
from lorafusion_jax.errors import CheckpointError, LoraFusionError
from lorafusion_jax.log_file import read_rows
from lorafusion_jax.readable import has_file
from lorafusion_jax.report.console import most_telling, plain_table
from lorafusion_jax.report.early_stops import EarlyStops, early_stops
from lorafusion_jax.report.format import count, duration, exact, last_result, layout, loss_text, omissions, waits
from lorafusion_jax.report.ranking import Measure, Ranking, measures_of, rank
from lorafusion_jax.report.summary import got_worse, rates, read_summary

ENDS = ("adapter-done", "adapter-failed", "adapter-changed")
COLOURS = {"done": "green", "failed": "bold red", "paused": "yellow", "cancelled": "yellow"}
STATES = {"finished": "green", "interrupted": "yellow", "stopped": "red"}


def run_numbers(run: Path) -> dict:
    """The content of the status screen, from the files of a run folder."""
    folder = RunFolder(run)
    holder = held_by(run)  # read before the events: a process writes its last event before it releases the folder
    start = read_start(run)
    if start is not None and not folder.plan_file.exists():
        return _starting_numbers(run, holder, start)
    plan = folder.read_outline()
    events, metrics = read_rows(run / "events.jsonl"), read_summary(run)
    ends = {event.get("adapter"): event for event in events if event["kind"] in ENDS}
    last = metrics.slots[-1] if metrics.slots else {}
    adapters = {}
    for job in plan.jobs:
        numbers, end = metrics.adapters.get(job.name, {}), ends.get(job.name)
        adapters[job.name] = {
            "status": _status(end),
            "step": numbers.get("step") or 0,
            "steps": job.num_batches,
            "loss": numbers.get("loss"),
            "reward": numbers.get("reward"),
            "held_out_before": numbers.get("before"),
            "held_out_after": numbers.get("after"),
            "eta_s": (last.get("adapter_eta_s") or {}).get(job.name),
            "reason": (end or {}).get("reason", ""),
        }
    began = next((event for event in reversed(events) if event["kind"] == "started"), {})
    changes = [event for event in events if event["kind"] in ("started", *STATES)]
    state, reason = _state(changes, holder)
    if state == "finished":
        _add_lost_ends(run, adapters)
    evaluations = {name: metrics.adapters.get(name, {}).get("evaluated", {}) for name in adapters}
    ranking, stops = _rank(folder, adapters, evaluations), early_stops(events)
    times = [metrics.time, *(row.get("time") for row in events[-1:])]
    last_row = max((moment for moment in times if moment is not None), default=folder.plan_file.stat().st_mtime)
    return {
        "run": str(run),
        "state": state,
        "alive": holder["alive"],
        "plan": plan.digest,
        "slot": metrics.slot,
        "slots": plan.num_slots,
        "eta_s": last.get("eta_s"),
        "last_news_s": round(max(time.time() - last_row, 0.0), 1),
        "reason": reason,
        "device": began.get("device"),
        "mesh": began.get("mesh"),
        "layers": began.get("layers"),
        "remat": began.get("remat", ""),
        **_parameters(began),
        "peak_bytes": changes[-1].get("peak_bytes") if changes else None,
        "adapters": {name: adapters[name] for name in ranking.order},
        "throughput": rates(metrics, events, newest=state == "running"),
        "best": list(ranking.best),
        "compared": [list(group) for group in ranking.groups],
        "ranking": list(ranking.lines),
        "early_stops": dict(stops.reasons),
        "spared_steps": stops.steps,
        "spared_slots": stops.slots,
        **_phase(holder, start),
    }


def _add_lost_ends(run: Path, adapters: dict[str, dict]) -> None:
    """Reads how adapters ended from the newest checkpoint, where the events of that are lost."""
    lost = [name for name, row in adapters.items() if row["status"] == "running"]
    if not lost:
        return
    with suppress(LoraFusionError):
        position = read_position(run / "state") or {}
        for name, end in position.get("adapters", {}).items():
            if name in lost:
                adapters[name] |= {"status": end["status"], "reason": end.get("reason", "")}


def _rank(folder: RunFolder, adapters: dict[str, dict], evaluated: dict[str, dict]) -> Ranking:
    """Ranks the adapters, and adds to each the metric that it is compared by."""
    status, record = {name: row["status"] for name, row in adapters.items()}, {}
    with suppress(CheckpointError):  # a damaged record ranks nothing
        record = folder.read_record()
    measures = measures_of(record)
    for name, row in adapters.items():
        measure = measures.get(name, Measure())
        row |= {"metric": measure.metric, "value": measure.value(evaluated[name])}
    data = {name: digest for name, digest in record.get("eval", {}).items() if digest}
    return rank(status, evaluated, data, measures)


def _phase(holder: dict, start: dict | None) -> dict:
    """What a run that starts or resumes is doing, and for how long; None once it trains, or if its process is gone."""
    if start is None or holder["alive"] is False:
        return {"phase": None, "phase_s": None}
    return {"phase": start["phase"], "phase_s": round(max(time.time() - start["phase_began"], 0.0), 1)}


def _starting_numbers(run: Path, holder: dict, start: dict) -> dict:
    """`run_numbers` of a run that has no plan yet."""
    is_stopped = holder["alive"] is False
    reason = f"its start was cut: process {holder.get('process')} has ended" if is_stopped else ""
    numbers = dict.fromkeys(("plan", "eta_s", "device", "mesh", "layers", "remat", "peak_bytes", "throughput"))
    return {
        "run": str(run),
        "state": "stopped" if is_stopped else "starting",
        "alive": holder["alive"],
        **numbers,
        "slot": 0,
        "slots": 0,
        "last_news_s": round(max(time.time() - start["phase_began"], 0.0), 1),
        "reason": reason,
        **_parameters({}),
        "adapters": {},
        "best": [],
        "compared": [],
        "ranking": [],
        "early_stops": {},
        "spared_steps": 0,
        "spared_slots": 0,
        **_phase(holder, start),
    }


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run, or one that starts."""
    return has_file(folder / PLAN) or read_start(folder) is not None


def runs_in(folder: Path) -> list[dict]:
    """`run_numbers` of every run in a folder. A run that cannot be read has only "run", "state" and "reason"."""
    runs = []
    for run in sorted(path for path in folder.iterdir() if path.is_dir() and is_run(path)):
        try:
            runs.append(run_numbers(run))
        except LoraFusionError as problem:
            runs.append({"run": str(run), "state": "damaged", "reason": problem.what})
    return runs


def runs_screen(runs: list[dict]) -> Table:
    """Returns the table of `runs_in`; its last columns are shown where a run has something in them."""
    table = plain_table(("run", "state"), ("done", "adapters", "eta", "last news"))
    bests = [
        ", ".join(f"{name} {loss_text(run['adapters'][name]['value'])}" for name in run.get("best", ())) for run in runs
    ]
    notes = [escape(run.get("phase") or run["reason"]) for run in runs]
    columns = {title: texts for title, texts in {"best": bests, "note": notes}.items() if any(texts)}
    for title in columns:
        table.add_column(title, no_wrap=title == "best")
    for run, *last in zip(runs, *columns.values(), strict=True):
        state = f"[{STATES.get(run['state'], 'bold')}]{run['state']}[/]"
        if "adapters" not in run:
            table.add_row(Path(run["run"]).name, state, *["–"] * 4, *last)
            continue
        progress = f"{100 * run['slot'] / run['slots']:.0f} %" if run["slots"] else "–"
        trains = run["state"] == "running" and run["phase"] is None and run["eta_s"] is not None
        table.add_row(
            Path(run["run"]).name,
            state,
            progress,
            str(len(run["adapters"])) if run["adapters"] else "–",
            duration(run["eta_s"]) if trains else "–",
            f"{duration(run['last_news_s'])} ago",
            *last,
        )
    return table


def _parameters(began: dict) -> dict:
    """The adapters' own parameters and what devices hold for them; None: not started."""
    stored = began.get("stored") or None
    return {
        "own_parameters": began["trainable"] if stored else None,
        "stored_parameters": max(stored["weights"], stored["gradients"]) if stored else None,
        "stored": stored,
    }


def _status(last: dict | None) -> str:
    """Status of an adapter from its last event about its end or a request."""
    if last is None:
        return "running"
    return last["status"] if "status" in last else last["kind"].removeprefix("adapter-")


def _state(changes: list[dict], holder: dict) -> tuple[str, str]:
    """State of a run and the reason for it, from its last events and the process that holds its folder."""
    last = changes[-1] if changes else {"kind": "started"}
    if holder["alive"] and last["kind"] != "finished":
        return "running", ""  # includes a run that is just being resumed
    if last["kind"] != "started":
        return last["kind"], last.get("what", "")
    if holder["alive"] is False:
        return "stopped", f"without notice: process {holder.get('process')} has ended"
    return "running", ""


def status_screen(numbers: dict) -> Group:
    """Returns the screen of `run_numbers`."""
    head = Text(f"{numbers['run']}  ", style="bold")
    if numbers["plan"]:
        head.append(f"plan {numbers['plan'][:12]}  {exact(numbers['slot'])}/{exact(numbers['slots'])} mb  ")
    head.append(numbers["state"], style=STATES.get(numbers["state"], "bold"))
    head.append(f"  {numbers['reason']}" if numbers["reason"] else "", style="red")
    starting = numbers["phase"] is not None
    if starting:  # rates and estimates are those of an earlier session
        head.append(f"  {numbers['phase']} … {duration(numbers['phase_s'])}", style="not bold")
        numbers = numbers | {"throughput": None, "eta_s": None}
    elif numbers["state"] == "running":
        unknown = omissions((numbers["throughput"] or {}).get("eta_leaves_out"))
        head.append(f"  eta {duration(numbers['eta_s'])}{unknown}" if numbers["eta_s"] is not None else "")
        head.append(f"  last update {duration(numbers['last_news_s'])} ago", style="not bold")
    table = plain_table(("adapter", "status"), ("steps", "last loss", "held-out before", "after", "eta"))
    notes = []
    if not numbers["adapters"]:
        return Group(head)
    rows, omission = most_telling(numbers["adapters"], lambda row: (bool(row["reason"]), row["status"] == "running"))
    for name, row in rows.items():
        losses = [last_result(row), loss_text(row["held_out_before"]), loss_text(row["held_out_after"])]
        has_eta = row["status"] == "running" and row["eta_s"] is not None and not starting
        eta = f"{duration(row['eta_s'])}" if has_eta else "–"
        # What has not ended is as the run is: nobody trains in one that was interrupted.
        status = numbers["state"] if row["status"] == "running" and numbers["state"] in STATES else row["status"]
        colour = COLOURS.get(status)
        status = f"[{colour}]{status}[/]" if colour else status
        table.add_row(name, status, f"{exact(row['step'])}/{exact(row['steps'])}", *losses, eta)
        if row["reason"]:
            notes.append(Text(f"{name}: {row['reason']}; kept step {row['step']}", style="red"))
        elif worse := got_worse(name, row["held_out_before"], row["held_out_after"]):
            notes.append(Text(worse, style="yellow"))
    notes += [Text(omission)] if omission else []
    speed = numbers["throughput"]
    rates = (
        [
            Text(
                f"{count(speed['processed_tokens_per_s'])} tok/s ({count(speed['useful_tokens_per_s'])} useful)"
                f"{'' if numbers['state'] == 'running' else ', median'}  "
                f"{duration(speed['slot_seconds'])} per microbatch{waits(speed['paused_share'], speed['paused_s'])}"
            )
        ]
        if speed
        else []
    )
    best = [Text(line, style="bold") for line in numbers["ranking"]]
    stops = EarlyStops(reasons=numbers["early_stops"], steps=numbers["spared_steps"], slots=numbers["spared_slots"])
    notes += map(Text, stops.lines(speed["slot_seconds"] if speed else None))
    return Group(head, *_devices(numbers), table, *best, *notes, *rates)


def _devices(numbers: dict) -> list[Text]:
    """Mesh and devices of the last session; empty before the first one."""
    if not numbers["device"]:
        return []
    layout_text = layout(numbers["mesh"], numbers["layers"], numbers["remat"]) if numbers["mesh"] else ""
    peak = f"peak {count(numbers['peak_bytes'])}B of device memory" if numbers["peak_bytes"] else ""
    return [Text("  ·  ".join(text for text in (numbers["device"], layout_text, peak) if text))]
