"""Products whose float32 operands are not rounded to tf32, the default of GPUs: its 10 bits do not keep 1e-5."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def precision_of(dtype: Any) -> str | None:
    """The precision of a product of this type, as `jnp.matmul` takes it."""
    return "highest" if dtype == jnp.float32 else None


def product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """lhs rhs in float32."""
    return jnp.matmul(lhs, rhs, precision=precision_of(lhs.dtype), preferred_element_type=jnp.float32)


def contract(spec: str, lhs: jax.Array, rhs: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """Contracts with float32 accumulation.

    Returns float32; pass `dtype` for layer-wide results that are rounded next: float32 would double the bytes written.
    """
    return jnp.einsum(spec, lhs, rhs, precision=precision_of(lhs.dtype), preferred_element_type=dtype)
