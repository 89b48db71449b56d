"""The frozen weights of a stage: of its layers, and of the ends of the model that it has.

D model width · V vocabulary
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax import Array

from lorafusion_jax.layout.extent import Extent
from lorafusion_jax.layout.layer import Half
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.models.loading import Weight
from lorafusion_jax.session.leaves import LAYERS
from pallas_kernels.frozen_weight import FrozenWeight

Weights = Mapping[str, FrozenWeight]  # "self_attn.q_proj.kernel" -> [K, N]
StoredWeights = Mapping[str, Weight]  # the same names; a quantised kernel is a dictionary of its arrays


# A registered dataclass, because jax flattens it without a call of Python: every pass flattens all layers' weights.
@partial(jax.tree_util.register_dataclass, data_fields=("by_name",), meta_fields=("layer_kind",))
@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights(Mapping[str, Any]):
    """Weights of a layer or half layer by name. The kind of the layer is static, so each kind has its own programs.

    Args:
        layer_kind: index of the layer's description in `ModelConfig.kinds`.
    """

    by_name: dict[str, Any]
    layer_kind: int = 0

    def __getitem__(self, name: str) -> Any:
        return self.by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_name)

    def __len__(self) -> int:
        return len(self.by_name)


def layer_kind(weights: Mapping[str, Any]) -> int:
    """The kind of the layer that has these weights; plain dictionaries are of the first kind."""
    return weights.layer_kind if isinstance(weights, LayerWeights) else 0


@dataclass(slots=True, kw_only=True)
class StageWeights:
    """Frozen arrays of one stage.

    Attributes:
        extent: its layers.
        pieces: weights by name, for each of its layers or half layers.
        embed: [V, D], on the first stage.
        own_inputs: by name, what makes the inputs of layers beside the embedding, on the first stage.
        norm, head: final norm [D] and [V, D] table, on the last stage.
    """

    extent: Extent
    pieces: list[StoredWeights]
    embed: Array | None = None
    own_inputs: dict[str, Array] = field(default_factory=dict)
    norm: Array | None = None
    head: Array | None = None


def cut(
    frozen: Mapping[str, Any], model: ModelConfig, stages: Sequence[Extent], only: Collection[int] | None = None
) -> list[StageWeights]:
    """Splits the weights of `FrozenReader.read` by stage. A tied embedding goes to the first and the last stage.

    Args:
        only: numbers of the stages to return; the weights of others may be missing (None: all).
    """
    last = len(stages) - 1
    embed = frozen.get("embed_tokens.weight")
    head = frozen.get("lm_head.weight", embed)
    return [
        StageWeights(
            extent=extent,
            pieces=[_weights(frozen, model, number, half) for number, half in extent.pieces],
            embed=embed if stage == 0 else None,
            own_inputs={name: frozen[name] for name in model.input_shapes} if stage == 0 else {},
            norm=frozen["norm.weight"] if stage == last else None,
            head=head if stage == last else None,
        )
        for stage, extent in enumerate(stages)
        if only is None or stage in only
    ]


def _weights(frozen: Mapping[str, Any], model: ModelConfig, number: int, half: Half | None) -> LayerWeights:
    names = model.layer(number).frozen_shapes(half)
    return LayerWeights({name: frozen[f"{LAYERS}{number}.{name}"] for name in names}, model.kind_of(number))
