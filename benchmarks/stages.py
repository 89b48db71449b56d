"""Stages with random weights and full microbatches, for benchmarks that time the trainer's own programs."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lorafusion_jax.config.schema import AdapterConfig, TrainSettings
from lorafusion_jax.config.specs import adapter_spec
from lorafusion_jax.data.assemble import Microbatch, Piece, assemble, num_segments, sample_key, stacked
from lorafusion_jax.layout.extent import Extent
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.session.mesh import stage_meshes
from lorafusion_jax.session.parts import Parts
from lorafusion_jax.session.stage import Stage
from lorafusion_jax.session.stage_weights import StageWeights


def random_stage(model: ModelConfig, adapters: Sequence[AdapterConfig], dtype: jnp.dtype) -> Stage:
    """All layers of a model on one device; no adapter has weights yet."""
    specs = tuple(adapter_spec(adapter) for adapter in adapters)
    parts = Parts(model=model, specs=specs, settings=TrainSettings(), dtype=dtype)
    weights = _frozen(model, parts, dtype)
    return Stage(parts, weights, stage_meshes()[0], tuple(adapters), remat="gemm_inputs", block=1)


def draw_adapter(parts: Parts, name: str, seed: int) -> dict[str, np.ndarray]:
    """Weights of one adapter, B not zero: else dA would be."""
    rng, shapes = np.random.default_rng(seed), parts.leaves.own_shapes()[name]
    return {leaf: rng.standard_normal(shape, np.float32) / 64 for leaf, shape in shapes.items()}


def full_microbatch(model: ModelConfig, adapters: Sequence[int], *, tokens: int, tile: int) -> Microbatch:
    """A full microbatch of these adapters, two samples each."""
    rng, length = np.random.default_rng(0), tokens // (2 * len(adapters))
    pieces = [
        Piece(
            adapter,
            rng.integers(0, model.vocab_size, length).astype(np.int32),
            np.arange(length) > 0,
            1 / length,
            sample_key(0, sample),
        )
        for adapter in adapters
        for sample in range(2)
    ]
    sizes = {"capacity_tokens": tokens, "tile_tokens": tile, "max_adapters": len(adapters)}
    return stacked([assemble(pieces, max_segments=num_segments(len(pieces)), **sizes)])


def _frozen(model: ModelConfig, parts: Parts, dtype: jnp.dtype) -> StageWeights:
    def random(number: int, shape: tuple[int, ...]) -> jax.Array:
        if len(shape) == 1:
            return jnp.ones(shape, dtype)
        return jax.random.normal(jax.random.key(number), shape, dtype) * shape[0] ** -0.5

    shapes = parts.frozen_shapes()
    pieces = [
        {name: random(number + 100 * layer, shape) for number, (name, shape) in enumerate(shapes.items())}
        for layer in range(model.num_layers)
    ]
    table = random(999, (model.vocab_size, model.hidden_size))
    norm = random(0, (model.hidden_size,))
    return StageWeights(extent=Extent(0, 2 * model.num_layers), pieces=pieces, embed=table, norm=norm, head=table)
