"""Sizes of the models of `flax_model.py`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

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
    model: Literal["decoder", "qwen3", "vit"] = "decoder"


QWEN3 = Size(vocabulary=32_768, width=2048, hidden=6144, layers=18, heads=16, kv_heads=8, model="qwen3")
VIT = Size(vocabulary=1000, width=1024, hidden=4096, layers=24, heads=16, examples=64, positions=256, model="vit")
SMALL = Size(vocabulary=64, width=64, hidden=96, heads=4, kv_heads=2, layers=2, positions=16, rank=4, dtype=jnp.float32)
SMALL_VIT = replace(SMALL, examples=8, model="vit")
