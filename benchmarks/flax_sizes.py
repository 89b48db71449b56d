"""Sizes of the decoders of `flax_model.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class Size:
    """Dimensions of the model and of a batch."""

    vocabulary: int = 16_384
    width: int = 4096
    hidden: int = 14_336
    layers: int = 4
    heads: int = 32
    kv_heads: int = 8
    examples: int = 4
    positions: int = 2048
    rank: int = 16
    dtype: Any = jnp.bfloat16
    qwen3: bool = False  # layers as Bonsai's Qwen3 has them


QWEN3 = Size(vocabulary=32_768, width=2048, hidden=6144, layers=18, heads=16, kv_heads=8, qwen3=True)
SMALL = Size(vocabulary=64, width=64, hidden=96, heads=4, kv_heads=2, layers=2, positions=16, rank=4, dtype=jnp.float32)
