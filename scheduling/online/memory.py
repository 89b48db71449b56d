"""Memory of a group, per GPU of its fullest stage.

A coarse count from shapes: the large tensors of a run's own memory plan, without the small ones.
T tokens of a microbatch · D model width · F MLP width · S stages
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import NamedTuple

from scheduling.online.shapes import LINEARS, ModelShape

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


@lru_cache(maxsize=1024)
def stage_bytes(shape: ModelShape, num_stages: int, recompute: bool) -> StageBytes:
    """Bytes of the first stage, which holds the most microbatches, with the tables of both ends."""
    layers = ceil(shape.num_layers / num_stages)
    width, mlp = shape.hidden_size, shape.intermediate_size
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    tables = 1 if shape.tie_embeddings or num_stages > 1 else 2
    saved = 2 * width + 2 * query + 2 * key + 2 * mlp  # inputs, q, k, v, attention, gate, up
    kept = width if recompute else saved
    working = (saved if recompute else width) + 3 * mlp + 4 * width  # one layer's backward
    return StageBytes(
        fixed=BFLOAT16 * (layers * shape.layer_parameters + tables * shape.table_parameters) + LOSS_BYTES,
        token=BFLOAT16 * (num_stages * layers * kept + working + 4 * width) + FLOAT32 * 2 * shape.head_dim * num_stages,
    )


@lru_cache(maxsize=4096)
def trainable_bytes(shape: ModelShape, num_stages: int, rank: int, targets: tuple[str, ...] = LINEARS) -> float:
    """Bytes of one adapter's weights, gradient and optimizer state on a stage."""
    sizes = (sum(shape.linear(target)) for target in targets)
    return COPIES * FLOAT32 * rank * sum(sizes) * ceil(shape.num_layers / num_stages)
