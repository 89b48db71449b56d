"""8-bit floats (e4m3) with a float32 scale per block of 128 x 128: W[k, n] ≈ values[n, k] · scales[n / 128, k / 128].

DeepSeek's format. Blocks at the ends of a matrix may be smaller. A layer is dequantised when it runs, because a product
of 8-bit floats cannot apply scales that change along the axis that it sums over. jax is imported on use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BLOCK = 128


def blocks_of(size: int) -> int:
    """Number of blocks along an axis."""
    return -(-size // BLOCK)


def quantise(kernel_KN: Any) -> dict[str, Any]:
    """The nearest 8-bit float, ties to even, where a block's scale is the power of two that fits its largest."""
    import jax.numpy as jnp

    from pallas_kernels.quantised.rows import E4M3, power_of_two_scales

    out_features, in_features = kernel_KN.T.shape
    padded = jnp.pad(jnp.abs(kernel_KN.T), ((0, -out_features % BLOCK), (0, -in_features % BLOCK)))
    blocks = padded.reshape(blocks_of(out_features), BLOCK, blocks_of(in_features), BLOCK)
    scales, inverse = power_of_two_scales(jnp.max(blocks, axis=(1, 3)))
    return {"values": (kernel_KN.T * _spread(inverse, kernel_KN.T.shape)).astype(E4M3), "scales": scales}


def dequantise(arrays: Mapping[str, Any], dtype: Any) -> Any:
    """values · scales, multiplied in float32 and rounded once."""
    import jax.numpy as jnp

    values_NK = arrays["values"].astype(jnp.float32)
    return (values_NK * _spread(arrays["scales"], values_NK.shape)).astype(dtype).T


def _spread(scales: Any, shape: tuple[int, int]) -> Any:
    """Each block's scale at each of its weights."""
    import jax.numpy as jnp

    rows = jnp.repeat(scales, BLOCK, axis=0)[: shape[0]]
    return jnp.repeat(rows, BLOCK, axis=1)[:, : shape[1]]
