"""Builds the projections and norms of a layer from its description."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from lorafusion_jax.adapters.spec import AdapterSpec, bank_rank
from lorafusion_jax.families.layer import Layer
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.models.expert_linear import ExpertLinear
from lorafusion_jax.models.norm import LayerNorm, RMSNorm
from lorafusion_jax.modules import LoRALinear


def times(x: jax.Array, factor: float) -> jax.Array:
    """x · factor, in the dtype of x."""
    return x if factor == 1 else x * factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """Makes the modules of one layer.

    Args:
        config: the model.
        layer: the layer's description.
        prepared: as in `LoRALinear`.
        parted, parts: as in `DecoderLayer`.
    """

    config: ModelConfig
    layer: Layer
    adapters: Sequence[AdapterSpec]
    dtype: Any
    rngs: nnx.Rngs
    prepared: bool = False
    parted: bool = False
    parts: int = 1

    def linear(self, name: str) -> LoRALinear:
        linear = self.layer.linear(name)
        return LoRALinear(
            *linear.shape,
            num_adapters=len(self.adapters),
            rank=bank_rank(self.adapters, name),
            kinds=[spec.kind if name in spec.targets else None for spec in self.adapters],
            use_bias=linear.bias,
            dtype=self.dtype,
            param_dtype=self.dtype,
            prepared=self.prepared,
            parted=self.parted and linear.split_axis == 0,
            rngs=self.rngs,
        )

    def experts(self, name: str) -> ExpertLinear:
        rank = bank_rank(self.adapters, name)
        linear = self.layer.linear(name)
        return ExpertLinear(linear, len(self.adapters), rank, dtype=self.dtype, rngs=self.rngs)

    def norm(self, path: str) -> RMSNorm | LayerNorm | None:
        """The norm at a path of the layer; None if the layer has none there."""
        norm, around = self.layer.norm(path), self.layer.around
        if norm is None:
            return nnx.data(None)
        if around.kind == "layer":
            return LayerNorm(norm.width, eps=around.eps, dtype=self.dtype, bias=norm.bias)
        return RMSNorm(norm.width, eps=around.eps, offset=around.offset, dtype=self.dtype)
