"""An input of each layer of its own, made of the tokens and their embeddings. `models.per_layer_input` executes it.

D model width · P width of a layer's input
"""

from __future__ import annotations

from dataclasses import dataclass

from lorafusion_jax.families.mlp import Activation
from lorafusion_jax.layout.layer import PER_LAYER, PER_LAYER_NAMES, FrozenArray, Linear, Norm, SavedTensor

GATE, PROJECTION = PER_LAYER_NAMES
NORM = "norm"
TABLE, MIX, MIX_NORM = (  # tensors of the model that make the inputs of all layers
    "embed_tokens_per_layer.weight",
    "per_layer_model_projection.weight",
    "per_layer_projection_norm.weight",
)
POSITIONS = "embed_positions.weight"  # a tensor of the model that is added to the embeddings


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerInput:
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
        return (Norm(path=f"{self.module}.{NORM}", half="mlp", width=self.width),)

    @property
    def arrays(self) -> tuple[FrozenArray, ...]:
        return ()

    @property
    def saved(self) -> tuple[SavedTensor, ...]:
        return (
            SavedTensor(name="x before its input", half="mlp", width=self.width, input_of=GATE),
            SavedTensor(name="gate of its input", half="mlp", width=self.inner, checkpoint="per_layer_gate"),
            SavedTensor(name="input of the layer", half="mlp", width=self.inner),
            SavedTensor(name="gated input", half="mlp", width=self.inner, input_of=PROJECTION),
            SavedTensor(name="projected input", half="mlp", width=self.width, checkpoint="per_layer_out"),
            SavedTensor(name="scale of its norm", half="mlp", width=1, float32=True),
        )

    def _linear(self, name: str, site: str, inputs: int, outputs: int) -> Linear:
        return Linear(name=name, module=self.module, half="mlp", site=site, in_features=inputs, out_features=outputs)
