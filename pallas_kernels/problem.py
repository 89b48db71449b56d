"""The one description of a call that the public ops, the differentiation rule and every backend share.

T packed tokens · K in features · N out features · R padded rank · A adapters
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from pallas_kernels.dropout import Dropout


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Static:
    """What is known while tracing: hashable, decides which program is built."""

    tile: int  # rows of a tile
    num_adapters: int
    backend: str
    single: bool  # every row belongs to adapter 0: no table, no selection
    interpret: bool = False
    config: Any = None  # explicit tile sizes of a backend (tuner, benchmark); None = its own choice


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """Arrays of one call: projections ws[i], as_[i], bs[i] of one input; as_[i] is None where there is no LoRA."""

    x: jax.Array  # [T, K]
    ws: tuple[jax.Array, ...]  # [K, N_i]
    as_: tuple[jax.Array | None, ...]  # [A, K, R_i]
    bs: tuple[jax.Array | None, ...]  # [A, R_i, N_i]
    biases: tuple[jax.Array | None, ...]  # [N_i]
    tile_adapter: jax.Array  # int32 [T / tile]
    scale: jax.Array  # float32 [A]
    dropout: Dropout | None

    @property
    def with_lora(self) -> tuple[int, ...]:
        return tuple(i for i, a in enumerate(self.as_) if a is not None)
