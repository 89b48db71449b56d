"""The second part of lorafusion tune: which implementation of each op is the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.cli.job_calls import LayerCalls, calls_of_job, named_calls, op_cases
from lorafusion_jax.config import load_config
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.report.console import errors_to, say

if TYPE_CHECKING:
    from pallas_kernels.measured import OpRow
    from pallas_kernels.tuning.ops import OpCase


def calls_of(jobs: Path | None, overrides: Sequence[str], *, quick: bool) -> list[LayerCalls]:
    """The calls whose implementations are compared."""
    if jobs is None:
        return named_calls(quick=quick)
    config = load_config(jobs, overrides)
    return calls_of_job(config, ModelConfig.from_hf(base_directory(config)))


def choose_implementations(calls: Sequence[LayerCalls], path: Path) -> list[OpRow]:
    """Times every implementation of every call; nothing where kernels are interpreted."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from pallas_kernels import config_store
    from pallas_kernels.device import interprets
    from pallas_kernels.tuning.ops import tune_ops

    if interprets():
        return []
    if path.exists():
        config_store.use(path)  # its tile sizes are those that runs will have
    cases, rows = list(op_cases(calls)), []
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=errors_to()) as bar:
        task = bar.add_task("implementations", total=len(cases))

        def advance(case: OpCase, row: OpRow | None) -> None:
            rows.extend([] if row is None else [row])
            bar.update(task, advance=1, description=case.call.op)

        tune_ops(cases, path, progress=advance)
    return rows


def show_implementations(console: Console, rows: Sequence[OpRow]) -> None:
    """Prints the times of every call, the fastest first, and what is the default now."""
    console.print("\nimplementations, forward and backward", style="bold")
    for row in rows:
        times = sorted(row.median_us.items(), key=lambda item: item[1])
        shown = ", ".join(f"{name} {us:.0f} us" for name, us in times)
        now = "the default as before"
        if row.winner != row.default:
            now = f"default now, {row.speedup:.2f} × as fast as {row.default}"
        say(console, f"  {row.call.op}: {row.call.label}\n    {shown}: {row.winner} is {now}")
