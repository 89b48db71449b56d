"""lorafusion report: one HTML page of one or more runs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from lorafusion_jax.cli.common import Json, ends_in, next_command
from lorafusion_jax.errors import quoted
from lorafusion_jax.files import make_folders, write_output
from lorafusion_jax.report.console import out, say

WATCH_S = 10


def command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="run folders, shown over each other")],
    to: Annotated[
        Path | None, typer.Option("--out", "-o", help="an .html file", show_default="report.html in RUN")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="write the page every ten seconds until all runs end")] = False,
    as_json: Json = False,
) -> None:
    """Writes one page with curves, a sortable table, what limits speed, settings that differ, and the timeline.

    Example: lorafusion report runs/exp1 runs/exp2 -o compare.html
    """
    from lorafusion_jax.checkpoint.folder import RunFolder

    for run in runs:
        RunFolder(run).read_record()  # raises if it is not a run folder
    file = runs[0] / "report.html" if to is None else to
    ends_in(file, ".html")
    make_folders(file.parent)
    is_live = _write(runs, file, live=watch)
    console = out()
    if as_json:
        print(json.dumps({"file": str(file), "runs": [str(run) for run in runs], "running": is_live}))
    else:
        say(console, f"written to {file}" + ("  ·  it loads itself again while the run goes on" if watch else ""))
    while watch and is_live:
        time.sleep(WATCH_S)
        is_live = _write(runs, file, live=True)
    if not as_json:
        next_command(console, f"open {quoted(file)}")


def _write(runs: list[Path], file: Path, *, live: bool) -> bool:
    """Writes the page. Returns whether a run still goes on."""
    from lorafusion_jax.api.status import run_numbers
    from lorafusion_jax.report.page.build import ReportedRun, report_page

    report_runs = [ReportedRun(folder=run, numbers=run_numbers(run)) for run in runs]
    is_live = any(run.numbers["state"] == "running" for run in report_runs)
    write_output(file, report_page(report_runs, refresh_s=WATCH_S if live and is_live else None))
    return is_live
