"""The screen of a plan: adapters, microbatches, times and memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lorafusion_jax.config.stack import residents
from lorafusion_jax.planning.memory import NOT_MODELLED
from lorafusion_jax.planning.pauses import LEFT_OUT
from lorafusion_jax.planning.planned import GIB, OneAfterAnother, Planned, PlannedAdapter, PredictedTimes
from lorafusion_jax.planning.prediction import PredictedMemory
from lorafusion_jax.report.console import most_telling, plain_table, say
from lorafusion_jax.report.format import count, duration, exact, percent, sizes
from lorafusion_jax.weights.table import NONE
from scheduling import Plan

FLOOR_OF = "(linear layers and head on H200s, no attention)"
MIB = 2**20
LESS = 0.95  # of the time without halving: what spares less deserves a hint


def show_plan(console: Console, planned: Planned) -> None:
    """Prints the plan screen."""
    plan, times, config = planned.plan, planned.times, planned.config
    stages = "1 stage" if plan.num_stages == 1 else f"{plan.num_stages} stages"
    replicas = f" × {plan.data_parallel} replicas" if plan.data_parallel > 1 else ""
    console.print(
        f"plan {plan.digest[:12]}  ·  base {Path(config.base.model).name}  ·  {stages}{replicas}  ·  "
        f"capacity {sizes(config.batch.sizes)} tokens\n",
        highlight=False,
    )
    adapters, omission = most_telling(planned.adapters, lambda adapter: adapter.tokens)
    console.print(_adapters(adapters))
    if omission:
        say(console, omission)
    bubbles = f"   bubbles {percent(times.bubble_share)}" if times else ""
    console.print(
        f"\nmicrobatches {exact(plan.num_slots - plan.num_noops)}   capacity used {percent(plan.density)}   "
        f"no-ops {exact(plan.num_noops)} ({percent(plan.num_noops / max(plan.num_slots, 1))}){bubbles}",
        highlight=False,
    )
    if (most := residents(config)) is not None:
        say(
            console,
            f"{exact(most)} of {exact(len(config.adapters))} adapters on the devices at a time, the others in host "
            f"memory; one comes to a place {exact(planned.moves or 0)} times",
        )
    _show_times(console, planned)
    if planned.memory:
        show_memory(console, planned.memory)


def _adapters(adapters: Mapping[str, PlannedAdapter]) -> Table:
    table = plain_table(("adapter",), ("rows", "tokens", "max", "cut", "no-loss", "rank", "steps", "finishes"))
    for name, adapter in adapters.items():
        table.add_row(
            name,
            exact(adapter.rows),
            count(adapter.tokens),
            exact(adapter.longest),
            exact(adapter.cut),
            exact(adapter.no_loss),
            f"{adapter.rank}",
            exact(adapter.steps),
            _finishes(adapter),
        )
    return table


def _finishes(adapter: PlannedAdapter) -> str:
    return f"mb {exact(adapter.finishes_slot)}" if adapter.finishes_s is None else duration(adapter.finishes_s)


def _show_times(console: Console, planned: Planned) -> None:
    plan, times = planned.plan, planned.times
    least = "" if planned.floor_s is None else f"{duration(planned.floor_s)} at the least {FLOOR_OF}"
    if planned.alone is not None:
        console.print(_comparison(plan, times, planned.alone), highlight=False)
        if least:
            say(console, f"  together {least}")
    elif times:
        takes = f"takes {duration(times.seconds)} at {count(times.tokens_per_s)} useful tok/s"
        say(console, f"{takes}, {least}" if least else takes)
    limit = f"; limited by: {times.limit}" if times else ""
    if plan.smaller:
        slots = ", ".join(f"{exact(many)} of {exact(size)}" for size, many in plan.slots_of_size.items())
        say(console, f"  {slots} tokens{limit}")
    else:
        over = f"{percent(plan.gap)} over the lower bound of {exact(plan.lower_bound)} slots"
        say(console, f"  {over}{limit}")
    if times:
        if times.halved_s is not None:
            say(console, f"  {_with_halving(planned, times.seconds, times.halved_s)}")
        if times.pauses:
            say(console, f"  {_with_pauses(times)}")
        say(console, f"  times and bubbles are predictions: {times.costs}")


def _with_halving(planned: Planned, seconds: float, halved_s: float) -> str:
    goes_on = f"if one in {planned.config.halving.factor} goes on at each comparison"
    text = f"with halving about {duration(halved_s)}, {goes_on}"
    batch = planned.config.batch
    if halved_s < LESS * seconds or len(batch.sizes) > 1:
        return text
    why = "hardly less than without, because those that go on need as many microbatches of the same size"
    smaller = -(-batch.largest // (4 * batch.tile_tokens)) * batch.tile_tokens
    return f"{text}: {why}; try batch.capacity_tokens=[{smaller},{batch.largest}]"


def _with_pauses(times: PredictedTimes) -> str:
    assert times.pauses is not None
    pauses = times.pauses
    parts = [
        f"{exact(number)} {unit}{'' if number == 1 else 's'} ({duration(seconds)})"
        for number, unit, seconds in (
            (pauses.evaluations, "evaluation", pauses.evaluation_s),
            (pauses.saves, "save", pauses.saving_s),
        )
        if number
    ]
    return f"with {' and '.join(parts)} {duration(times.wall_s)}, without {', '.join(LEFT_OUT)}"


def _comparison(plan: Plan, times: PredictedTimes | None, alone: OneAfterAnother) -> str:
    together = plan.num_slots
    if times is None or alone.seconds is None:
        # Slots of different sizes are no measure of time.
        ratio = "" if plan.smaller else f"   {alone.slots / together:.2f}×"
        return f"one after another {exact(alone.slots)} slots   together {exact(together)}{ratio}"
    return (
        f"one after another {duration(alone.seconds)} ({exact(alone.slots)} slots)   together "
        f"{duration(times.seconds)} ({exact(together)})   {alone.seconds / times.seconds:.2f}×"
    )


def show_memory(console: Console, memory: PredictedMemory) -> None:
    """Prints the memory of every stage, whether it fits, and what to change if it does not."""
    size, unit = _unit(max(stage.total for stage in memory.stages))
    totals = "  ".join(f"s{number} {stage.total / size:.1f}" for number, stage in enumerate(memory.stages))
    of = "" if memory.device_bytes is None else _device_size(memory.device_bytes, unit)
    verdict = {None: "", True: "   fits", False: "   does not fit"}[memory.fits]
    console.print(f"memory/stage  {totals} {unit}{of}{verdict}", highlight=False, markup=False)
    if memory.advice:
        say(console, f"  to make it fit: {memory.advice}", "bold red")
    layers = " + ".join(map(str, memory.layers))
    base_format = "" if memory.quantize == NONE else f", projections stored as {memory.quantize}"
    say(console, f"  layers {layers}, saved for backward: {memory.remat}{base_format}")
    if base_format:
        say(console, "  what that does to the base model: lorafusion check JOBS --base-loss")
    say(console, f"  not modelled: {', '.join(NOT_MODELLED)}")


def _unit(size: int) -> tuple[int, str]:
    return (GIB, "GiB") if size >= GIB else (MIB, "MiB")


def _device_size(device_bytes: int, stages_unit: str) -> str:
    """Size of a device, with its unit if it differs from that of the stages."""
    size, unit = _unit(device_bytes)
    number = device_bytes / size
    return f" of {number:.{0 if number >= 10 else 1}f}" + f" {unit}" * (unit != stages_unit)
