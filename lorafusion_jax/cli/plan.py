"""lorafusion plan: the whole run before any device is touched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from lorafusion_jax.cli.check import data_notes
from lorafusion_jax.cli.common import JobFile, Json, Overrides, next_command, out, warn
from lorafusion_jax.config import load_config
from lorafusion_jax.config.load import ineffective
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.prepare import Prepared, plan_training, prepare
from lorafusion_jax.report.comparison import slots_one_after_another
from lorafusion_jax.report.format import count, percent
from scheduling import Plan

NAME = "plan"


def command(jobs: JobFile, overrides: Overrides = None,
            output: Annotated[Path | None, typer.Option("--output", "-o", help="write the plan here")] = None,
            compare: Annotated[bool, typer.Option(help="also plan the adapters one after another")] = False,
            as_json: Json = False) -> None:
    """Plans a run: rows, tokens, steps, microbatches, padding. Example: lorafusion plan jobs.yaml -o plan.json"""
    config = load_config(jobs, overrides or ())
    prepared = prepare(config)
    plan = plan_training(config, prepared)
    if output:
        output.write_text(plan.to_json(), encoding="utf-8")
    numbers = plan_numbers(config, prepared, plan) | (
        {"slots_one_after_another": slots_one_after_another(plan)} if compare else {})
    notes = ineffective(config) + data_notes(prepared)
    if as_json:
        print(json.dumps(numbers | {"warnings": notes}))
        return
    console = out()
    show_plan(console, config, numbers)
    warn(console, notes)
    next_command(console, f"lorafusion train {jobs} --out runs/{jobs.stem}" + (f" --plan {output}" if output else ""))


def plan_numbers(config: JobConfig, prepared: Prepared, plan: Plan) -> dict:
    """Everything that the plan screen shows, as plain numbers."""
    last = {name: slot for slot, name, _ in plan.batches_ending()}
    adapters = {}
    for adapter in config.adapters:
        report, data = prepared.adapters[adapter.name].train.report, prepared.adapters[adapter.name]
        adapters[adapter.name] = {
            "rows": report.rows, "tokens": int(data.stream_tokens().sum()), "longest": report.longest, "cut": report.cut,
            "no_loss": len(report.dropped), "rank": adapter.lora.rank, "steps": plan.job_of[adapter.name].num_batches,
            "finishes_slot": last[adapter.name] + 1}
    return {"plan": plan.digest, "adapters": adapters, "slots": plan.num_slots, "noops": plan.num_noops,
            "lower_bound": plan.lower_bound, "gap": plan.gap, "density": plan.density, "tokens": plan.tokens,
            "capacity_tokens": plan.capacity_tokens, "stages": plan.num_stages}


def show_plan(console, config: JobConfig, numbers: dict) -> None:
    """Prints the plan screen."""
    stages = "1 stage" if numbers["stages"] == 1 else f"{numbers['stages']} stages"
    console.print(f"plan {numbers['plan'][:12]}  ·  base {Path(config.base.model).name}  ·  {stages}  ·  "
                  f"capacity {numbers['capacity_tokens']} tokens\n", highlight=False)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("adapter", "rows", "tokens", "max", "cut", "no-loss", "rank", "steps", "finishes"):
        table.add_column(title, justify="left" if title == "adapter" else "right", no_wrap=True)
    for name, row in numbers["adapters"].items():
        table.add_row(name, f"{row['rows']}", count(row["tokens"]), f"{row['longest']}", f"{row['cut']}",
                      f"{row['no_loss']}", f"{row['rank']}", f"{row['steps']}", f"mb {row['finishes_slot']}")
    console.print(table)
    console.print(f"\nmicrobatches {numbers['slots']}   capacity used {percent(numbers['density'])}   no-ops "
                  f"{numbers['noops']}   over the lower bound {percent(numbers['gap'])}", highlight=False)
    if "slots_one_after_another" in numbers:
        alone = numbers["slots_one_after_another"]
        console.print(f"one after another {alone} microbatches   together {numbers['slots']}   "
                      f"{alone / numbers['slots']:.2f}×", highlight=False)
