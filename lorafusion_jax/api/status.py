"""Progress of a run, from its folder: its numbers and its screen."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Group
from rich.text import Text

from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.checkpoint.run_lock import held_by
from lorafusion_jax.log_file import read_rows
from lorafusion_jax.report.console import plain_table
from lorafusion_jax.report.format import count, duration, exact, layout, omissions, waits
from lorafusion_jax.report.summary import got_worse, newest_rates, read_summary

ENDS = ("adapter-done", "adapter-failed", "adapter-changed")
COLOURS = {"done": "green", "failed": "bold red", "paused": "yellow", "cancelled": "yellow"}
STATES = {"finished": "green", "interrupted": "yellow", "stopped": "red"}


def run_numbers(run: Path) -> dict:
    """The content of the status screen, from the files of a run folder."""
    folder = RunFolder(run)
    plan = folder.read_outline()
    holder = held_by(run)  # read before the events: a process writes its last event before it releases the folder
    events, metrics = read_rows(run / "events.jsonl"), read_summary(run)
    ends = {event.get("adapter"): event for event in events if event["kind"] in ENDS}
    last = metrics.slots[-1] if metrics.slots else {}
    adapters = {}
    for job in plan.jobs:
        numbers, ended = metrics.adapters.get(job.name, {}), ends.get(job.name)
        adapters[job.name] = {
            "status": _status(ended),
            "step": numbers.get("step") or 0,
            "steps": job.num_batches,
            "loss": numbers.get("loss"),
            "held_out_before": numbers.get("before"),
            "held_out_after": numbers.get("after"),
            "eta_s": (last.get("adapter_eta_s") or {}).get(job.name),
            "reason": (ended or {}).get("reason", ""),
        }
    began = next((event for event in reversed(events) if event["kind"] == "started"), {})
    changes = [event for event in events if event["kind"] in ("started", *STATES)]
    state, reason = _state(changes, holder)
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
        "adapters": adapters,
        "throughput": newest_rates(metrics, events),
    }


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
    head = Text(
        f"{numbers['run']}  plan {numbers['plan'][:12]}  {exact(numbers['slot'])}/{exact(numbers['slots'])} mb  ",
        style="bold",
    )
    head.append(numbers["state"], style=STATES.get(numbers["state"], "bold"))
    head.append(f"  {numbers['reason']}" if numbers["reason"] else "", style="red")
    if numbers["state"] == "running":
        unknown = omissions((numbers["throughput"] or {}).get("eta_leaves_out"))
        head.append(f"  eta {duration(numbers['eta_s'])}{unknown}" if numbers["eta_s"] is not None else "")
        head.append(f"  last update {duration(numbers['last_news_s'])} ago", style="not bold")
    table = plain_table(("adapter", "status"), ("steps", "loss", "held-out before", "after", "eta"))
    notes = []
    for name, row in numbers["adapters"].items():
        losses = [
            "–" if row[key] is None else f"{row[key]:.4f}" for key in ("loss", "held_out_before", "held_out_after")
        ]
        eta = f"{duration(row['eta_s'])}" if row["status"] == "running" and row["eta_s"] is not None else "–"
        colour = COLOURS.get(row["status"])
        status = f"[{colour}]{row['status']}[/]" if colour else row["status"]
        table.add_row(name, status, f"{exact(row['step'])}/{exact(row['steps'])}", *losses, eta)
        if row["reason"]:
            notes.append(Text(f"{name}: {row['reason']}; kept step {row['step']}", style="red"))
        elif worse := got_worse(name, row["held_out_before"], row["held_out_after"]):
            notes.append(Text(worse, style="yellow"))
    speed = numbers["throughput"]
    rates = (
        [
            Text(
                f"{count(speed['processed_tokens_per_s'])} tok/s ({count(speed['useful_tokens_per_s'])} useful)  "
                f"{duration(speed['slot_seconds'])} per microbatch{waits(speed['paused_share'], speed['paused_s'])}"
            )
        ]
        if speed
        else []
    )
    return Group(head, *_devices(numbers), table, *notes, *rates)


def _devices(numbers: dict) -> list[Text]:
    """Mesh and devices of the last session; empty before the first one."""
    if not numbers["device"]:
        return []
    what = layout(numbers["mesh"], numbers["layers"], numbers["remat"]) if numbers["mesh"] else ""
    peak = f"peak {count(numbers['peak_bytes'])}B of device memory" if numbers["peak_bytes"] else ""
    return [Text("  ·  ".join(text for text in (numbers["device"], what, peak) if text))]
