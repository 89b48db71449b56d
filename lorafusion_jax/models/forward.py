"""The forward pass in pieces: embedding, layers or half layers, final norm.

`Decoder` runs all pieces; each pipeline stage runs its own pieces in its programs.
Dims: `T` packed tokens · `D` model width · `V` vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.norm import rms_norm

from ..config.model import ModelConfig
from ..modules import LoRAContext
from .attention import AttentionImplementation
from .layer import DecoderLayer, LayerInputs
from .rope import rope_tables
from .segments import Segments


def layer_inputs(
    config: ModelConfig, positions_T: Int[Array, " T"], segments: Segments, lora: LoRAContext | None
) -> LayerInputs:
    """Builds the inputs that all layers share: rotary tables, segments, and the adapter of each tile."""
    return LayerInputs(rope=rope_tables(config, jnp.asarray(positions_T)), segments=segments, lora=lora)


def embed(table_VD: Float[Array, "V D"], tokens_T: Int[Array, " T"]) -> Float[Array, "T D"]:
    """Looks up the embeddings of the tokens."""
    return table_VD[jnp.asarray(tokens_T)]


def run_layer(
    layer: DecoderLayer,
    x_TD: Float[Array, "T D"],
    inputs: LayerInputs,
    number: int | jax.Array,
    implementation: AttentionImplementation | None,
) -> Float[Array, "T D"]:
    """Runs a layer or one half of it.

    Args:
        number: index of the layer in the model; dropout depends on it.
        implementation: attention implementation.
    """
    return layer(x_TD, inputs.at_layer(number), implementation)


def final_norm(x_TD: Float[Array, "T D"], weight_D: Float[Array, " D"], config: ModelConfig) -> Float[Array, "T D"]:
    """Computes the input of the head."""
    return rms_norm(x_TD, weight_D, eps=config.norm_eps)
