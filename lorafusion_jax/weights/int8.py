"""int8 with a float32 scale per output channel: W[k, n] ≈ values[k, n] · scales[n]. jax is imported on use.

Symmetric, rounded to nearest with ties to even. It takes half the bytes of bfloat16. Experts, whose kernels lie one
below the other, have scales of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

LARGEST = 127
# A product, because compilers may turn a division by a constant into a product.
STEP = np.float32(1 / LARGEST)


def quantise(kernel_KN: Any) -> dict[str, Any]:
    """values = round(W / scales), scales = max over K of |W| / 127; the scale of a zero channel is 1."""
    import jax.numpy as jnp

    scales_N = jnp.max(jnp.abs(kernel_KN), axis=0) * STEP
    scales_N = jnp.where(scales_N == 0, jnp.float32(1), scales_N)
    values_KN = jnp.clip(jnp.round(kernel_KN / scales_N), -LARGEST, LARGEST).astype(jnp.int8)
    return {"values": values_KN, "scales": scales_N}


def quantise_experts(kernels: Any, experts: int) -> dict[str, Any]:
    """The same of each expert's kernel, with scales [E, N]."""
    import jax

    arrays = jax.vmap(quantise)(kernels.reshape(experts, -1, kernels.shape[1]))
    return arrays | {"values": arrays["values"].reshape(kernels.shape)}


def dequantise(arrays: Mapping[str, Any], dtype: Any) -> Any:
    """values · scales, multiplied in float32 and rounded once."""
    import jax.numpy as jnp

    return (arrays["values"].astype(jnp.float32) * arrays["scales"]).astype(dtype)


def dequantise_experts(arrays: Mapping[str, Any], dtype: Any) -> Any:
    """[E · K, N]"""
    values, scales = arrays["values"], arrays["scales"]
    kernels = {"values": values.reshape(len(scales), -1, values.shape[1]), "scales": scales[:, None]}
    return dequantise(kernels, dtype).reshape(values.shape)
