"""An input of each layer of its own, made of the tokens and their embeddings. `models.per_layer_input` executes it.

D model width · P width of a layer's input
"""

from __future__ import annotations

from dataclasses import dataclass

from lorafusion_jax.families.mechanism import Mechanism
from lorafusion_jax.families.mlp import Activation
from lorafusion_jax.layout.layer import PER_LAYER, PER_LAYER_NAMES, Linear, Norm, SavedTensor

GATE, PROJECTION = PER_LAYER_NAMES
NORM = "norm"
TABLE, MIX, MIX_NORM = (  # tensors of the model that make the inputs of all layers
    "embed_tokens_per_layer.weight",
    "per_layer_model_projection.weight",
    "per_layer_projection_norm.weight",
)
POSITIONS = "embed_positions.weight"  # a tensor of the model that is added to the embeddings


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerInput(Mechanism):
    """x + norm(projection(activation(gate x) · input)), after the MLP; input is the layer's.

    Args:
        width: D.
        inner: P.
    """

    width: int
    inner: int
    activation: Activation
    module: str = PER_LAYER

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (
            self._linear(GATE, "per_layer_gate", self.width, self.inner),
            self._linear(PROJECTION, "per_layer_out", self.inner, self.width),
        )

    @property
    def norms(self) -> tuple[Norm, ...]:
        return self._norms({NORM: self.width})

    @property
    def saved(self) -> tuple[SavedTensor, ...]:
        return (
            self._saved("x before its input", self.width, input_of=GATE),
            self._saved("gate of its input", self.inner, "per_layer_gate"),
            self._saved("input of the layer", self.inner),
            self._saved("gated input", self.inner, input_of=PROJECTION),
            self._saved("projected input", self.width, "per_layer_out"),
            self._saved("scale of its norm", 1, float32=True),
        )
