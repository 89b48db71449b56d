"""lorafusion verify: whether files are as they were written, or whether an adapter learns what it learns alone."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lorafusion_jax.cli.common import Json
from lorafusion_jax.machine import prepare_machine
from lorafusion_jax.report.console import errors_to, out, plain_table, say
from lorafusion_jax.report.format import exact

DAMAGED, DIFFERENT = 2, 1
SHOWN = 6  # tensors of a comparison


def command(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="run folder, or a folder with SHA256SUMS")],
    adapter: Annotated[
        str | None, typer.Argument(metavar="ADAPTER", help="adapter to train with the others and alone")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps of the adapter")] = 4,
    as_json: Json = False,
) -> int:
    """Compares every file with its digest; exits with 2 if one is damaged.

    With an adapter: trains it for a few steps from its start, once by the run's plan and once alone, and compares
    losses and gradients step by step; exits with 1 if one differs by more than rounding explains. Nothing is written.

    Example: lorafusion verify runs/exp1

    Example: lorafusion verify runs/exp1 law --steps 8
    """
    return _verify_files(path, as_json) if adapter is None else _verify_adapter(path, adapter, steps, as_json)


def _verify_files(path: Path, as_json: bool) -> int:
    from lorafusion_jax.checkpoint.verify_folder import verify_folder

    verdicts = verify_folder(path)
    damage = [text for verdict in verdicts for text in verdict.damage]
    if as_json:
        print(json.dumps({"folder": str(path), "good": not damage, "files": [asdict(verdict) for verdict in verdicts]}))
        return DAMAGED if damage else 0
    table = plain_table(("", "state"), ("files",))
    for verdict in verdicts:
        state = "[bold red]damaged[/]" if verdict.damage else verdict.note or "[green]good[/]"
        table.add_row(verdict.name, state, exact(verdict.files))
    console = out()
    console.print(table)
    for text in damage:
        errors_to().print(f"error[verify.damaged] {text}", style="red", highlight=False, markup=False, soft_wrap=True)
    if not damage:
        say(console, f"all {exact(sum(verdict.files for verdict in verdicts))} files are as they were written")
    return DAMAGED if damage else 0


def _verify_adapter(path: Path, adapter: str, steps: int, as_json: bool) -> int:
    from lorafusion_jax.training.compare_alone import compare_alone
    from lorafusion_jax.training.loop import Interrupted

    prepare_machine()
    try:
        comparison = compare_alone(path, adapter, steps)
    except Interrupted:
        raise KeyboardInterrupt from None
    if as_json:
        print(json.dumps({"folder": str(path), "good": comparison.good, **asdict(comparison)}))
        return 0 if comparison.good else DIFFERENT
    table = plain_table(("step", "of"), ("difference", "bound"))
    for difference in comparison.differences[:SHOWN]:
        table.add_row(str(difference.step), difference.tensor, f"{difference.value:.1e}", f"{difference.bound:.0e}")
    console = out()
    console.print(table)
    worst = comparison.differences[0]
    text = f"{adapter}, {exact(comparison.steps)} steps with {exact(comparison.others)} other adapters and alone"
    if comparison.good:
        num_values = exact(len(comparison.differences))
        say(console, f"{text}: losses, gradients and steps differ by rounding only ({num_values} compared)")
        return 0
    say(
        errors_to(),
        f"error[verify.different] {text}: step {worst.step}, {worst.tensor} differs by {worst.value:.1e}, above what "
        f"rounding explains, {worst.bound:.0e}",
        "red",
    )
    return DIFFERENT
