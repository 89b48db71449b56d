"""Costs of the parts of a model (layer, embedding, head): the costs of any stages, and how many layers each gets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from scheduling.cost_model import SCHEMA as STAGES_SCHEMA
from scheduling.cost_model import CostModel, PassCost, StageCost
from scheduling.errors import PlanError

SCHEMA = "lorafusion.cost-parts/1"
Part = Literal["embed", "layer", "head"]
PARTS: tuple[Part, ...] = ("embed", "layer", "head")
# Fitted to two H200s over NVLink (`benchmarks/results/tensor_h200_2026-11-27`); rates of links are those of copies.
SUM_SPEED = 1.5
NOTHING = StageCost(forward=PassCost(), backward=PassCost())


@dataclass(frozen=True, slots=True, kw_only=True)
class CostParts:
    """Costs of one layer and of the two ends of a model on one device.

    Args:
        layer: one decoder layer; all are equal. Its update is the layer's share of one adapter's optimizer step.
        embed, head: extra parts of the first and the last stage. The head includes final norm and loss.
        call_s: fixed overhead of a stage's pass.
        update_s: fixed overhead of a stage's optimizer step.
        transfer_s, transfer_token_s: as in `CostModel`.
        source: origin of the figures.
    """

    layer: StageCost
    embed: StageCost = NOTHING
    head: StageCost = NOTHING
    call_s: float = 0.0
    update_s: float = 0.0
    transfer_s: float = 0.0
    transfer_token_s: float = 0.0
    source: str = ""

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str) -> CostParts:
        """Reads the output of `to_json`.

        Raises:
            PlanError: `plan.cost-format`, the text holds no costs of parts of this version.
        """
        try:
            data = json.loads(text)
            if data.pop("schema") != SCHEMA:
                raise ValueError(f"expected schema {SCHEMA}")
            parts = {part: StageCost.from_dict(data.pop(part)) for part in PARTS}
            return CostParts(**parts, **data)
        except PlanError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise PlanError("plan.cost-format", "these are not costs of a model's parts", why=repr(error)) from None


def stages_from_parts(parts: CostParts, layers: Sequence[float], *, gather: GatherCost | None = None) -> CostModel:
    """Adds up the costs of stages from parts.

    pass(s) = call + layers(s) · layer + embed on the first + head on the last

    Args:
        layers: layers of each stage. Half a layer counts by its cost, e.g. 20.2.
        gather: costs of gathering frozen weights that are sharded over devices (FSDP).

    >>> one = StageCost(forward=PassCost(fixed_s=1), backward=PassCost(fixed_s=2))
    >>> [stage.forward.fixed_s for stage in stages_from_parts(CostParts(layer=one, head=one), [3, 2]).stages]
    [3.0, 3.0]
    """
    if not layers or min(layers) < 1:
        raise PlanError("plan.cost", f"every stage needs a layer, not {list(layers)}")
    last = len(layers) - 1
    stages: list[StageCost] = []
    for stage, count in enumerate(layers):
        shares = [(count, parts.layer)] + [(1, parts.embed)] * (stage == 0) + [(1, parts.head)] * (stage == last)
        forward = _sum([(n, cost.forward) for n, cost in shares], parts.call_s)
        backward = _sum([(n, cost.backward) for n, cost in shares], parts.call_s)
        if gather is not None:
            forward = gather.added_to(forward, count, with_table=stage == 0)
            backward = gather.added_to(backward, count, with_table=stage == last)
        update_s = parts.update_s + sum(n * cost.update_s for n, cost in shares)
        stages.append(StageCost(forward=forward, backward=backward, update_s=update_s))
    return CostModel(
        stages=tuple(stages),
        transfer_s=parts.transfer_s,
        transfer_token_s=parts.transfer_token_s,
        source=parts.source,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherCost:
    """Cost of gathering sharded weights on the devices of a stage, once per pass.

    The embedding is gathered before the first stage's forward, and the head once between the last stage's passes, each
    by a program of its own, beside which nothing runs.

    Args:
        layer_bytes: bytes of one layer's frozen weights.
        table_bytes: bytes of the embedding or of the head.
        devices: number of devices that share the weights.
        link_bytes: bytes per second that one device receives (default: measured over NVLink of an H200 host).
        hidden: share of the gathering of layers that the compute of layers before them hides, 0 to 1. A pass takes the
            rest of the gathering and the compute, but no less than all of the gathering.
    """

    layer_bytes: float
    table_bytes: float
    devices: int
    link_bytes: float = 369e9
    hidden: float = 0.0

    def __post_init__(self):
        if not 0.0 <= self.hidden <= 1.0:
            raise PlanError("plan.cost", f"the hidden share of the gathering is from 0 to 1, not {self.hidden}")

    def added_to(self, cost: PassCost, layers: float, with_table: bool) -> PassCost:
        rate = self.link_bytes / (1 - 1 / self.devices)
        layers_s, table_s = layers * self.layer_bytes / rate, with_table * self.table_bytes / rate
        return replace(
            cost,
            fixed_s=cost.fixed_s + (1 - self.hidden) * layers_s + table_s,
            floor_s=max(cost.floor_s, layers_s + table_s),
        )


def shared_parts(parts: CostParts, devices: int, *, call_s: float = 2e-5, speed: float = SUM_SPEED) -> CostParts:
    """Adds what devices that compute every layer together (tensor parallelism) take to add up their results.

    An all-reduce of a row of activations moves 2 (n - 1) / n of it over each device's link. There are two per layer in
    a pass, one after the embedding, and one for the gradient that leaves the head.

    Args:
        parts: costs of one device's share of the computation; rows cross its link in `transfer_token_s`.
        devices: n.
        call_s: fixed time of an all-reduce (default: not measured, of the order of NCCL's small messages).
        speed: of an all-reduce, over the link's rate.

    >>> one = shared_parts(CostParts(layer=NOTHING, transfer_token_s=1.0), 2, call_s=0.5, speed=1).layer.forward
    >>> one.token_s, one.fixed_s
    (2.0, 1.0)
    """
    token_s = 2 * (devices - 1) / devices * parts.transfer_token_s / speed

    def with_sums(cost: PassCost, count: int) -> PassCost:
        return replace(cost, fixed_s=cost.fixed_s + count * call_s, token_s=cost.token_s + count * token_s)

    layer = replace(parts.layer, forward=with_sums(parts.layer.forward, 2), backward=with_sums(parts.layer.backward, 2))
    embed, head = (replace(end, forward=with_sums(end.forward, 1)) for end in (parts.embed, parts.head))
    return replace(parts, layer=layer, embed=embed, head=head)


def read_cost_model(text: str, layers: Sequence[float]) -> CostModel:
    """Reads costs of stages or costs of parts. Parts are added up for these layers per stage.

    Raises:
        PlanError: `plan.cost-format`; `plan.cost` for another number of stages.
    """
    try:
        schema = json.loads(text).get("schema")
    except (ValueError, AttributeError, RecursionError):
        schema = None
    if schema == SCHEMA:
        return stages_from_parts(CostParts.from_json(text), layers)
    if schema != STAGES_SCHEMA:
        raise PlanError(
            "plan.cost-format",
            f"this is not a cost model: its schema is {schema!r}",
            why=f"expected {STAGES_SCHEMA} or {SCHEMA}",
            fix="write one with lorafusion profile",
        )
    model = CostModel.from_json(text)
    model.check_stages(len(layers))
    return model


def _sum(shares: Sequence[tuple[float, PassCost]], call_s: float) -> PassCost:
    return PassCost(
        fixed_s=call_s + sum(n * cost.fixed_s for n, cost in shares),
        token_s=float(sum(n * cost.token_s for n, cost in shares)),
        square_s=float(sum(n * cost.square_s for n, cost in shares)),
        floor_s=float(sum(n * cost.floor_s for n, cost in shares)),
    )


def deal_layers(
    num_layers: int, num_stages: int, *, layer: float, embed: float = 0.0, head: float = 0.0
) -> tuple[int, ...]:
    """Assigns whole layers one by one, each to the stage that costs least with it.

    cost(s) = layer · layers(s) + embed on the first + head on the last;  layers(s) ≥ 1

    As all layers cost the same, this is optimal: no layout has a faster slowest stage or, given that, a faster second
    slowest stage. Ties go to the later stage, because earlier stages hold more microbatches in flight.

    >>> deal_layers(32, 4, layer=1.0, head=2.4)
    (8, 9, 9, 6)
    """
    ends = [0.0] * num_stages
    ends[0] += embed
    ends[-1] += head
    counts = [1] * num_stages
    for _ in range(num_layers - num_stages):
        counts[min(range(num_stages), key=lambda stage: (ends[stage] + layer * (counts[stage] + 1), -stage))] += 1
    return tuple(counts)
