"""lorafusion profile: measures the stages of a job on this machine and saves a cost model for plan."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from lorafusion_jax.cli.common import JobFile, Overrides, next_command, typed
from lorafusion_jax.errors import ConfigError, quoted
from lorafusion_jax.files import make_folders, write_output
from lorafusion_jax.machine import prepare_machine
from lorafusion_jax.report.console import out, plain_table, say
from lorafusion_jax.report.events import PhaseBegun
from lorafusion_jax.report.format import better_layers, duration, percent


def command(
    jobs: JobFile,
    overrides: Overrides = None,
    to: Annotated[Path, typer.Option("--out", "-o", help="cost model, a .json file")] = Path("costs.json"),
    repeats: Annotated[int, typer.Option(min=1, help="number of measurements of each pass")] = 3,
) -> None:
    """Measures forward, backward, update and transfer of every stage on this machine.

    If stages take unequal times, it suggests other layers per stage.

    Example: lorafusion profile jobs.yaml -o costs.json
    """
    from lorafusion_jax.config import load_config
    from lorafusion_jax.training.profiling import profile
    from scheduling import simulate
    from scheduling.simulate import slot_squares

    if to.is_dir():  # checks before the long measurement
        raise ConfigError("output.folder", f"{to} is a folder.", fix=f"-o {to / 'costs.json'}")
    make_folders(to.parent)
    prepare_machine()
    console = out()
    with console.status("starting") as status:
        costs, plan, better = profile(
            load_config(jobs, overrides or []),
            repeats=repeats,
            listeners=[lambda event: status.update(event.text) if isinstance(event, PhaseBegun) else None],
        )
    write_output(to, costs.to_json())
    table = plain_table(("stage",), ("forward", "backward", "step"))
    full = [index for index, slot in enumerate(plan.slots) if not slot.is_noop]
    every = slot_squares(plan)
    tokens, squares = fmean(plan.slot_capacities[slot] for slot in full), fmean(every[slot] for slot in full)
    for number, stage in enumerate(costs.stages):
        passes = (
            stage.forward.seconds(tokens, squares),
            stage.backward.seconds(tokens, squares),
        )
        table.add_row(str(number), *(f"{1e3 * seconds:.1f} ms" for seconds in (*passes, stage.update_s)))
    console.print(table)
    say(
        console,
        f"a microbatch of {tokens:.0f} tokens as the plan fills it: attention as with samples of "
        f"{squares / tokens:.0f}; {costs.source}",
    )
    if better is not None:
        say(console, better_layers(**better._asdict()))
    timeline = simulate(plan, costs)
    say(console, f"the whole plan: {duration(timeline.duration_s)}, bubbles {percent(timeline.bubble_share)}")
    next_command(console, f"lorafusion plan {typed(jobs, overrides)} --cost-model {quoted(to)}")
