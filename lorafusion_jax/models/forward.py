"""The forward pass in pieces: embedding, layers or half layers, final norm.

`Decoder` runs all pieces; each pipeline stage runs its own pieces in its programs.
Dims: `T` packed tokens · `D` model width · `V` vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.models.attention import AttentionImplementation
from lorafusion_jax.models.inputs import LayerInputs
from lorafusion_jax.models.layer import DecoderLayer
from lorafusion_jax.models.norm import layer_norm, shifted
from lorafusion_jax.models.rope import query_scale, rope_tables
from lorafusion_jax.models.segments import Segments
from lorafusion_jax.models.stream import Stream
from lorafusion_jax.modules import LoRAContext
from pallas_kernels.exact import product
from pallas_kernels.norm import rms_norm


def layer_inputs(
    config: ModelConfig, positions_T: Int[Array, " T"], segments: Segments, lora: LoRAContext | None
) -> LayerInputs:
    """Builds the inputs that all layers share: rotary tables, segments, and the adapter of each tile."""
    positions_T = jnp.asarray(positions_T)
    ropes = config.ropes
    return LayerInputs(
        ropes=tuple(rope_tables(rope, config.head_dim, positions_T, segments) for rope in ropes),
        segments=segments,
        lora=lora,
        query_scales=_query_scales(config, positions_T),
        chunks=None if config.chunk is None else segments.in_chunks(config.chunk),
    )


def _query_scales(config: ModelConfig, positions_T: jax.Array) -> tuple[jax.Array, ...] | None:
    if not any(rope.query_beta for rope in config.ropes):
        return None
    return tuple(query_scale(rope, positions_T) for rope in config.ropes)


def embed(table_VD: Float[Array, "V D"], tokens_T: Int[Array, " T"], scale: float = 1.0) -> Float[Array, "T D"]:
    """Looks up the embeddings of the tokens, times a scale that is rounded to their dtype."""
    return scaled_embedding(table_VD[jnp.asarray(tokens_T)], scale)


def scaled_embedding(x_TD: Float[Array, "T D"], scale: float) -> Float[Array, "T D"]:
    """Multiplies embeddings by a scale that is rounded to their dtype."""
    return x_TD if scale == 1 else x_TD * jnp.asarray(scale, x_TD.dtype)


def with_positions(
    x_TD: Float[Array, "T D"], table_PD: Float[Array, "P D"], positions_T: Int[Array, " T"]
) -> Float[Array, "T D"]:
    """Adds the learned embeddings of positions; rows of no sample may have any position."""
    return x_TD + table_PD[jnp.clip(positions_T, 0, len(table_PD) - 1)]


def run_layer(
    layer: DecoderLayer,
    carried: Stream | Float[Array, "T D"],
    inputs: LayerInputs,
    number: int | jax.Array,
    implementation: AttentionImplementation | None,
) -> Stream | Float[Array, "T D"]:
    """Runs a layer or one half of it.

    Args:
        carried: what the layer before passes on.
        number: index of the layer in the model; dropout depends on it.
        implementation: attention implementation.
    """
    if isinstance(carried, Stream) or layer.spec.gives_keys:
        return layer.with_keys(carried, inputs.at_layer(number), implementation)
    return layer(carried, inputs.at_layer(number), implementation)


def final_norm(x_TD: Float[Array, "T D"], weight_D: Float[Array, "*2 D"], config: ModelConfig) -> Float[Array, "T D"]:
    """Computes the input of the head."""
    if config.norm_kind == "layer":
        return layer_norm(x_TD, weight_D, config.norm_eps)
    return rms_norm(x_TD, shifted(weight_D, config.norm_offset), eps=config.norm_eps)


def logits(hidden: Float[Array, "T D"], head: Float[Array, "D V"], config: ModelConfig) -> Float[Array, "T V"]:
    """Computes all logits in float32: soft_cap · tanh(scale · hidden head / soft_cap)."""
    out = product(hidden, head)
    out = out if config.logit_scale == 1 else out * config.logit_scale
    cap = config.final_soft_cap
    return out if cap is None else cap * jnp.tanh(out / cap)
