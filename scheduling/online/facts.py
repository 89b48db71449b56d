"""What the scheduler has to know about a base: seconds and bytes of a stage of it.

`Facts` is what a caller may bring, such as a product that knows the models which it trains. `ShapeFacts` makes do with
the sizes of a plain decoder.

T tokens of a microbatch · D model width · F MLP width · S stages
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import NamedTuple, Protocol

from scheduling.cost_model import CostModel, PassCost
from scheduling.cost_parts import CostParts, deal_layers, stages_from_parts
from scheduling.online.costs import TYPICAL_SAMPLE
from scheduling.online.shapes import LINEARS, ModelShape
from scheduling.online.types import Job
from scheduling.rates import default_cost_parts

GIB = 2**30
USABLE = 0.92  # of a GPU; the rest is for CUDA, NCCL, fragmentation and temporaries of the compiler
BFLOAT16, FLOAT32 = 2, 4
LOSS_BYTES = 2**30  # logits in chunks
COPIES = 4  # of a trainable weight in float32: itself, its accumulated gradient, two moments of AdamW


class StageBytes(NamedTuple):
    """Bytes on the fullest stage: fixed + token · tokens of a microbatch + trainable weights."""

    fixed: float
    token: float

    def room(self, memory_gib: float, trainable: float) -> int:
        """Tokens of the largest microbatch that fits; 0 or less if none does."""
        return int((USABLE * memory_gib * GIB - self.fixed - trainable) / self.token)

    def total(self, tokens: int, trainable: float) -> float:
        return self.fixed + self.token * tokens + trainable


class Facts(Protocol):
    """Seconds and bytes of the stages of a job's base. Jobs of equal `base_name` have equal facts."""

    def stage_costs(self, job: Job, device: str, num_stages: int, recompute: bool) -> CostModel:
        """Costs of the stages; with `recompute`, backward runs the forward of the layers again."""
        ...

    def stage_bytes(self, jobs: Sequence[Job], num_stages: int, recompute: bool) -> StageBytes:
        """Bytes of the fullest stage of a group. They depend on the base and the kinds of its jobs."""
        ...

    def trainable_bytes(self, jobs: Sequence[Job], num_stages: int) -> float:
        """Bytes of the weights, gradients and optimizer states of a group's jobs on a stage, beyond `stage_bytes`."""
        ...


class ShapeFacts:
    """Facts counted from the sizes of `Job.shape`: the large tensors, without the small ones."""

    def stage_costs(self, job: Job, device: str, num_stages: int, recompute: bool) -> CostModel:
        return stage_costs(job.shape, device, num_stages, recompute)

    def stage_bytes(self, jobs: Sequence[Job], num_stages: int, recompute: bool) -> StageBytes:
        return stage_bytes(jobs[0].shape, num_stages, recompute)

    def trainable_bytes(self, jobs: Sequence[Job], num_stages: int) -> float:
        return sum([trainable_bytes(job.shape, num_stages, job.rank, job.targets) for job in jobs])


def recomputed(parts: CostParts) -> CostParts:
    """Costs of parts whose backward pass runs the forward of a layer again."""
    forward, backward = parts.layer.forward, parts.layer.backward
    both = PassCost(
        fixed_s=forward.fixed_s + backward.fixed_s,
        token_s=forward.token_s + backward.token_s,
        square_s=forward.square_s + backward.square_s,
    )
    return replace(parts, layer=replace(parts.layer, backward=both))


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
    """Costs of the stages of a pipeline, with layers distributed so that the slowest stage is as fast as possible."""
    parts = cost_parts(shape, device)
    layer, head = (
        sum(cost.seconds(TYPICAL_SAMPLE, TYPICAL_SAMPLE**2) for cost in (part.forward, part.backward))
        for part in (parts.layer, parts.head)
    )
    counts = deal_layers(shape.num_layers, num_stages, layer=layer, head=head)
    return stages_from_parts(recomputed(parts) if recompute else parts, counts)


@lru_cache(maxsize=1024)
def stage_bytes(shape: ModelShape, num_stages: int, recompute: bool) -> StageBytes:
    """Bytes of the first stage, which holds the most microbatches, with the tables of both ends."""
    layers = ceil(shape.num_layers / num_stages)
    width, mlp = shape.hidden_size, shape.intermediate_size
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    tables = 1 if shape.tie_embeddings or num_stages > 1 else 2
    layer_values = 2 * width + 2 * query + 2 * key + 2 * mlp  # inputs, q, k, v, attention, gate, up
    kept = width if recompute else layer_values
    working = (layer_values if recompute else width) + 3 * mlp + 4 * width  # one layer's backward
    return StageBytes(
        fixed=BFLOAT16 * (layers * shape.layer_parameters + tables * shape.table_parameters) + LOSS_BYTES,
        token=BFLOAT16 * (num_stages * layers * kept + working + 4 * width) + FLOAT32 * 2 * shape.head_dim * num_stages,
    )


@lru_cache(maxsize=4096)
def trainable_bytes(shape: ModelShape, num_stages: int, rank: int, targets: tuple[str, ...] = LINEARS) -> float:
    """Bytes of one adapter's weights, gradient and optimizer state on a stage."""
    sizes = (sum(shape.linear(target)) for target in targets)
    return COPIES * FLOAT32 * rank * sum(sizes) * ceil(shape.num_layers / num_stages)
