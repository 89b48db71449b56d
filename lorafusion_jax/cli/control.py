"""lorafusion cancel, pause, continue, finish, weight: requests to a run, also during training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.checkpoint.requests import Action, is_weight, write_request
from lorafusion_jax.cli.common import RunPath, next_command, out, say
from lorafusion_jax.cli.status import run_numbers
from lorafusion_jax.errors import ConfigError

Adapter = Annotated[str, typer.Argument(metavar="ADAPTER", help="name of the adapter")]


def cancel(run: RunPath, adapter: Adapter) -> None:
    """Ends an adapter at once. Its last step stays as a PEFT folder; the others get its slots.

    Example: lorafusion cancel runs/exp1 law
    """
    _ask(run, "cancel", adapter)


def pause(run: RunPath, adapter: Adapter) -> None:
    """Pauses an adapter until it is continued. The others get its slots.

    Example: lorafusion pause runs/exp1 law
    """
    _ask(run, "pause", adapter)


def go_on(run: RunPath, adapter: Adapter) -> None:
    """Continues a paused adapter where it stopped.

    Example: lorafusion continue runs/exp1 law
    """
    _ask(run, "continue", adapter)


def finish(run: RunPath, adapter: Adapter) -> None:
    """Ends an adapter after its optimizer step in progress.

    Example: lorafusion finish runs/exp1 law
    """
    _ask(run, "finish", adapter)


def weight(
    run: RunPath, adapter: Adapter, value: Annotated[float, typer.Argument(metavar="WEIGHT", help="above 0")]
) -> None:
    """Changes an adapter's share of the devices relative to the others.

    Example: lorafusion weight runs/exp1 law 2
    """
    if not is_weight(value):
        raise ConfigError("control.weight", f"{value:g} is not a weight.", why="a weight is a finite number above 0")
    _ask(run, "weight", adapter, value)


COMMANDS: dict[Action, Callable] = {
    "cancel": cancel,
    "pause": pause,
    "continue": go_on,
    "finish": finish,
    "weight": weight,
}


def _ask(run: Path, action: Action, adapter: str, value: float | None = None) -> None:
    names = [one.name for one in RunFolder(run).read_config().adapters]
    if adapter not in names:
        raise ConfigError(
            "control.unknown-adapter",
            f"there is no adapter '{adapter}' in {run}.",
            fix=f"one of: {', '.join(names)}",
        )
    numbers = run_numbers(run)
    status = numbers["adapters"][adapter]["status"]
    if status in ("done", "failed", "cancelled"):
        raise ConfigError("control.ended", f"{adapter} is {status}: there is nothing left to train.")
    write_request(run, action, adapter, value)
    console = out()
    if numbers["state"] == "running" and numbers["alive"] is not False:
        say(console, f"requested: {action} {adapter}. The run applies it after the microbatches in flight.")
        next_command(console, f"lorafusion status {run} --watch")
    else:
        say(console, f"requested: {action} {adapter}. The run is not training and applies it when it is resumed.")
        next_command(console, f"lorafusion resume {run}")
