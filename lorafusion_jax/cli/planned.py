"""A plan with everything that is predicted of it, as plain numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.cli.plan_memory import GIB
from lorafusion_jax.config.model import ModelConfig
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.errors import CheckpointError
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
from scheduling import CostModel, Plan, plan_statistics, simulate, timeline_html


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
    model, notes = _base_model(config)
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


def _base_model(config: JobConfig) -> tuple[ModelConfig | None, list[str]]:
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
