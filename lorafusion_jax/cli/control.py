"""lorafusion cancel, pause, continue, finish, weight, extend, add: what a user asks of a run, also while it trains."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorafusion_jax.cli.common import JobFile, Overrides, RunPath, next_command
from lorafusion_jax.errors import ConfigError, quoted
from lorafusion_jax.report.console import out, say, warn

if TYPE_CHECKING:
    from lorafusion_jax.checkpoint.requests import Action
    from lorafusion_jax.config.schema import OptimSettings

Adapter = Annotated[str, typer.Argument(metavar="ADAPTER", help="name of the adapter")]


def cancel_adapter(run: RunPath, adapter: Adapter) -> None:
    """Ends an adapter at once. Its last step stays as a PEFT folder; the others get its slots.

    Example: lorafusion cancel runs/exp1 law
    """
    _send_request(run, "cancel", adapter)


def pause_adapter(run: RunPath, adapter: Adapter) -> None:
    """Pauses an adapter until it is continued. The others get its slots.

    Example: lorafusion pause runs/exp1 law
    """
    _send_request(run, "pause", adapter)


def continue_adapter(run: RunPath, adapter: Adapter) -> None:
    """Continues a paused adapter where it stopped.

    Example: lorafusion continue runs/exp1 law
    """
    _send_request(run, "continue", adapter)


def finish_adapter(run: RunPath, adapter: Adapter) -> None:
    """Ends an adapter after its optimizer step in progress.

    Example: lorafusion finish runs/exp1 law
    """
    _send_request(run, "finish", adapter)


def weight_adapter(
    run: RunPath, adapter: Adapter, value: Annotated[float, typer.Argument(metavar="WEIGHT", help="above 0")]
) -> None:
    """Changes an adapter's share of the devices relative to the others.

    Example: lorafusion weight runs/exp1 law 2
    """
    from lorafusion_jax.checkpoint.requests import is_weight

    if not is_weight(value):
        raise ConfigError("control.weight", f"{value:g} is not a weight.", why="a weight is a finite number above 0")
    _send_request(run, "weight", adapter, value)


def extend_adapter(
    run: RunPath,
    adapter: Adapter,
    epochs: Annotated[int | None, typer.Option(help="more passes over its data")] = None,
    steps: Annotated[int | None, typer.Option(help="more optimizer steps")] = None,
) -> None:
    """Extends an adapter, also one that is done: it continues from its last weights and optimizer state.

    The steps that were planned keep their learning rates. The new ones have a schedule of their own, warm-up included:
    a cosine that had fallen to its end rises again.

    Example: lorafusion extend runs/exp1 law --epochs 1

    Example: lorafusion extend runs/exp1 law --steps 200
    """
    from lorafusion_jax.checkpoint.requests import is_extension

    if not is_extension(epochs, steps):
        raise ConfigError(
            "control.extend",
            "either --epochs or --steps must be given, as a whole number above 0.",
            fix=f"lorafusion extend {quoted(run)} {adapter} --epochs 1",
        )
    more = {"steps": steps} if epochs is None else {"epochs": epochs}
    _send_request(run, "extend", adapter, **{key: value for key, value in more.items() if value is not None})


def add_adapter(run: RunPath, jobs: JobFile, overrides: Overrides = None) -> None:
    """Adds the adapters of another job file to a run.

    The file says what is their own: data, rank, targets, optimizer … What all adapters of a run share is the run's; the
    file leaves it out or says the same. Data are read here first, so that a mistake never reaches the run.

    Example: lorafusion add runs/exp1 more.yaml

    Example: lorafusion add runs/exp1 more.yaml optim.lr=1e-4
    """
    from lorafusion_jax.checkpoint.folder import RunFolder
    from lorafusion_jax.checkpoint.requests import pending_requests, write_addition
    from lorafusion_jax.config.job_checks import ineffective
    from lorafusion_jax.config.join import check_names, read_joining
    from lorafusion_jax.planning.checks import checked_data
    from lorafusion_jax.report.data_notes import data_notes

    folder = RunFolder(run)
    config = folder.read_config()
    adapters = read_joining(jobs, config, overrides or ())
    waiting = [settings for request in pending_requests(run) for settings in request.settings]
    check_names(adapters, config.model_copy(update={"adapters": (*config.adapters, *waiting)}))
    joint_config = config.model_copy(update={"adapters": adapters})
    _, prepared = checked_data(joint_config, [])
    warn(out(), ineffective(joint_config) + data_notes(joint_config, prepared))
    write_addition(run, adapters)
    _say_asked(run, f"add {', '.join(adapter.name for adapter in adapters)}")


def _send_request(run: Path, action: Action, adapter: str, value: float | None = None, **options: int) -> None:
    from lorafusion_jax.api.status import run_numbers
    from lorafusion_jax.checkpoint.folder import RunFolder
    from lorafusion_jax.checkpoint.requests import has_ended, status_after_requests, write_request

    config = RunFolder(run).read_config()
    numbers = run_numbers(run)
    status_by_name = status_after_requests(run, {name: row["status"] for name, row in numbers["adapters"].items()})
    if adapter not in status_by_name:
        raise ConfigError(
            "control.unknown-adapter",
            f"there is no adapter '{adapter}' in {run}.",
            fix=f"one of: {', '.join(status_by_name)}",
        )
    status = status_by_name[adapter]
    waits = status != numbers["adapters"].get(adapter, {}).get("status")
    if has_ended(action, status):
        raise ConfigError(
            "control.ended",
            f"{adapter} is {status}{' by a request that waits' if waits else ''}: it has nothing left to train.",
            fix=f"lorafusion extend {quoted(run)} {adapter} --epochs 1   trains it further" if status == "done" else "",
        )
    write_request(run, action, adapter, value, **options)
    if action == "extend" and adapter in numbers["adapters"]:
        say(out(), _rates_of_extension(config.adapter(adapter).optim))
    _say_asked(run, " ".join([action, adapter, *(f"--{key} {number}" for key, number in options.items())]), numbers)


def _say_asked(run: Path, request: str, numbers: dict | None = None) -> None:
    from lorafusion_jax.api.status import run_numbers

    numbers, console = numbers or run_numbers(run), out()
    if numbers["state"] == "running" and numbers["alive"] is not False:
        say(console, f"asked: {request}. The run does so when the microbatches under way are through.")
        next_command(console, f"lorafusion status {quoted(run)} --watch")
    else:
        say(console, f"asked: {request}. The run is not training and applies it when it is resumed.")
        next_command(console, f"lorafusion resume {quoted(run)}")


def _rates_of_extension(optim: OptimSettings) -> str:
    """What becomes of the learning rate where an adapter is extended."""
    from lorafusion_jax.optim.schedules import schedule

    text = "The steps planned before keep their learning rates. The new steps have a schedule of their own: "
    text += f"after their warm-up {optim.schedule} " if optim.warmup else f"{optim.schedule} "
    if not schedule(optim.schedule).falls:
        return text + f"at {optim.lr:g}."
    return text + f"from {optim.lr:g} to {optim.lr * optim.min_lr_ratio:g}; what had fallen rises again."
