"""lorafusion plan: plans and predicts a run without using a device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lorafusion_jax.cli.common import JobFile, Json, Overrides, ends_in, next_command, typed
from lorafusion_jax.errors import quoted
from lorafusion_jax.files import make_folders, write_output
from lorafusion_jax.report.console import out, plain_table, say, warn
from lorafusion_jax.report.format import count, duration, exact, percent

if TYPE_CHECKING:
    from rich.console import Console

    from lorafusion_jax.config.schema import JobConfig
    from lorafusion_jax.planning.choices import Choice, Choices
    from lorafusion_jax.planning.network import Network
    from lorafusion_jax.planning.prediction import PredictedMemory

MOST_ROWS = 12  # of compared meshes

# Options of predictions.
PANEL = "Predictions"
Device = Annotated[
    Literal["h200", "h100", "a100-40gb", "a100", "l40s", "a6000", "rtx6000-ada", "cpu"] | None,
    typer.Option(
        help="device for predictions", show_default="that of this machine, which the plan names", rich_help_panel=PANEL
    ),
]
DeviceMemory = Annotated[
    float | None, typer.Option(min=0, help="GiB per device", show_default="by device", rich_help_panel=PANEL)
]
CostFile = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="measured costs, from lorafusion profile", rich_help_panel=PANEL),
]
Gpus = Annotated[
    int | None,
    typer.Option(
        min=1, max=1024, help="compare all meshes of so many devices, and sizes of microbatches", rich_help_panel=PANEL
    ),
]
Processes = Annotated[
    int, typer.Option(min=1, max=1024, help="processes of the run, one on each host", rich_help_panel=PANEL)
]
LinkGB = Annotated[
    float | None,
    typer.Option(min=0.001, help="GB/s that a host sends to another", show_default="by device", rich_help_panel=PANEL),
]
LinkMicroseconds = Annotated[
    float | None, typer.Option(min=0, help="latency between hosts in µs", show_default="200", rich_help_panel=PANEL)
]


def command(
    jobs: JobFile,
    overrides: Overrides = None,
    output: Annotated[Path | None, typer.Option("--out", "-o", "--output", help="write the plan here")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="compare with one adapter after another")] = False,
    timeline: Annotated[Path | None, typer.Option(help="draw the predicted timeline as an .html page")] = None,
    device: Device = None,
    device_memory: DeviceMemory = None,
    cost_model: CostFile = None,
    gpus: Gpus = None,
    processes: Processes = 1,
    link_gb: LinkGB = None,
    link_us: LinkMicroseconds = None,
    as_json: Json = False,
) -> None:
    """Plans a run: rows, tokens, steps, microbatches, predicted times, memory per stage.

    With --gpus it compares meshes and sizes of microbatches instead, and says which one to take and why.

    Example: lorafusion plan jobs.yaml -o plan.json
    """
    from lorafusion_jax.api.plan_screen import show_plan
    from lorafusion_jax.api.plans import check_start
    from lorafusion_jax.config.job_checks import ineffective
    from lorafusion_jax.config.load import examine_config, read_job_file
    from lorafusion_jax.config.overrides import unreached
    from lorafusion_jax.planning.auto import GIB, resolve_auto
    from lorafusion_jax.planning.checks import base_problems, checked_data, layer_problems, weight_notes
    from lorafusion_jax.planning.network import network_of
    from lorafusion_jax.planning.planned import make_planned
    from lorafusion_jax.planning.prediction import this_device
    from lorafusion_jax.report.trackers import missing_packages

    network = network_of(device or this_device(), processes, gigabytes=link_gb, microseconds=link_us)
    if gpus is not None:
        _compare(jobs, overrides, gpus, device, network, as_json=as_json)
        return
    if timeline:
        ends_in(timeline, ".html")
    config, errors = examine_config(jobs, overrides or ())
    layers = layer_problems(config)[1] if config else []  # checks before planning
    config, prepared = checked_data(config, [*errors, *layers, *base_problems(config)])
    check_start(config, prepared)
    memory_bytes = None if device_memory is None else int(device_memory * GIB)
    config, why = resolve_auto(
        config, prepared, device=device or this_device(), memory_bytes=memory_bytes, network=network
    )
    planned = make_planned(
        config,
        prepared,
        device=device,
        device_memory=device_memory,
        cost_model=cost_model,
        compare=compare,
        network=network,
    )
    if output:
        make_folders(output.parent)
        write_output(output, planned.plan.to_json())
    if timeline and planned.costs:
        make_folders(timeline.parent)
        write_output(timeline, planned.timeline_html())
    notes = [*unreached(read_job_file(jobs), overrides or ()), *ineffective(config)]
    notes += [*missing_packages(config.report), *planned.notes, *weight_notes(config)]
    notes += [f"auto chose {why}"] if why else []
    if as_json:
        print(json.dumps(planned.to_json() | {"warnings": notes}))
        return
    console = out()
    show_plan(console, planned)
    if timeline and planned.costs:
        say(console, f"timeline {timeline}")
    warn(console, notes)
    if planned.memory and planned.memory.advice:
        setting = _setting_to_try(config, planned.memory)
        next_command(console, f"lorafusion plan {typed(jobs, [*(overrides or ()), setting])}")
        return
    plan_option = f" --plan {quoted(output)}" if output else ""
    next_command(console, f"lorafusion train {typed(jobs, overrides)} --out {quoted(f'runs/{jobs.stem}')}{plan_option}")


def _compare(
    jobs: Path, overrides: Overrides, gpus: int, chosen: str | None, network: Network, *, as_json: bool
) -> None:
    """Shows every mesh of so many devices; reads no timeline and writes no plan."""
    from lorafusion_jax.api.plans import check_start
    from lorafusion_jax.checkpoint.base_model import base_directory
    from lorafusion_jax.config.load import examine_config
    from lorafusion_jax.families.model import ModelConfig
    from lorafusion_jax.planning.checks import base_problems, checked_data
    from lorafusion_jax.planning.choices import compare_choices
    from lorafusion_jax.planning.prediction import machine_note, this_device

    device = chosen or this_device()
    config, errors = examine_config(jobs, overrides or ())
    config, prepared = checked_data(config, [*errors, *base_problems(config)])
    check_start(config, prepared)
    model = ModelConfig.from_hf(base_directory(config))
    comparison = compare_choices(config, model, prepared, device=device, gpus=gpus, network=network)
    if as_json:
        choices = [choice.to_json() for choice in comparison.choices]
        print(json.dumps({"device": device, "gpus": gpus, "choices": choices, "why": comparison.why}))
        return
    console = out()
    _show_choices(console, comparison)
    if chosen is None:
        say(console, f"\n{machine_note()}")
    if comparison.best is not None:
        settings = [*(overrides or ()), *comparison.best.settings]
        next_command(console, f"lorafusion train {typed(jobs, settings)} --out {quoted(f'runs/{jobs.stem}')}")


def _setting_to_try(config: JobConfig, memory: PredictedMemory) -> str:
    """The setting to try next if a plan does not fit, preferably at the same capacity."""
    advice = memory.advice or ""
    if advice.startswith("more"):
        stages, fsdp = 2 * config.mesh.stages, 2 * config.mesh.fsdp
        return f"mesh.stages={stages}" if stages <= sum(memory.layers) else f"mesh.fsdp={fsdp}"
    return advice.split(" or ")[-1].replace(": ", "=")


def _show_choices(console: Console, compared: Choices) -> None:
    """Prints the table, the fastest first, and why the first one is proposed."""
    from lorafusion_jax.weights.table import NONE

    devices = f"{compared.gpus} × {compared.device}" if compared.gpus > 1 else f"one {compared.device}"
    say(console, f"{devices}, default rates, nothing measured\n", style="bold")
    has_formats = any(choice.quantize != NONE for choice in compared.choices)
    shared = any(choice.tensor > 1 for choice in compared.choices)
    table = plain_table(
        ("stages × data × fsdp" + " × tensor" * shared, "capacity", *(("base as",) if has_formats else ()), "remat"),
        ("memory", "useful tok/s", "bubbles", "time"),
    )
    for index, choice in enumerate(compared.choices[:MOST_ROWS]):
        style = "bold green" if index == 0 and choice.fits is not False else "dim" if choice.fits is False else None
        table.add_row(*_cells_of_choice(choice, stored=has_formats, shared=shared), style=style)
    console.print(table)
    if (excess := len(compared.choices) - MOST_ROWS) > 0:
        say(console, f"{excess} more are slower or do not fit")
    if compared.why:
        say(console, f"\n{compared.why}")
    else:
        say(console, "\nnothing fits; more devices, or shorter samples", style="yellow")


def _cells_of_choice(choice: Choice, *, stored: bool, shared: bool) -> list[str]:
    from lorafusion_jax.planning.auto import GIB

    memory = f"{choice.memory_bytes / GIB:.1f} GiB" + (" too much" if choice.fits is False else "")
    times = (
        ["–", "–", "–"]
        if choice.seconds is None or choice.tokens_per_s is None
        else [count(choice.tokens_per_s), percent(choice.bubble_share or 0.0), duration(choice.seconds)]
    )
    mesh = f"{choice.stages} × {choice.data} × {choice.fsdp}" + (f" × {choice.tensor}" if shared else "")
    kind = (choice.quantize,) if stored else ()
    return [mesh, exact(choice.capacity_tokens), *kind, choice.remat, memory, *times]
