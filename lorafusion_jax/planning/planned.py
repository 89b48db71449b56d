"""A plan with everything that is predicted of it, and a lower bound on its time.

The bound takes only the products and bytes of its linear layers, at the device's ceilings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lorafusion_jax.adapters.spec import bank_columns
from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.config.schema import AdapterConfig, JobConfig
from lorafusion_jax.config.stack import residents, without_places
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.families.layer import Layer
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.layout.extent import Extent, Piece
from lorafusion_jax.layout.layer import HALVES, Half, Linear
from lorafusion_jax.planning.memory import MemoryProblem, memory_problem
from lorafusion_jax.planning.network import Network
from lorafusion_jax.planning.pauses import LEFT_OUT, Pauses, predicted_pauses
from lorafusion_jax.planning.prediction import (
    PredictedMemory,
    PredictedParameters,
    adapter_tokens,
    machine_note,
    measured_costs,
    memory_of,
    predicted_costs,
    predicted_memory,
    predicted_parameters,
    this_device,
)
from lorafusion_jax.planning.training_plan import plan_halved, plan_training, slots_of_sizes
from lorafusion_jax.planning.turns import NextUses
from lorafusion_jax.report.data_notes import data_notes
from pallas_kernels.cost import H200, Ceilings, product
from pallas_kernels.cost_ops import MlpCost, SiblingsCost
from scheduling import CostModel, Plan, PlanStatistics, make_plan, plan_statistics, simulate, timeline_html

CEILINGS: Mapping[str, Ceilings] = {"h200": H200}  # measured devices only
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedAdapter:
    """An adapter's data and where it ends in the plan.

    Attributes:
        tokens: of all samples, in all epochs.
        longest: tokens of the longest sample.
        cut, no_loss, too_long: numbers of samples that are shortened, left out for want of a learned token, or left
            out for their length.
        steps: optimizer steps.
        finishes_slot: number of slots until its last step.
        finishes_s: predicted seconds until then; None without costs.
    """

    rows: int
    tokens: int
    longest: int
    cut: int
    no_loss: int
    too_long: int
    rank: int
    steps: int
    finishes_slot: int
    finishes_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedTimes:
    """Predicted times of a plan.

    Attributes:
        costs: where the costs of the stages are from.
        seconds: of all slots.
        bubble_share, fill_drain_s: idle share of the stages between fill and drain, and the seconds of these.
        tokens_per_s: useful tokens.
        limit: what limits the rate.
        pauses: evaluations and saves; None where the base model is of no known kind.
        halved_s: of all slots, if halving ends as many adapters as it can; None without halving.
    """

    costs: str
    seconds: float
    bubble_share: float
    fill_drain_s: float
    tokens_per_s: float
    limit: str
    pauses: Pauses | None
    halved_s: float | None

    @property
    def wall_s(self) -> float:
        """Seconds with evaluations and saves."""
        return self.seconds + (self.pauses.evaluation_s + self.pauses.saving_s if self.pauses else 0.0)

    def to_json(self) -> dict[str, Any]:
        times = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "pauses"}
        if self.pauses is None:
            return times
        return times | dataclasses.asdict(self.pauses) | {"wall_s": self.wall_s, "leaves_out": list(LEFT_OUT)}


@dataclass(frozen=True, slots=True, kw_only=True)
class OneAfterAnother:
    """The same adapters one after another, each with its best plan; seconds are None without costs."""

    slots: int
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan with everything that is predicted of it.

    Attributes:
        costs: of the stages; None where the base model is of no known kind, and then nothing below is predicted.
        times: None without costs.
        floor_s: seconds that the products of linear layers take at the least; None for an unknown device.
        alone: None if no comparison was asked for.
        moves: how often an adapter comes to a place where they take turns; None where all are on the devices.
        notes: what a user should know of the data and of the prediction.
    """

    config: JobConfig
    plan: Plan
    costs: CostModel | None
    adapters: Mapping[str, PlannedAdapter]
    times: PredictedTimes | None
    parameters: PredictedParameters | None
    memory: PredictedMemory | None
    floor_s: float | None
    alone: OneAfterAnother | None
    moves: int | None
    notes: tuple[str, ...]

    def timeline_html(self) -> str:
        """The predicted timeline as a page; needs costs."""
        assert self.costs is not None
        return timeline_html(simulate(self.plan, self.costs), note=plan_statistics(self.plan, self.costs).hint)

    def to_json(self) -> dict[str, Any]:
        """The numbers of `lorafusion plan --json`."""
        plan, parameters = self.plan, self.parameters
        numbers = {
            "plan": plan.digest,
            "adapters": {name: dataclasses.asdict(adapter) for name, adapter in self.adapters.items()},
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
            "predicted": self.times and self.times.to_json(),
            "own_parameters": parameters and parameters.own_parameters,
            "stored_parameters": parameters and parameters.stored_most,
            "stored": parameters and dict(parameters.stored),
            "floor_s": self.floor_s,
            "memory": self.memory and self.memory.to_json(),
            "resident": residents(self.config),
            "moves": self.moves,
        }
        if self.alone is not None:
            numbers |= {"slots_one_after_another": self.alone.slots, "seconds_one_after_another": self.alone.seconds}
        return numbers


def make_planned(
    config: JobConfig,
    prepared: Prepared,
    *,
    device: str | None = None,
    device_memory: float | None = None,
    cost_model: Path | None = None,
    compare: bool = False,
    network: Network | None = None,
) -> Planned:
    """Plans a job and predicts its times and memory; the arguments are the options of `lorafusion plan`.

    Args:
        network: of the run's processes (None: one process).
    """
    plan = plan_training(config, prepared)
    kind = device or this_device()
    model, problem = _base_model(config)
    costs = None if model is None else predicted_costs(config, model, kind, adapter_tokens(prepared), network)
    if costs is not None and device is None:
        costs = dataclasses.replace(costs, source=f"{costs.source}; {machine_note()}")
    if cost_model:
        costs = measured_costs(config, model, cost_model, network)
    statistics = None if costs is None else plan_statistics(plan, costs)
    times = parameters = memory = floor_s = None
    if costs is not None and statistics is not None:
        pauses = None
        if model is not None:
            seconds = statistics.duration_s
            pauses = predicted_pauses(config, model, prepared, plan, costs, duration_s=seconds, device=kind)
        halved = plan_halved(config, prepared, plan) if config.halving.is_on else None
        times = _times(costs, statistics, pauses, None if halved is None else simulate(halved, costs).duration_s)
    if model is not None:
        parameters = predicted_parameters(config, model)
        memory = predicted_memory(config, model, int(device_memory * GIB) if device_memory else memory_of(kind))
        floor_s = plan_floor_s(config, model, prepared, plan, kind)
    return Planned(
        config=config,
        plan=plan,
        costs=costs,
        adapters=_adapters(config, prepared, plan, statistics),
        times=times,
        parameters=parameters,
        memory=memory,
        floor_s=floor_s,
        alone=_one_after_another(plan, costs) if compare else None,
        moves=None if (most := residents(config)) is None else NextUses.of(plan).count_moves(most),
        notes=(*problem, *data_notes(config, prepared)),
    )


def _base_model(config: JobConfig) -> tuple[ModelConfig | None, list[str]]:
    """The configuration of the base model, or why there are no predictions. Planning does not need it."""
    try:
        return ModelConfig.from_hf(base_directory(config)), []
    except CheckpointError as problem:
        return None, [f"no times and no memory are predicted: {problem.what}"]


def _times(
    costs: CostModel, statistics: PlanStatistics, pauses: Pauses | None, halved_s: float | None
) -> PredictedTimes:
    return PredictedTimes(
        costs=costs.source,
        seconds=statistics.duration_s,
        bubble_share=statistics.bubble_share,
        fill_drain_s=statistics.fill_drain_s,
        tokens_per_s=statistics.tokens_per_s,
        limit=statistics.hint,
        pauses=pauses,
        halved_s=halved_s,
    )


def _adapters(
    config: JobConfig, prepared: Prepared, plan: Plan, statistics: PlanStatistics | None
) -> dict[str, PlannedAdapter]:
    finish_s = {adapter.name: adapter.finish_s for adapter in statistics.adapters} if statistics else {}
    last_slot = {name: slot for slot, name, _ in plan.batches_ending()}

    def planned(adapter: AdapterConfig) -> PlannedAdapter:
        data = prepared.adapters[adapter.name]
        report = data.train.report
        return PlannedAdapter(
            rows=report.rows,
            tokens=int(data.stream_tokens().sum()),
            longest=report.longest,
            cut=report.cut,
            no_loss=sum(len(part.dropped) for part in report.files),
            too_long=sum(len(part.too_long) for part in report.files),
            rank=adapter.lora.rank,
            steps=plan.job_of[adapter.name].num_batches,
            finishes_slot=last_slot[adapter.name] + 1,
            finishes_s=finish_s.get(adapter.name),
        )

    return {adapter.name: planned(adapter) for adapter in config.adapters}


def _one_after_another(plan: Plan, costs: CostModel | None) -> OneAfterAnother:
    alone = plans_one_after_another(plan)
    return OneAfterAnother(
        slots=sum(single.num_slots for single in alone),
        seconds=sum(simulate(single, costs).duration_s for single in alone) if costs else None,
    )


def plans_one_after_another(plan: Plan) -> list[Plan]:
    """Plans every adapter separately, with the same planner, capacities and stages as `plan`."""
    return [
        make_plan(
            [job],
            capacity_tokens=plan.sizes,
            num_stages=plan.num_stages,
            data_parallel=plan.data_parallel,
            tile_tokens=plan.tile_tokens,
            time_limit_s=0.2,
            seed=plan.seed,
        )
        for job in plan.jobs
    ]


def plan_floor_s(config: JobConfig, model: ModelConfig, prepared: Prepared, plan: Plan, device: str) -> float | None:
    """Returns a lower bound in seconds on the time of a plan; None for devices without measured ceilings.

    floor = Σ over a replica's microbatches of the busiest stage,  stage = its linear layers with LoRA, on the last one
    the head

    It counts forward and backward over a frozen base (no dW). A microbatch costs as much as a full one, and the head
    only counts learned tokens. The gate is part of the MLP's op. Attention, norms, embedding, optimizers, transfers,
    waiting and recomputation are not counted.
    """
    if device not in CEILINGS:
        return None
    learned = sum(_learned_tokens(prepared, adapter.name) for adapter in config.adapters)
    share = learned / max(plan.data_parallel * sum(size * count for size, count in plan.slots_of_size.items()), 1)
    problem = memory_problem(without_places(config), model)  # a place has no rows
    tokens = {name: int(data.stream_tokens().sum()) for name, data in prepared.adapters.items()}
    rows = [tokens[spec.name] / sum(tokens.values()) for spec in problem.adapters]
    ceilings = CEILINGS[device]
    return sum(
        count * max(stage_floors_s(replace(problem, capacity_tokens=size), int(share * size), ceilings, rows))
        for size, count in plan.slots_of_size.items()
    )


def stage_floors_s(
    problem: MemoryProblem, head_rows: int, ceilings: Ceilings, shares: Sequence[float] | None = None
) -> list[float]:
    """Returns a lower bound in seconds per stage for one microbatch, forward and backward.

    Args:
        problem: shapes, adapters and the layers of each stage.
        head_rows: rows with a target. The head runs only on them, one product in each direction.
        shares: of the rows, by adapter. A row costs what the rank of its own adapter costs (None: the largest rank).
    """
    by_kind: list[dict[Half, float]] = [
        {half: _half_floor_s(problem, layer, half, ceilings, shares) for half in HALVES}
        for layer in problem.model.kinds
    ]
    floors = [_layers_floor_s(problem.model, stage, by_kind) for stage in problem.layers]
    model, item = problem.model, problem.item
    sizes = ((model.hidden_size, model.num_outputs), (model.num_outputs, model.hidden_size))
    floors[-1] += sum(product(rows=head_rows, inner=k, columns=n, item=item).floor_s(ceilings) for k, n in sizes)
    return floors


def _layers_floor_s(model: ModelConfig, stage: Extent, by_kind: Sequence[Mapping[Half, float]]) -> float:
    def floor_s(piece: Piece) -> float:
        halves = by_kind[model.kind_of(piece.layer)]
        return sum(halves.values()) if piece.half is None else halves[piece.half]

    return sum(map(floor_s, stage.pieces))


def _half_floor_s(
    problem: MemoryProblem, layer: Layer, half: Half, ceilings: Ceilings, shares: Sequence[float] | None
) -> float:
    if half == "mlp" and layer.mlp.as_one_op and layer.beside is None:
        return _mlp(problem, layer, shares).floor_s(ceilings)
    sites = [site for site in layer.sites.values() if site[0].half == half]
    return sum(_siblings(problem, site, shares).floor_s(ceilings) for site in sites)


def _rank(problem: MemoryProblem, target: str, shares: Sequence[float] | None) -> int:
    """The mean rank of the rows in a projection, as work grows with it; at least 1 where any adapter has some."""
    largest = bank_columns(problem.adapters, target)
    if shares is None or not largest:
        return largest
    pairs = zip(problem.adapters, shares, strict=True)
    return max(1, int(sum(share * spec.columns for spec, share in pairs if target in spec.targets)))


def _siblings(problem: MemoryProblem, site: tuple[Linear, ...], shares: Sequence[float] | None) -> SiblingsCost:
    return SiblingsCost(
        tokens=problem.capacity_tokens * max(site[0].active, 1),
        in_features=site[0].in_features,
        out_features=tuple(linear.out_features for linear in site),
        ranks=tuple(_rank(problem, linear.name, shares) for linear in site),
        adapters=len(problem.adapters) * max(site[0].experts, 1),
        dropout=any(spec.dropout for spec in problem.adapters),
        item=problem.item,
    )


def _mlp(problem: MemoryProblem, layer: Layer, shares: Sequence[float] | None) -> MlpCost:
    gate, up, down = (_rank(problem, name, shares) for name in layer.linear_shapes("mlp"))
    return MlpCost(
        tokens=problem.capacity_tokens,
        width=problem.model.hidden_size,
        inner=layer.mlp.inner,
        ranks=(gate, up, down),
        adapters=len(problem.adapters),
        dropout=any(spec.dropout for spec in problem.adapters),
        item=problem.item,
    )


def _learned_tokens(prepared: Prepared, adapter: str) -> int:
    """Learned tokens of an adapter's stream, over all epochs."""
    data = prepared.adapters[adapter]
    of_sample = data.train.segment_tokens.sum(axis=1)
    return int(of_sample[data.order].sum())
