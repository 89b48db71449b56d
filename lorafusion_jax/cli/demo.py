"""lorafusion demo: trains on example data and a tiny model from the package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorafusion_jax.cli.common import next_command
from lorafusion_jax.errors import quoted
from lorafusion_jax.examples import IN_WHEEL, examples_directory
from lorafusion_jax.machine import prepare_machine
from lorafusion_jax.report.console import out, plain_table, say
from lorafusion_jax.report.format import count, duration, loss_text, percent

if TYPE_CHECKING:
    from rich.console import Console


def command(
    out_dir: Annotated[
        Path | None, typer.Option("--out", "-o", help="run folder", show_default="runs/demo, runs/demo-2, …")
    ] = None,
) -> int:
    """Trains five adapters of a tiny model on the CPU: plan, train, evaluate, export, verify.

    Example: lorafusion demo
    """
    from lorafusion_jax.api.watch import watch
    from lorafusion_jax.config import load_config
    from lorafusion_jax.planning.planned import plans_one_after_another
    from lorafusion_jax.training import train
    from lorafusion_jax.training.verify import verify_exports

    prepare_machine()
    jobs = examples_directory() / "demo.yaml"
    folder, console = out_dir or _new_folder(Path("runs/demo")), out()
    config = load_config(jobs)
    console.print(
        f"[bold]lorafusion demo[/bold]: {len(config.adapters)} adapters of one {Path(config.base.model).name} model, "
        f"on this machine, no download\n  job file {jobs}\n  run folder {folder}\n"
        + ("  its weights are random: a checkout of the sources has trained ones\n" if IN_WHEEL.is_dir() else ""),
        highlight=False,
    )
    result = watch(console, folder, config, lambda listeners: train(config, folder, listeners=listeners))
    checks = verify_exports(folder)
    _table(console, config, result, checks)
    alone = sum(plan.num_slots for plan in plans_one_after_another(result.plan))  # all cost the same
    _totals(console, result, alone)
    if bad := [name for name, check in checks.items() if not check.same]:
        console.print(f"[red]exported folders differ from the trained weights: {', '.join(bad)}[/red]")
        return 1
    first = config.adapters[0].name
    next_command(
        console,
        f"lorafusion export {quoted(folder)} {first} --to out/{first}   (or with your own data: lorafusion new)",
    )
    return result.exit_code


def _new_folder(first_choice: Path) -> Path:
    number, folder = 1, first_choice
    while folder.exists():
        number += 1
        folder = first_choice.with_name(f"{first_choice.name}-{number}")
    return folder


def _table(console: Console, config, result, checks) -> None:
    from lorafusion_jax.report.summary import final_rows

    rows = final_rows(result.folder)
    table = plain_table(
        ("adapter",), ("rank", "dropout", "lr", "batch", "epochs", "steps", "held-out loss", "PEFT folder")
    )
    for adapter in config.adapters:
        row = rows[adapter.name]
        note = (
            "re-read, equal" if checks[adapter.name].same else f"[red]differs by {checks[adapter.name].delta:.1e}[/red]"
        )
        table.add_row(
            adapter.name,
            f"{adapter.lora.rank}",
            f"{adapter.lora.dropout:g}",
            f"{adapter.optim.lr:g}",
            f"{adapter.global_samples}",
            f"{adapter.epochs}",
            f"{result.adapters[adapter.name].step}",
            f"{loss_text(row['before'], 3)} → [green]{loss_text(row['after'], 3)}[/green]",
            note,
        )
    console.print()
    console.print(table)
    for name, row in rows.items():
        if (after := row.get("accuracy after")) is not None:
            say(
                console,
                f"{name}: the chosen answer gains more in {percent(after)} of the held-out pairs, {_before(row)}",
            )


def _before(row: dict) -> str:
    return f"{percent(row['accuracy before'])} before training"


def _totals(console: Console, result, alone: int) -> None:
    from lorafusion_jax.report.summary import throughput

    speed, slots = throughput(result.folder), result.plan.num_slots
    rate = f"{count(speed['useful_tokens_per_s'])} useful tokens/s (median), " if speed else ""
    console.print()
    say(
        console,
        f"{rate}capacity used {percent(result.plan.density)}, {slots} microbatches in {duration(result.seconds)}",
    )
    alone_s = duration(alone * result.seconds / slots)
    say(
        console,
        f"one after another in microbatches of the same size: {alone} of them, {alone_s}; together is "
        f"{alone / slots:.2f}× faster, less beside sizes that suit one adapter",
    )
