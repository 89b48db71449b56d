"""lorafusion plan: plans and predicts a run without using a device."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.cli.common import (
    JobFile,
    Json,
    Overrides,
    checked_data,
    ends_in,
    layer_problems,
    next_command,
    out,
    plain_table,
    say,
    typed,
    warn,
)
from lorafusion_jax.cli.plan_memory import GIB, remedy, show_memory
from lorafusion_jax.config.load import examine_config, ineffective
from lorafusion_jax.config.model import ModelConfig
from lorafusion_jax.config.overrides import unreached
from lorafusion_jax.config.read import read_source
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.files import replace_text
from lorafusion_jax.planning.comparison import plans_one_after_another
from lorafusion_jax.planning.floor import plan_floor_s
from lorafusion_jax.planning.pauses import LEFT_OUT, predicted_pauses
from lorafusion_jax.planning.prediction import (
    adapter_tokens,
    measured_costs,
    memory_of,
    predicted_costs,
    predicted_memory,
    predicted_parameters,
    this_device,
)
from lorafusion_jax.planning.training_plan import plan_training, slots_of_sizes
from lorafusion_jax.report.data_notes import data_notes
from lorafusion_jax.report.format import count, duration, exact, percent, sizes
from scheduling import CostModel, Plan, plan_statistics, simulate, timeline_html

NAME = "plan"
FLOOR_OF = "(linear layers and head on H200s, no attention)"


def command(
    jobs: JobFile,
    overrides: Overrides = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="write the plan here")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="compare with one adapter after another")] = False,
    timeline: Annotated[Path | None, typer.Option(help="draw the predicted timeline as an .html page")] = None,
    device: Annotated[
        Literal["h200", "h100", "cpu"] | None,
        typer.Option(help="device for predictions; default that of this machine"),
    ] = None,
    device_memory: Annotated[float | None, typer.Option(min=0, help="GiB per device; default by device")] = None,
    cost_model: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="measured costs, from lorafusion profile")
    ] = None,
    as_json: Json = False,
) -> None:
    """Plans a run: rows, tokens, steps, microbatches, predicted times, memory per stage.

    Example: lorafusion plan jobs.yaml -o plan.json
    """
    if timeline:
        ends_in(timeline, ".html")
    config, errors = examine_config(jobs, overrides or ())
    layers = layer_problems(config)[1] if config else []  # checks before planning
    config, prepared = checked_data(config, [*errors, *layers])
    planned = make_planned(
        config, prepared, device=device, device_memory=device_memory, cost_model=cost_model, compare=compare
    )
    costs, numbers = planned.costs, planned.numbers
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        replace_text(output, planned.plan.to_json())
    if timeline and costs:
        timeline.parent.mkdir(parents=True, exist_ok=True)
        replace_text(timeline, planned.timeline_html())
    notes = [*unreached(read_source(jobs), overrides or ()), *ineffective(config), *planned.notes]
    if as_json:
        print(json.dumps(numbers | {"warnings": notes}))
        return
    console = out()
    show_plan(console, config, numbers)
    if timeline and costs:
        say(console, f"timeline {timeline}")
    warn(console, notes)
    memory = numbers["memory"]
    if memory and memory["advice"]:
        next_command(console, f"lorafusion plan {typed(jobs, [*(overrides or ()), remedy(config, memory)])}")
        return
    own = f" --plan {output}" if output else ""
    next_command(console, f"lorafusion train {typed(jobs, overrides)} --out runs/{jobs.stem}{own}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan with everything that is predicted of it.

    Args:
        costs: of the stages; None where the base model is of no known kind.
        numbers: what the plan screen shows.
        notes: what a user should know of the data and of the prediction.
    """

    config: JobConfig
    plan: Plan
    costs: CostModel | None
    numbers: dict
    notes: tuple[str, ...]

    def timeline_html(self) -> str:
        """The predicted timeline as a page; needs costs."""
        assert self.costs is not None
        return timeline_html(simulate(self.plan, self.costs), note=plan_statistics(self.plan, self.costs).hint)


def make_planned(
    config: JobConfig,
    prepared: Prepared,
    *,
    device: str | None = None,
    device_memory: float | None = None,
    cost_model: Path | None = None,
    compare: bool = False,
) -> Planned:
    """Plans a job and predicts its times and memory; the arguments are the options of `lorafusion plan`."""
    plan = plan_training(config, prepared)
    kind = device or this_device()
    model, notes = _model(config)
    costs = None if model is None else predicted_costs(config, model, kind, adapter_tokens(prepared))
    if cost_model:
        costs = measured_costs(config, model, cost_model)
    memory = floor_s = None
    parameters = {"own_parameters": None, "stored_parameters": None, "stored": None}
    if model is not None:
        parameters = predicted_parameters(config, model)
        memory = predicted_memory(config, model, int(device_memory * GIB) if device_memory else memory_of(kind))
        floor_s = plan_floor_s(config, model, prepared, plan, kind)
    numbers = plan_numbers(config, prepared, plan, costs) | parameters | {"floor_s": floor_s, "memory": memory}
    if model is not None and costs is not None:
        numbers["predicted"] |= _pause_numbers(config, model, prepared, plan, costs, numbers["predicted"], kind)
    if compare:
        numbers |= comparison(plan, costs)
    notes = (*notes, *data_notes(config, prepared))
    return Planned(config=config, plan=plan, costs=costs, numbers=numbers, notes=notes)


def _model(config: JobConfig) -> tuple[ModelConfig | None, list[str]]:
    """The configuration of the base model, or why there are no predictions. Planning does not need it."""
    try:
        return ModelConfig.from_hf(base_directory(config)), []
    except CheckpointError as problem:
        return None, [f"no times and no memory are predicted: {problem.what}"]


def plan_numbers(config: JobConfig, prepared: Prepared, plan: Plan, costs: CostModel | None) -> dict:
    """The content of the plan screen as plain numbers; predictions are None without costs."""
    statistics = plan_statistics(plan, costs) if costs else None
    finish_s = {adapter.name: adapter.finish_s for adapter in statistics.adapters} if statistics else {}
    last = {name: slot for slot, name, _ in plan.batches_ending()}
    adapters = {}
    for adapter in config.adapters:
        report, data = prepared.adapters[adapter.name].train.report, prepared.adapters[adapter.name]
        adapters[adapter.name] = {
            "rows": report.rows,
            "tokens": int(data.stream_tokens().sum()),
            "longest": report.longest,
            "cut": report.cut,
            "no_loss": len(report.dropped),
            "too_long": len(report.too_long),
            "rank": adapter.lora.rank,
            "steps": plan.job_of[adapter.name].num_batches,
            "finishes_slot": last[adapter.name] + 1,
            "finishes_s": finish_s.get(adapter.name),
        }
    predicted = (
        None
        if statistics is None or costs is None
        else {
            "costs": costs.source,
            "seconds": statistics.duration_s,
            "bubble_share": statistics.bubble_share,
            "fill_drain_s": statistics.fill_drain_s,
            "tokens_per_s": statistics.tokens_per_s,
            "limit": statistics.hint,
        }
    )
    return {
        "plan": plan.digest,
        "adapters": adapters,
        "slots": plan.num_slots,
        "noops": plan.num_noops,
        "lower_bound": plan.lower_bound,
        "gap": plan.gap,
        "density": plan.density,
        "tokens": plan.tokens,
        "capacity_tokens": plan.capacity_tokens,
        "sizes": slots_of_sizes(plan),
        "stages": plan.num_stages,
        "data_parallel": plan.data_parallel,
        "predicted": predicted,
    }


def _pause_numbers(
    config: JobConfig,
    model: ModelConfig,
    prepared: Prepared,
    plan: Plan,
    costs: CostModel,
    predicted: Mapping[str, Any],
    device: str,
) -> dict:
    """What evaluations and saves add to the predicted seconds of the slots."""
    duration_s = predicted["seconds"]
    pauses = predicted_pauses(config, model, prepared, plan, costs, duration_s=duration_s, device=device)
    wall_s = duration_s + pauses.evaluation_s + pauses.saving_s
    return dataclasses.asdict(pauses) | {"wall_s": wall_s, "leaves_out": list(LEFT_OUT)}


def comparison(plan: Plan, costs: CostModel | None) -> dict:
    """Slots and predicted seconds of the same adapters one after another, each with its best plan."""
    alone = plans_one_after_another(plan)
    return {
        "slots_one_after_another": sum(one.num_slots for one in alone),
        "seconds_one_after_another": sum(simulate(one, costs).duration_s for one in alone) if costs else None,
    }


def show_plan(console, config: JobConfig, numbers: dict) -> None:
    """Prints the plan screen."""
    predicted = numbers["predicted"]
    stages = "1 stage" if numbers["stages"] == 1 else f"{numbers['stages']} stages"
    replicas = f" × {numbers['data_parallel']} replicas" if numbers["data_parallel"] > 1 else ""
    console.print(
        f"plan {numbers['plan'][:12]}  ·  base {Path(config.base.model).name}  ·  {stages}{replicas}  ·  "
        f"capacity {sizes(config.batch.sizes)} tokens\n",
        highlight=False,
    )
    table = plain_table(("adapter",), ("rows", "tokens", "max", "cut", "no-loss", "rank", "steps", "finishes"))
    for name, row in numbers["adapters"].items():
        finishes = f"mb {exact(row['finishes_slot'])}" if row["finishes_s"] is None else duration(row["finishes_s"])
        table.add_row(
            name,
            exact(row["rows"]),
            count(row["tokens"]),
            exact(row["longest"]),
            exact(row["cut"]),
            exact(row["no_loss"]),
            f"{row['rank']}",
            exact(row["steps"]),
            finishes,
        )
    console.print(table)
    slots, noops = numbers["slots"], numbers["noops"]
    bubbles = f"   bubbles {percent(predicted['bubble_share'])}" if predicted else ""
    console.print(
        f"\nmicrobatches {exact(slots - noops)}   capacity used {percent(numbers['density'])}   "
        f"no-ops {exact(noops)} ({percent(noops / max(slots, 1))}){bubbles}",
        highlight=False,
    )
    least = "" if numbers["floor_s"] is None else f"{duration(numbers['floor_s'])} at the least {FLOOR_OF}"
    if "slots_one_after_another" in numbers:
        console.print(_compared(numbers), highlight=False)
        if least:
            say(console, f"  together {least}")
    elif predicted:
        takes = f"takes {duration(predicted['seconds'])} at {count(predicted['tokens_per_s'])} useful tok/s"
        say(console, f"{takes}, {least}" if least else takes)
    limit = f"; limited by: {predicted['limit']}" if predicted else ""
    if numbers["sizes"]:
        own = ", ".join(f"{exact(many)} of {exact(int(size))}" for size, many in numbers["sizes"].items())
        say(console, f"  {own} tokens{limit}")
    else:
        over = f"{percent(numbers['gap'])} over the lower bound of {exact(numbers['lower_bound'])} slots"
        say(console, f"  {over}{limit}")
    if predicted:
        if "wall_s" in predicted:
            say(console, f"  {_with_pauses(predicted)}")
        say(console, f"  times and bubbles are predictions: {predicted['costs']}")
    if numbers["memory"]:
        show_memory(console, numbers["memory"])


def _with_pauses(predicted: dict) -> str:
    parts = [
        f"{exact(predicted[number])} {what}{'' if predicted[number] == 1 else 's'} ({duration(predicted[seconds])})"
        for number, what, seconds in (("evaluations", "evaluation", "evaluation_s"), ("saves", "save", "saving_s"))
        if predicted[number]
    ]
    return f"with {' and '.join(parts)} {duration(predicted['wall_s'])}, without {', '.join(predicted['leaves_out'])}"


def _compared(numbers: dict) -> str:
    alone, together = numbers["slots_one_after_another"], numbers["slots"]
    if not numbers["predicted"] and numbers["sizes"]:  # slots of different sizes are no measure of time
        return f"one after another {exact(alone)} slots   together {exact(together)}"
    if not numbers["predicted"]:
        return f"one after another {exact(alone)} slots   together {exact(together)}   {alone / together:.2f}×"
    alone_s, together_s = numbers["seconds_one_after_another"], numbers["predicted"]["seconds"]
    return (
        f"one after another {duration(alone_s)} ({exact(alone)} slots)   together {duration(together_s)} "
        f"({exact(together)})   {alone_s / together_s:.2f}×"
    )
