"""The screen of `lorafusion plan`."""

from __future__ import annotations

from pathlib import Path

from lorafusion_jax.cli.common import (
    plain_table,
    say,
)
from lorafusion_jax.cli.plan_memory import show_memory
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.report.format import count, duration, exact, percent, sizes

FLOOR_OF = "(linear layers and head on H200s, no attention)"


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
        console.print(_comparison_line(numbers), highlight=False)
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


def _comparison_line(numbers: dict) -> str:
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
