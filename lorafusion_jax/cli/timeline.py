"""lorafusion timeline: draws the measured timeline of a run, with its prediction."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorafusion_jax.cli.common import Json, RunPath, ends_in, next_command
from lorafusion_jax.errors import LoraFusionError, quoted
from lorafusion_jax.files import make_folders, write_output
from lorafusion_jax.layout.extent import extents
from lorafusion_jax.report.console import out, plain_table, say
from lorafusion_jax.report.format import better_layers, duration, percent
from lorafusion_jax.report.recorder import read_rows

if TYPE_CHECKING:
    from lorafusion_jax.planning.rebalance import Moved
    from scheduling import Timeline


def command(
    run: RunPath,
    to: Annotated[Path, typer.Option("--out", "-o", help="an .html page, or .json for ui.perfetto.dev")] = Path(
        "timeline.html"
    ),
    cost_model: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="costs for the prediction, from lorafusion profile")
    ] = None,
    all_slots: Annotated[
        bool, typer.Option("--whole", help="also compare the first slots, in which the pipeline fills and GPUs warm up")
    ] = False,
    as_json: Json = False,
) -> None:
    """Draws the measured timeline of a run's last session; with costs, the predicted one above it.

    If stages took unequal times, it suggests other layers per stage.

    Example: lorafusion timeline runs/exp1 -o timeline.html --cost-model costs.json
    """
    from lorafusion_jax.checkpoint.folder import RunFolder
    from lorafusion_jax.report.measured import read_timeline
    from scheduling import timeline_html, to_perfetto

    ends_in(to, ".html", ".json")
    RunFolder(run).read_record()  # raises if it is not a run folder
    measured, predicted, comparison = read_timeline(run), None, {}
    if cost_model:
        predicted, slots = _predict(run, measured, cost_model, all_slots=all_slots)
        comparison = _comparison(predicted, measured, slots)
        measured, predicted = measured.of_slots(slots), predicted.of_slots(slots)
    first, second = (measured, None) if predicted is None else (predicted, measured)
    kinds = ("measured",) if predicted is None else ("predicted", "measured")
    make_folders(to.parent)
    if to.suffix == ".json":
        write_output(to, json.dumps(to_perfetto(first, compare=second)))
    else:
        write_output(to, timeline_html(first, title=f"{run}: {' and '.join(kinds)}", compare=second))
    numbers = _numbers(measured) | comparison
    if (better_split := _find_move(run, measured)) is not None:
        numbers["better_layers"] = better_split._asdict()
    if as_json:
        print(json.dumps(numbers | {"file": str(to)}))
        return
    _show(numbers)
    console = out()
    say(console, f"drawn in {to}" + ("  ·  open it at ui.perfetto.dev" if to.suffix == ".json" else ""))
    next_command(console, f"lorafusion status {quoted(run)}")


def _predict(run: Path, measured: Timeline, cost_model: Path, *, all_slots: bool) -> tuple[Timeline, range]:
    """(predicted timeline, slots to compare)"""
    from lorafusion_jax.checkpoint.folder import RunFolder
    from lorafusion_jax.planning.prediction import measured_with, read_costs
    from lorafusion_jax.report.measured import settled_slots
    from scheduling import simulate

    folder, start = RunFolder(run), _start_event(run, measured.num_stages)
    plan, layers, base = folder.read_plan(), start["layers"], folder.read_config().base
    costs = read_costs(cost_model, _layers_by_cost(run, layers))
    costs.check_layers(layers)
    costs.check_capacity(*plan.sizes)
    costs.check_measured_with(
        measured_with(
            dtype=base.dtype,
            quantize=base.quantize,
            parameters=start["frozen"],
            fsdp=start["mesh"]["fsdp"],
            tensor=start["mesh"]["tensor"],
            remat=start["remat"],
        )
    )
    slots_of_spans = {span.slot for span in measured.spans}
    slots = range(min(slots_of_spans), max(slots_of_spans) + 1) if all_slots else settled_slots(plan, measured)
    return simulate(plan, costs), slots


def _start_event(run: Path, stages: int) -> dict:
    """The "started" event of the last session with this number of stages."""
    events = [event for event in read_rows(run / "events.jsonl") if event["kind"] == "started"]
    return [event for event in events if len(event["layers"]) == stages][-1]


def _find_move(run: Path, measured: Timeline) -> Moved | None:
    """Suggested layers per stage, from the stage times of settled slots."""
    from lorafusion_jax.checkpoint.base_model import base_directory
    from lorafusion_jax.checkpoint.folder import RunFolder
    from lorafusion_jax.families.model import ModelConfig
    from lorafusion_jax.planning.prediction import better_layout, known_device, memory_of
    from lorafusion_jax.report.measured import settled_slots

    if measured.num_stages == 1:
        return None
    folder, start = RunFolder(run), _start_event(run, measured.num_stages)
    config = folder.read_config()
    try:
        model = ModelConfig.from_hf(base_directory(config))
    except LoraFusionError:  # without the base model the measured timeline can still be drawn
        return None
    return better_layout(
        config,
        model,
        extents(start["layers"]),
        measured.of_slots(settled_slots(folder.read_plan(), measured)).busy_s,
        remat=start["remat"],
        device_bytes=memory_of(known_device(start["device"]) or ""),
    )


def _layers_by_cost(run: Path, layers: Sequence[int | float]) -> Sequence[float]:
    """Layers of each stage; half a layer counts by its cost."""
    from lorafusion_jax.checkpoint.base_model import base_directory
    from lorafusion_jax.checkpoint.folder import RunFolder
    from lorafusion_jax.families.model import ModelConfig
    from lorafusion_jax.planning.stages import worth_in_layers

    if all(isinstance(count, int) for count in layers):
        return layers
    model = ModelConfig.from_hf(base_directory(RunFolder(run).read_config()))
    return worth_in_layers(model, extents(layers))


def _numbers(measured: Timeline) -> dict:
    slots = {span.slot for span in measured.spans}
    return {"slots": [min(slots), max(slots)], "measured": _figures(measured)}


def _comparison(predicted: Timeline, measured: Timeline, slots: range) -> dict:
    """The comparison of the whole measured timeline with the whole prediction."""
    from scheduling import compare_timelines

    comparison = compare_timelines(predicted, measured, slots)
    return {
        "predicted": _figures(predicted.of_slots(slots)),
        "wall_ratio": comparison.wall_ratio,
        "busy_ratios": list(comparison.busy_ratios),
        "host_wait_s": list(comparison.host_wait_s),
    }


def _figures(timeline: Timeline) -> dict:
    return {
        "seconds": timeline.working_s,
        "paused_s": timeline.duration_s - timeline.working_s,
        "bubble_share": timeline.bubble_share,
        "bubble_shares": list(timeline.bubble_shares),
        "fill_drain_s": timeline.fill_drain_s,
        "tokens_per_s": timeline.tokens_per_s,
    }


def _show(numbers: dict) -> None:
    console = out()
    kinds = [name for name in ("predicted", "measured") if name in numbers]
    stages = range(len(numbers["measured"]["bubble_shares"]))
    table = plain_table(("",), ("time", "bubbles", *(f"stage {stage}" for stage in stages)))
    for name in kinds:
        row = numbers[name]
        shares = (percent(share) for share in (row["bubble_share"], *row["bubble_shares"]))
        table.add_row(name, duration(row["seconds"]), *shares)
    console.print(table)
    first, last = numbers["slots"]
    say(console, f"microbatches {first + 1} to {last + 1} of the plan; bubbles are idle time between fill and drain")
    if pause_s := numbers["measured"]["paused_s"]:
        say(console, f"evaluations and checkpoints took {duration(pause_s)} more, which these figures exclude")
    if better_split := numbers.get("better_layers"):
        say(console, better_layers(**better_split))
    if "predicted" in numbers:
        if first == 0:
            say(console, "pipeline and caches filled during the first slots, which the prediction does not model")
        passes = "  ".join(f"{ratio:.2f}" for ratio in numbers["busy_ratios"])
        say(console, f"measured / predicted: {numbers['wall_ratio']:.3f}; time in passes, per stage: {passes}")
        say(console, f"waiting for the host: {duration(max(numbers['host_wait_s']))} on the worst stage")
