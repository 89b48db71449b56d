"""Costs of a slot on a mesh, and of starting or changing a group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from scheduling.cost_model import CostModel, PassCost
from scheduling.cost_parts import CostParts, stages_from_parts
from scheduling.online.shapes import ModelShape
from scheduling.rates import default_cost_parts

TYPICAL_SAMPLE = 1024  # tokens; stages are balanced for samples of this length


class SlotCost(NamedTuple):
    """Seconds of a slot on the slowest stage: fixed + token · tokens + square · Σ length² + update · steps."""

    fixed_s: float
    token_s: float
    square_s: float
    update_s: float

    def seconds(self, tokens: float, squares: float) -> float:
        return self.fixed_s + self.token_s * tokens + self.square_s * squares


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeCosts:
    """Costs of starting and changing groups, equal for all policies.

    A session compiles programs for every mesh, size of microbatches and class of ranks that it has not had before.

    Args:
        start_s: start of a new session: processes, and programs from the compilation cache.
        load_bytes_per_s: rate of loading base weights into the GPUs of a host, shared by all sessions that open there.
        change_s: a running group drains and continues with other members.
        compile_s: a running group continues with programs that its session has not compiled yet.
        move_s: a job's state is written by one session and read by another.
        checkpoint_s: interval between saves of every member. A fault loses the progress since the last save.
    """

    start_s: float = 30.0
    load_bytes_per_s: float = 4e9
    change_s: float = 3.0
    compile_s: float = 20.0
    move_s: float = 2.0
    checkpoint_s: float = 600.0

    def open_s(self, shape: ModelShape, loading: int = 0) -> float:
        """Seconds from the decision to open a group to its first step, while others load on the same host."""
        return self.start_s + 2 * shape.parameters / self.load_bytes_per_s * (1 + loading)

    def stop_s(self, compiled: bool) -> float:
        """Seconds for which a running group stops for a change."""
        return self.change_s if compiled else self.change_s + self.compile_s


RANK_CLASSES = (16, 32, 64, 128, 256)


def rank_class(ranks: Iterable[int]) -> int:
    """The class of places that hold these ranks; programs depend on the largest."""
    largest = max(ranks)
    return next((size for size in RANK_CLASSES if largest <= size), largest)


@lru_cache(maxsize=256)
def cost_parts(shape: ModelShape, device: str) -> CostParts:
    """Modelled costs of a base's layers and ends on a device."""
    return default_cost_parts(
        device,
        layer_parameters=shape.layer_parameters,
        table_parameters=shape.table_parameters,
        hidden_size=shape.hidden_size,
        attention_width=shape.num_heads * shape.head_dim,
        mlp_width=shape.intermediate_size,
    )


@lru_cache(maxsize=1024)
def stage_costs(shape: ModelShape, device: str, num_stages: int, recompute: bool = False) -> CostModel:
    """Costs of the stages of a pipeline, with layers distributed so that the slowest stage is as fast as possible.

    With recomputation a backward pass runs the forward of the layers again.
    """
    parts = cost_parts(shape, device)
    if recompute:
        forward, backward = parts.layer.forward, parts.layer.backward
        both = PassCost(
            fixed_s=forward.fixed_s + backward.fixed_s,
            token_s=forward.token_s + backward.token_s,
            square_s=forward.square_s + backward.square_s,
        )
        parts = replace(parts, layer=replace(parts.layer, backward=both))
    return stages_from_parts(parts, deal_layers(shape, device, num_stages))


@lru_cache(maxsize=1024)
def deal_layers(shape: ModelShape, device: str, num_stages: int) -> tuple[int, ...]:
    """Number of layers of each stage; the last stage has fewer, because it has the head."""
    parts = cost_parts(shape, device)
    layer, head = (
        part.forward.seconds(TYPICAL_SAMPLE, TYPICAL_SAMPLE**2)
        + part.backward.seconds(TYPICAL_SAMPLE, TYPICAL_SAMPLE**2)
        for part in (parts.layer, parts.head)
    )
    counts = [1] * num_stages
    extra = [0.0] * (num_stages - 1) + [head]
    for _ in range(shape.num_layers - num_stages):
        counts[min(range(num_stages), key=lambda stage: (extra[stage] + layer * (counts[stage] + 1), -stage))] += 1
    return tuple(counts)


def slot_cost(costs: CostModel, num_stages: int) -> SlotCost:
    """Cost of a slot on the slowest stage, forward plus backward."""

    def of_stage(stage: int) -> SlotCost:
        cost = costs.stage(stage)
        names = ("fixed_s", "token_s", "square_s")
        both = {name: getattr(cost.forward, name) + getattr(cost.backward, name) for name in names}
        return SlotCost(**both, update_s=cost.update_s)

    typical = 4 * TYPICAL_SAMPLE, 4 * TYPICAL_SAMPLE**2
    return max(map(of_stage, range(num_stages)), key=lambda cost: cost.seconds(*typical))
