"""lorafusion combine: one adapter from several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lorafusion_jax.cli.common import next_command
from lorafusion_jax.errors import CheckpointError, ConfigError, quoted
from lorafusion_jax.report.console import out, say


def command(
    adapters: Annotated[
        list[str], typer.Argument(metavar="ADAPTER[=WEIGHT]", help="PEFT folders, or names of --run; weight 1")
    ],
    to: Annotated[Path, typer.Option("--to", help="folder to write, new or empty")],
    run: Annotated[Path | None, typer.Option(metavar="RUN", help="run whose adapters are named")] = None,
    method: Annotated[
        str, typer.Option(help="cat (exact), linear, ties, magnitude_prune, dare_linear or dare_ties, as in PEFT")
    ] = "cat",
    density: Annotated[float | None, typer.Option(help="share of values kept, for all but cat and linear")] = None,
    majority: Annotated[str, typer.Option(help="sign in ties: of the sum (total) or of most (frequency)")] = "total",
    seed: Annotated[int, typer.Option(help="of what DARE draws")] = 0,
) -> None:
    """Combines adapters of one base to a new one, as PEFT's add_weighted_adapter does.

    Example: lorafusion combine law=0.7 med=0.3 --run runs/exp1 --to out/both --method ties --density 0.5
    """
    weights: dict[str | Path, float] = dict(_read(argument, run) for argument in adapters)
    if len(weights) < len(adapters):
        raise ConfigError(
            "combine.adapters", "an adapter is named twice.", fix="each once, with the sum of its weights"
        )
    from lorafusion_jax.checkpoint.base_model import base_in_commands
    from lorafusion_jax.checkpoint.folder import RunFolder
    from lorafusion_jax.peft.combine import combine_adapters

    options: dict[str, Any] = {"method": method, "density": density, "majority": majority, "seed": seed}
    combine_adapters(weights, to, **options)
    console = out()
    say(console, f"combined {len(weights)} adapters by {method}: {to}")
    shown_base = "BASE" if run is None else base_in_commands(RunFolder(run).read_config())
    next_command(console, f"lorafusion generate {quoted(to)} 'a prompt' --base {shown_base}")


def _read(argument: str, run: Path | None) -> tuple[Path, float]:
    """The folder and the weight of "NAME=0.5"."""
    from lorafusion_jax.checkpoint.folder import RunFolder
    from lorafusion_jax.peft.read_config import CONFIG_FILE, did_you_mean_adapter
    from lorafusion_jax.readable import has_file

    name, equals, number = argument.rpartition("=")
    name = name if equals else argument
    try:
        weight = float(number) if equals else 1.0
    except ValueError:
        raise ConfigError("combine.adapters", f"{argument}: '{number}' is no number.", fix=f"{name}=0.5") from None
    newest = RunFolder(run).latest(name) if run is not None else None
    folder = newest or Path(name)
    if not has_file(folder / CONFIG_FILE):
        message = f"there is no adapter {name}" + (f" in {run}." if run is not None else ".")
        fix = did_you_mean_adapter(folder, name) or f"a folder with {CONFIG_FILE}, or --run RUN and a name"
        raise CheckpointError("combine.adapters", message, fix=fix)
    return folder, weight
