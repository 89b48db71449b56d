"""Runs something that trains, with live view, trackers, and the table at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lorafusion_jax.cli.common import errors_to, next_command
from lorafusion_jax.config.schema import ReportSettings
from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.report.events import Listener
from lorafusion_jax.report.format import duration
from lorafusion_jax.report.screen import Screen
from lorafusion_jax.report.summary import final_rows
from lorafusion_jax.report.trackers import trackers
from lorafusion_jax.training import Interrupted, RunResult
from scheduling import Plan

INTERRUPTED = 130


def follow(console: Console, folder: Path, report: ReportSettings,
           work: Callable[[Sequence[Listener]], RunResult]) -> int:
    """Runs `work` under the live view and shows what came of it; returns the exit code."""
    try:
        result = watch(console, folder, report, work)
    except Interrupted:
        errors_to().print("interrupted: the state is saved.")
        next_command(console, f"lorafusion resume {folder}")
        return INTERRUPTED
    show_result(console, result)
    return result.exit_code


def watch(console: Console, folder: Path, report: ReportSettings,
          work: Callable[[Sequence[Listener]], RunResult]) -> RunResult:
    """Runs `work` under the live view and the trackers that the job asks for."""
    with trackers(report, folder) as others, Screen(folder.name, console) as screen:
        return work([screen, *others])


def show_result(console: Console, result: RunResult) -> None:
    """Prints the table of finished adapters and the next command."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("adapter", "status", "steps", "train loss", "held-out before", "after", "folder"):
        table.add_column(title, justify="left" if title in ("adapter", "status", "folder") else "right", no_wrap=True)
    rows = final_rows(result.folder)
    for name, adapter in result.adapters.items():
        row = rows.get(name, {})
        table.add_row(name, adapter.status if adapter.status != "failed" else f"[red]failed[/red] {adapter.reason}",
                      f"{adapter.step}/{adapter.num_steps}", _loss(row.get("loss")), _loss(row.get("before")),
                      _loss(row.get("after")), str(result.folder / "adapters" / name / "latest"))
    console.print(table)
    console.print(f"{len(result.plan.slots)} microbatches in {duration(result.seconds)}", highlight=False)
    done = next((name for name, adapter in result.adapters.items() if adapter.step), None)
    if done:
        next_command(console, f"lorafusion export {result.folder} {done} --to out/{done}")


def read_plan(path: Path) -> Plan:
    """Reads a plan file.

    Raises:
        CheckpointError: missing or damaged.
    """
    try:
        return Plan.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError("plan.missing", f"there is no plan {path}.", fix="lorafusion plan jobs.yaml -o plan.json") from None
    except ValueError as problem:
        raise CheckpointError("plan.damaged", f"{path} is not a plan.", why=str(problem)) from None


def _loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
