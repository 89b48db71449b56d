"""The decoder: token embedding, layers (unrolled or scanned), final norm, head.

Dims: `T` packed tokens · `D` model width · `V` vocabulary · `L` layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from ..config.model import ModelConfig
from ..modules import LoRAContext
from ..modules.init import init_leaves
from ..modules.spec import AdapterSpec
from .attention import AttentionImplementation
from .layer import DecoderLayer, LayerInputs
from .norm import RMSNorm
from .rope import rope_tables
from .segments import Segments

Layers = Literal["unroll", "scan"]
Remat = Literal["none", "full"]


class Table(nnx.Module):
    """A [V, D] matrix with a row per token: the embedding, and the head as Hugging Face stores it."""

    def __init__(self, vocab_size: int, width: int, *, dtype: Any, rngs: nnx.Rngs):
        self.weight = nnx.Param(
            jax.random.normal(rngs.params(), (vocab_size, width), dtype) * jnp.asarray(width**-0.5, dtype)
        )


class Decoder(nnx.Module):
    """A Llama-like language model with the LoRA weights of several adapters.

    Module names are those of Hugging Face checkpoints. Trainable leaves are `nnx.LoRAParam`, all others are frozen:
    split once (`nnx.split(model, nnx.LoRAParam, ...)`) and merge inside `jit`.

    Args:
        config: shape and arithmetic.
        adapters: whose LoRA weights the projections hold, in this order; drawn from each adapter's own seed.
        dtype: of the base weights and of the computation.
        layers: "unroll" keeps a list of layers; "scan" keeps one layer whose leaves have a leading axis of L. Same
            numbers;
            scanning compiles faster, unrolling runs faster.
        remat: "full" recomputes each layer in the backward pass and keeps only its input.
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
        layers: Layers = "unroll",
        remat: Remat = "none",
        rngs: nnx.Rngs | None = None,
    ):
        rngs = nnx.Rngs(0) if rngs is None else rngs
        self.config, self.remat = config, remat
        self.embed_tokens = Table(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        each = [DecoderLayer(config, adapters, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)]
        self.layers = nnx.List(each) if layers == "unroll" else _stack(each)
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        tied = config.tie_embeddings
        self.lm_head = nnx.data(None) if tied else Table(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        _draw_adapters(self, adapters)

    def hidden(
        self,
        tokens: Int[Array, " T"],
        positions: Int[Array, " T"],
        segments: Segments,
        ctx: LoRAContext | None = None,
        *,
        attention: AttentionImplementation | None = None,
    ) -> Float[Array, "T D"]:
        """Runs all but the head on packed rows.

        Args:
            tokens: ids.
            positions: place of each row in its sample, from 0.
            segments: which rows belong together.
            ctx: which adapter each tile of rows uses; None runs the base model.
            attention: implementation, see `models.attention`.
        """
        inputs = LayerInputs(rope=rope_tables(self.config, jnp.asarray(positions)), segments=segments, lora=ctx)
        x_TD = self.embed_tokens.weight[...][jnp.asarray(tokens)]
        if isinstance(self.layers, nnx.List):
            return self.norm(self._unrolled(self.layers, x_TD, inputs, attention))
        return self.norm(self._scanned(self.layers, x_TD, inputs, attention))

    def head(self) -> Float[Array, "D V"]:
        """The output projection; a tied one is a transposed view of the embedding."""
        table = self.embed_tokens if self.lm_head is None else self.lm_head
        return table.weight[...].T

    def __call__(
        self,
        tokens: Int[Array, " T"],
        positions: Int[Array, " T"],
        segments: Segments,
        ctx: LoRAContext | None = None,
        *,
        attention: AttentionImplementation | None = None,
    ) -> Float[Array, "T V"]:
        """Computes all logits in float32; for small models and tests (training uses `objective.adapter_losses`)."""
        hidden_TD = self.hidden(tokens, positions, segments, ctx, attention=attention)
        precision = "highest" if hidden_TD.dtype == jnp.float32 else None
        return jnp.matmul(hidden_TD, self.head(), precision=precision, preferred_element_type=jnp.float32)

    def _unrolled(self, layers: Sequence[DecoderLayer], x_TD, inputs: LayerInputs, attention) -> jax.Array:
        for number, layer in enumerate(layers):
            graph, state = nnx.split(layer)
            x_TD = self._layer(graph, attention)(state, x_TD, _at_layer(inputs, number))
        return x_TD

    def _scanned(self, layers: DecoderLayer, x_TD, inputs: LayerInputs, attention) -> jax.Array:
        graph, state = nnx.split(layers)
        run = self._layer(graph, attention)

        def body(x_TD, each):
            state, number = each
            return run(state, x_TD, _at_layer(inputs, number)), None

        return lax.scan(body, x_TD, (state, jnp.arange(self.config.num_layers, dtype=jnp.int32)))[0]

    def _layer(self, graph, attention) -> Callable[..., jax.Array]:
        def run(state, x_TD, inputs):
            return nnx.merge(graph, state)(x_TD, inputs, attention)

        return jax.checkpoint(run) if self.remat == "full" else run


def _at_layer(inputs: LayerInputs, number) -> LayerInputs:
    return inputs if inputs.lora is None else replace(inputs, lora=inputs.lora.at_layer(number))


def _stack(layers: Sequence[DecoderLayer]) -> DecoderLayer:
    graph = nnx.split(layers[0])[0]
    return nnx.merge(graph, jax.tree.map(lambda *leaves: jnp.stack(leaves), *(nnx.split(layer)[1] for layer in layers)))


def _draw_adapters(model: Decoder, adapters: Sequence[AdapterSpec]) -> None:
    """Sets the LoRA leaves to what each adapter's seed says, whoever else is there."""
    leaves = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))}
    if any(isinstance(leaf[...], Tracer) for leaf in leaves.values()):
        return  # shapes only: no reason to draw numbers
    drawn: dict[str, np.ndarray] = init_leaves(adapters, {name: leaf.shape for name, leaf in leaves.items()})
    for name, leaf in leaves.items():
        leaf[...] = jnp.asarray(drawn[name])
