"""lorafusion status: where a run stands, read from its folder."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live
from rich.table import Table

from lorafusion_jax.cli.common import Json, RunPath, next_command, out
from lorafusion_jax.report.format import count, duration
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.report.summary import final_rows, throughput
from lorafusion_jax.checkpoint.folder import RunFolder

NAME = "status"


def command(run: RunPath, as_json: Json = False,
            watch: Annotated[bool, typer.Option(help="redraw every two seconds until the run ends")] = False) -> None:
    """Shows how far every adapter of a run is. Example: lorafusion status runs/exp1 --watch"""
    numbers = run_numbers(run)
    if as_json:
        print(json.dumps(numbers))
        return
    console = out()
    if watch:
        with Live(_table(numbers), console=console) as live:
            while numbers["state"] == "running":
                time.sleep(2)
                numbers = run_numbers(run)
                live.update(_table(numbers))
    else:
        console.print(_table(numbers))
    speed = numbers["throughput"]
    if speed:
        console.print(f"{count(speed['processed_tokens_per_s'])} tok/s ({count(speed['useful_tokens_per_s'])} useful)  "
                      f"{duration(speed['slot_seconds'])} per microbatch", highlight=False)
    if numbers["state"] == "finished":
        next_command(console, f"lorafusion export {run} {next(iter(numbers['adapters']))} --to out/adapter")
    else:
        next_command(console, f"lorafusion resume {run}")


def run_numbers(run: Path) -> dict:
    """Everything that the status screen shows, read from the files of a run folder."""
    folder = RunFolder(run)
    plan = folder.read_plan()
    rows, events = final_rows(run), read_rows(run / "events.jsonl")
    kinds = {event.get("adapter"): event for event in events if event["kind"] in ("adapter-done", "adapter-failed")}
    adapters = {}
    for job in plan.jobs:
        own = rows.get(job.name, {})
        ended = kinds.get(job.name)
        status = "running" if ended is None else ended["kind"].removeprefix("adapter-")
        adapters[job.name] = {"status": status, "step": own.get("step", 0), "steps": job.num_batches,
                              "loss": own.get("loss"), "held_out_before": own.get("before"),
                              "held_out_after": own.get("after"), "reason": (ended or {}).get("reason", "")}
    ends = [event["kind"] for event in events if event["kind"] in ("started", "finished", "interrupted")]
    state = "finished" if ends[-1:] == ["finished"] else "interrupted" if ends[-1:] == ["interrupted"] else "running"
    slots = [row["slot"] for row in read_rows(run / "metrics.jsonl")]
    return {"run": str(run), "state": state, "plan": plan.digest, "slot": max(slots, default=0), "slots": plan.num_slots,
            "adapters": adapters, "throughput": throughput(run)}


def _table(numbers: dict) -> Table:
    title = f"{numbers['run']}  {numbers['state']}  {numbers['slot']}/{numbers['slots']} microbatches"
    table = Table(box=None, header_style="bold", pad_edge=False, title=title, title_justify="left", title_style="bold")
    for name in ("adapter", "status", "steps", "loss", "held-out before", "after"):
        table.add_column(name, justify="left" if name in ("adapter", "status") else "right", no_wrap=True)
    for name, row in numbers["adapters"].items():
        losses = ["–" if row[key] is None else f"{row[key]:.4f}" for key in ("loss", "held_out_before", "held_out_after")]
        table.add_row(name, f"{row['status']} {row['reason']}".strip(), f"{row['step']}/{row['steps']}", *losses)
    return table
