"""lorafusion status: progress of a run, from its folder."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from lorafusion_jax.cli.common import Json, RunPath, next_command
from lorafusion_jax.errors import quoted
from lorafusion_jax.report.console import out
from lorafusion_jax.report.ranking import adapter_to_export

SILENT_S = 120.0  # a run of another host that is silent for this long may have ended


def command(
    run: RunPath,
    as_json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="redraw every two seconds until the run ends")] = False,
) -> None:
    """Shows the progress of every adapter of a run, or a table of the runs in a folder.

    Adapters with the same held-out data are ranked by their held-out loss.

    Example: lorafusion status runs/exp1 --watch

    Example: lorafusion status runs
    """
    from rich.live import Live

    from lorafusion_jax.api.status import is_run, run_numbers, runs_in, runs_screen, status_screen
    from lorafusion_jax.readable import has_folder

    if has_folder(run) and not is_run(run) and (runs := runs_in(run)):
        print(json.dumps(runs)) if as_json else out().print(runs_screen(runs))
        return
    numbers = run_numbers(run)
    if as_json:
        print(json.dumps(numbers))
        return
    console = out()
    if watch:
        with Live(status_screen(numbers), console=console) as live:
            while numbers["state"] in ("running", "starting"):
                time.sleep(2)
                numbers = run_numbers(run)
                live.update(status_screen(numbers))
        if not console.is_terminal:
            console.print()  # Live does not end its last line there
    else:
        console.print(status_screen(numbers))
    next_command(console, _next(run, numbers))


def _next(run: Path, numbers: dict) -> str:
    if numbers["state"] == "finished":
        status = {name: row["status"] for name, row in numbers["adapters"].items()}
        steps = {name: row["step"] for name, row in numbers["adapters"].items()}
        adapter = adapter_to_export(status, steps, numbers["best"])
        adapter_to_continue = next(
            (name for name, row in numbers["adapters"].items() if row["status"] == "paused"), None
        )
        if adapter_to_continue:
            return f"lorafusion continue {quoted(run)} {adapter_to_continue}   and then lorafusion resume {quoted(run)}"
        return (
            f"lorafusion export {quoted(run)} {adapter} --to out/{adapter}"
            if adapter
            else f"lorafusion doctor   (no adapter of {run} took a step)"
        )
    if numbers["plan"] is None and numbers["state"] == "stopped":
        return f"lorafusion train JOBS --out {quoted(run)}"
    is_active = numbers["state"] in ("running", "starting")
    alive = is_active and (numbers["alive"] or numbers["last_news_s"] < SILENT_S)
    return f"lorafusion status {quoted(run)} --watch" if alive else f"lorafusion resume {quoted(run)}"
