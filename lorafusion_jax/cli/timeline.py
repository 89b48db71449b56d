"""lorafusion timeline: draws what the devices of a run did, beside what was predicted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.cli.common import RunPath, next_command, out, say
from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.report.format import duration, percent
from scheduling import CostModel, Timeline, simulate, timeline_html, to_perfetto

NAME = "timeline"
FILE = "timeline.json"  # in a run folder, of its last sitting


def command(
    run: RunPath,
    to: Annotated[Path, typer.Option("--out", "-o", help="an .html page, or .json for ui.perfetto.dev")] = Path(
        "timeline.html"
    ),
    cost_model: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="predict with these costs, from lorafusion profile")
    ] = None,
) -> None:
    """Draws the measured timeline of a run's last sitting; with costs, the predicted one above it.

    Example: lorafusion timeline runs/exp1 -o timeline.html --cost-model costs.json
    """
    measured = read_timeline(run)
    predicted = None
    if cost_model:
        costs = CostModel.from_json(cost_model.read_text(encoding="utf-8"))
        seen = {span.slot for span in measured.spans}
        predicted = simulate(RunFolder(run).read_plan(), costs).of_slots(range(min(seen), max(seen) + 1))
    if to.suffix == ".json":
        to.write_text(json.dumps(to_perfetto(measured, compare=predicted)), encoding="utf-8")
    else:
        to.write_text(timeline_html(measured, compare=predicted), encoding="utf-8")
    console = out()
    say(console, f"measured: {duration(measured.duration_s)}, bubbles {percent(measured.bubble_share)}  ·  {to}")
    if predicted:
        ratio = predicted.duration_s / measured.duration_s
        say(console, f"predicted: {duration(predicted.duration_s)}, {ratio:.3f} of measured")
    next_command(console, f"lorafusion status {run}")


def read_timeline(run: Path) -> Timeline:
    """The measured timeline of a run's last sitting.

    Raises:
        CheckpointError: there is none.
    """
    file = run / FILE
    if not file.is_file():
        raise CheckpointError(
            "run.no-timeline",
            f"there is no {FILE} in {run}.",
            why="a sitting writes it when it ends",
            fix="lorafusion status",
        )
    return Timeline.from_json(file.read_text(encoding="utf-8"))
