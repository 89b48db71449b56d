"""Memory for the blocks of a cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lorafusion_jax.adapters.table import PLAIN
from lorafusion_jax.families.latent_attention import LatentAttention
from lorafusion_jax.families.layer import Layer
from lorafusion_jax.models.cache import BLOCK
from lorafusion_jax.session.parts import Parts
from lorafusion_jax.session.stage import Stage

SHARE_OF_MEMORY = 0.8  # of what a device has left, for blocks
WITHOUT_LIMIT = 2**31  # bytes of blocks where a device does not say what it has left


def block_bytes(stages: Sequence[Stage]) -> int:
    """Bytes of a block in all layers of the fullest stage."""
    return max(_block_bytes(stage) for stage in stages)


def _block_bytes(stage: Stage) -> int:
    size = np.dtype(stage.parts.dtype).itemsize
    layers = [stage.parts.model.layer(piece.layer) for piece in stage.extent.pieces if piece.half != "mlp"]
    shapes = [shape for layer in layers for shape in cached_rows(stage.parts, layer).values()]
    return BLOCK * size * sum(int(np.prod(shape)) for shape in shapes)


def cached_rows(parts: Parts, layer: Layer) -> dict[str, tuple[int, ...]]:
    """Shapes of what each token keeps in a layer. Latents have to be multiplied by plain adapters only."""
    attention = layer.attention
    if isinstance(attention, LatentAttention) and all(spec.kind == PLAIN for spec in parts.specs):
        return attention.latent_shapes
    return layer.row_shapes


def blocks_that_fit(stages: Sequence[Stage], *, beside_training: bool = False) -> int:
    """Number of blocks that fit into what the devices have left.

    Args:
        beside_training: leave the memory that slots have taken so far, and take again.
    """
    free_bytes, bytes_key = WITHOUT_LIMIT, "peak_bytes_in_use" if beside_training else "bytes_in_use"
    for stage in stages:
        for device in stage.mesh.mesh.devices.flat:
            stats = device.memory_stats() if device.platform != "cpu" else None
            if stats and "bytes_limit" in stats:
                unused = (stats["bytes_limit"] - stats[bytes_key]) * SHARE_OF_MEMORY
                free_bytes = int(unused) if free_bytes == WITHOUT_LIMIT else min(free_bytes, int(unused))
    return max(1, free_bytes // max(block_bytes(stages), 1))
