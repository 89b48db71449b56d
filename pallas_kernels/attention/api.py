"""Packed causal attention as two pure functions, forward and backward.

NaN and infinity stay inside their own document, at almost no cost. Weights of other documents' rows are exact zeros by
`select`. Because 0 · NaN is NaN, the operands of sums over rows are cleaned as well: keys and values before the kernel
(they are small), queries and dO in the kernel, and only if the softmax or delta of some row is not finite.

T packed rows · H query heads · K key heads, H a multiple · C head width
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import policy
from pallas_kernels.attention.hopper.blocks import key_blocks, query_blocks
from pallas_kernels.attention.hopper.config import TILE, AttentionConfig, Units
from pallas_kernels.device import ignores_setmaxnreg, num_sms

type Described = jax.Array | jax.ShapeDtypeStruct


class Saved(NamedTuple):
    """Residuals: q, k and v (cleaned on Hopper), o, base-2 logarithms of sums, and the rows of the documents."""

    q_THC: jax.Array
    k_TKC: jax.Array
    v_TKC: jax.Array
    o_THC: jax.Array
    lse2_HT: jax.Array
    first_T: jax.Array
    end_T: jax.Array


def attention_forward(
    q_THC: Float[Array, "T H C"],
    k_TKC: Float[Array, "T K C"],
    v_TKC: Float[Array, "T K C"],
    first_T: Int[Array, " T"],
    end_T: Int[Array, " T"],
    *,
    scale: float | None = None,
    config: AttentionConfig | None = None,
) -> tuple[Float[Array, "T H C"], Saved]:
    """Returns o[t] = Σ_s softmax_s(scale · q[t]·k[s]) v[s] over first[t] ≤ s ≤ t, and the residuals.

    Args:
        first_T, end_T: int32, first row and end of each row's document, see `document_rows`.
        scale: None: 1 / √C.
    Raises:
        NotImplementedError: shapes or dtype are not supported, see `unsupported_reason`.
    """
    from pallas_kernels.attention.hopper.forward import forward  # the kernels' language is slow to import

    if reason := unsupported_reason(q_THC, k_TKC):
        raise NotImplementedError(f"packed attention for Hopper {reason}")
    bad_TK1 = ~(jnp.isfinite(k_TKC) & jnp.isfinite(v_TKC)).all(-1, keepdims=True)
    k, v = (jnp.where(bad_TK1, jnp.zeros((), x.dtype), x) for x in (k_TKC, v_TKC))
    marked = jnp.where(bad_TK1, jnp.asarray(jnp.nan, k.dtype), k)
    o, lse2 = forward(q_THC, marked, v, first_T, _queries(first_T, q_THC, k), **_static(q_THC, scale, config))
    return o, Saved(q_THC, k, v, o, lse2, first_T, end_T)


def attention_backward(
    saved: Saved,
    do_THC: Float[Array, "T H C"],
    *,
    scale: float | None = None,
    config: AttentionConfig | None = None,
) -> tuple[Float[Array, "T H C"], Float[Array, "T K C"], Float[Array, "T K C"]]:
    """Returns the gradients of q, k and v. They are deterministic: sums have a fixed order, without atomics.

    Args:
        saved: from `attention_forward`.
        do_THC: gradient of o.
        scale: as in forward.
    """
    from pallas_kernels.attention.hopper.dkv import KEYS, dkv
    from pallas_kernels.attention.hopper.dq import dq

    q, k, v, o, lse2, first_T, end_T = saved
    static = _static(q, scale, config)
    grad_q, delta_HT = dq(q, k, v, o, do_THC, lse2, first_T, _queries(first_T, q, k), **static)
    finite_HT = jnp.isfinite(lse2) & jnp.isfinite(delta_HT)
    dirty = jnp.any(~finite_HT).astype(jnp.int32)[None]
    lse2 = jnp.where(finite_HT, lse2, jnp.nan)
    grad_k, grad_v = dkv(q, k, v, do_THC, lse2, delta_HT, end_T, key_blocks(end_T, KEYS, TILE), dirty, **static)
    return grad_q, grad_k, grad_v


def unsupported_reason(q_THC: Described, k_TKC: Described) -> str | None:
    """Why the kernels do not support these arrays on any device; None if they do."""
    T, H, C = q_THC.shape
    return policy.attention_unsupported_reason(
        rows=T, heads=H, key_heads=k_TKC.shape[1], width=C, dtype=str(q_THC.dtype)
    )


def _queries(first_T: jax.Array, q_THC: jax.Array, k_TKC: jax.Array) -> jax.Array:
    return query_blocks(first_T, Units(group=q_THC.shape[1] // k_TKC.shape[1]).queries, TILE)


def _static(q_THC: jax.Array, scale: float | None, config: AttentionConfig | None) -> dict:
    scale = q_THC.shape[-1] ** -0.5 if scale is None else scale
    return {"scale": scale, "sms": num_sms(), "config": config or AttentionConfig(apart=ignores_setmaxnreg())}
