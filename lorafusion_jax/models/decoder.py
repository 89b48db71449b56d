"""The decoder: token embedding, layers, final norm, head.

Dims: `T` packed tokens · `D` model width · `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from lorafusion_jax.adapters.init import init_leaves
from lorafusion_jax.adapters.spec import AdapterSpec, refuse_only_in_runs
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.families.per_layer_input import POSITIONS, TABLE
from lorafusion_jax.models.attention import AttentionImplementation
from lorafusion_jax.models.forward import embed, final_norm, layer_inputs, logits, run_layer, with_positions
from lorafusion_jax.models.layer import DecoderLayer
from lorafusion_jax.models.norm import LayerNorm, RMSNorm
from lorafusion_jax.models.per_layer_input import own_inputs
from lorafusion_jax.models.segments import Segments
from lorafusion_jax.models.stream import activations
from lorafusion_jax.modules import LoRAContext


class Table(nnx.Module):
    """A [V, D] matrix with a row per token: the embedding, or the head as stored by Hugging Face."""

    def __init__(self, vocab_size: int, width: int, *, dtype: Any, rngs: nnx.Rngs):
        self.weight = nnx.Param(
            jax.random.normal(rngs.params(), (vocab_size, width), dtype) * jnp.asarray(width**-0.5, dtype)
        )


class Decoder(nnx.Module):
    """A decoder-only language model with the LoRA weights of several adapters.

    Module names are those of Hugging Face checkpoints. Trainable leaves are `nnx.LoRAParam`, all others are frozen.
    Split the model once (`nnx.split(model, nnx.LoRAParam, ...)`) and merge it inside `jit`.

    Args:
        config: shapes and hyperparameters.
        adapters: adapters in stacking order. LoRA weights are drawn from each adapter's own seed.
        dtype: dtype of the base weights and of the computation.
        rngs: draws the base weights. Build the model outside `jit`, or under `nnx.eval_shape` for shapes only.

    Example:
        >>> config = ModelConfig(family="llama", vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=2,
        ...                      num_heads=2, num_kv_heads=1, head_dim=8)
        >>> model = Decoder(config, dtype=jnp.float32)
        >>> model(jnp.arange(6), jnp.arange(6), Segments.from_lengths([6], 6)).shape
        (6, 32)
    """

    def __init__(
        self,
        config: ModelConfig,
        adapters: Sequence[AdapterSpec] = (),
        *,
        dtype: Any = jnp.bfloat16,
        rngs: nnx.Rngs | None = None,
    ):
        rngs = nnx.Rngs(0) if rngs is None else rngs
        self.config = config
        self.embed_tokens = Table(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        if config.input_shapes:
            for name, shape in config.input_shapes.items():
                table = RMSNorm(*shape, eps=config.norm_eps, dtype=dtype) if len(shape) == 1 else None
                setattr(self, name.partition(".")[0], table or Table(*shape, dtype=dtype, rngs=rngs))
        refuse_only_in_runs(adapters)
        layers = [DecoderLayer(config, adapters, number=n, dtype=dtype, rngs=rngs) for n in range(config.num_layers)]
        self.layers = nnx.List(layers)
        size = {"eps": config.norm_eps, "dtype": dtype}
        if config.norm_kind == "layer":
            self.norm = LayerNorm(config.hidden_size, bias=config.norm_bias, **size)
        else:
            self.norm = RMSNorm(config.hidden_size, offset=config.norm_offset, **size)
        tied = config.tie_embeddings
        self.lm_head = nnx.data(None) if tied else Table(config.num_outputs, config.hidden_size, dtype=dtype, rngs=rngs)
        _draw_adapters(self, adapters)

    def hidden(
        self,
        tokens: Int[Array, " T"],
        positions: Int[Array, " T"] | None = None,
        segments: Segments | None = None,
        ctx: LoRAContext | None = None,
        *,
        attention: AttentionImplementation | None = None,
    ) -> Float[Array, "T D"]:
        """Runs everything but the head on packed rows.

        Args:
            tokens: token ids.
            positions: position of each row in its sample, from 0.
            segments: boundaries of the samples. Without both, the rows are one text.
            ctx: adapter of each tile of rows; None runs the base model.
            attention: implementation, see `models.attention`.
        """
        if (positions is None) != (segments is None):
            raise ValueError("positions and segments belong together: give both, or neither for one text")
        if positions is None or segments is None:
            count = len(tokens)
            positions, segments = jnp.arange(count, dtype=jnp.int32), Segments.from_lengths([count], count)
        inputs = layer_inputs(self.config, positions, segments, ctx)
        x_TD = embed(self.embed_tokens.weight[...], tokens, self.config.embedding_scale)
        if self.config.learned_positions:
            x_TD = with_positions(x_TD, self._input_weights[POSITIONS], positions)
        if self.config.input_width:
            inputs = replace(inputs, of_layers=self._own_inputs(tokens, x_TD))
        carry: Any = x_TD
        for number, layer in enumerate(self.layers):
            carry = run_layer(layer, carry, inputs, number, attention)
        return final_norm(activations(carry), self.norm.weight[...], self.config)

    def _own_inputs(self, tokens: Int[Array, " T"], x_TD: Float[Array, "T D"]) -> Float[Array, "L T P"]:
        weights = self._input_weights
        looked_up = embed(weights[TABLE], tokens)
        return own_inputs(looked_up, x_TD, weights, self.config)

    @property
    def _input_weights(self) -> dict[str, jax.Array]:
        return {name: getattr(self, name.partition(".")[0]).weight[...] for name in self.config.input_shapes}

    def head(self) -> Float[Array, "D V"]:
        """The output projection; a tied one is a transposed view of the embedding."""
        table = self.embed_tokens if self.lm_head is None else self.lm_head
        return table.weight[...].T

    def __call__(
        self,
        tokens: Int[Array, " T"],
        positions: Int[Array, " T"] | None = None,
        segments: Segments | None = None,
        ctx: LoRAContext | None = None,
        *,
        attention: AttentionImplementation | None = None,
    ) -> Float[Array, "T V"]:
        """Computes all logits in float32, for small models and tests; training uses `objective.token_losses`.

        `model(tokens)` takes the rows as one text; packed samples need `positions` and `segments`, see `hidden`.
        """
        tokens = jnp.asarray(tokens)
        if tokens.ndim != 1:
            raise ValueError(f"tokens has the shape {tokens.shape}, not [T]: one text, or packed ones with segments")
        vocab_size = self.config.vocab_size
        if not isinstance(tokens, Tracer) and tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
            raise ValueError(
                f"tokens are {tokens.min()} to {tokens.max()}, and the vocabulary is 0 to {vocab_size - 1}"
            )
        hidden_TD = self.hidden(tokens, positions, segments, ctx, attention=attention)
        return logits(hidden_TD, self.head(), self.config)


def _draw_adapters(model: Decoder, adapters: Sequence[AdapterSpec]) -> None:
    """Initialises the LoRA leaves from each adapter's seed, independent of the other adapters."""
    leaves = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))}
    if any(isinstance(leaf[...], Tracer) for leaf in leaves.values()):
        return  # abstract: shapes only
    arrays: dict[str, np.ndarray] = init_leaves(adapters, {name: leaf.shape for name, leaf in leaves.items()})
    for name, leaf in leaves.items():
        leaf[...] = jnp.asarray(arrays[name])
