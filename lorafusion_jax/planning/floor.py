"""Lower bound on the time of a plan: only the products and bytes of its linear layers, at the device's ceilings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lorafusion_jax.adapters.spec import bank_columns
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.config.stack import without_places
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.families.layer import Layer
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.layout.extent import Extent, Piece
from lorafusion_jax.layout.layer import HALVES, Half, Linear
from lorafusion_jax.planning.memory import MemoryProblem, memory_problem
from pallas_kernels.cost import H200, Ceilings, product
from pallas_kernels.cost_ops import MlpCost, SiblingsCost
from scheduling import Plan

CEILINGS: Mapping[str, Ceilings] = {"h200": H200}  # measured devices only


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
    sizes = ((model.hidden_size, model.vocab_size), (model.vocab_size, model.hidden_size))
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
