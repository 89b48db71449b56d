"""Packed causal attention as two pure functions on arrays, forward and backward.

T packed rows · H query heads · K key heads, H a multiple · C head width
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .common import TILE, WARPGROUPS, AttentionConfig
from .dkv import dkv
from .dq import dq
from .forward import forward

ROWS = TILE * WARPGROUPS
_DTYPES = (jnp.bfloat16, jnp.float16)
_WIDTHS = (64, 128)


def attention_forward(
    q_THC: jax.Array, k_TKC: jax.Array, v_TKC: jax.Array, first_T: jax.Array, *, config: AttentionConfig | None = None
) -> tuple[jax.Array, jax.Array]:
    """o[t] = Σ_s softmax_s(q[t]·k[s] / √C) v[s] over first[t] ≤ s ≤ t, and the logarithms of the softmax's sums.

    Inputs must be finite: a product with a weight of zero would carry a NaN into other documents.

    Args:
        first_T: int32, first row of each row's document, see `document_rows`.
    Returns:
        o [T, H, C], and lse2 [H, T] in float32, with base 2.
    Raises:
        NotImplementedError: these shapes or this dtype are not served, see `why_not`.
    """
    _refuse(q_THC, k_TKC)
    scale = q_THC.shape[-1] ** -0.5
    return forward(q_THC, k_TKC, v_TKC, first_T, scale=scale, config=config or AttentionConfig())


def attention_backward(
    q_THC: jax.Array,
    k_TKC: jax.Array,
    v_TKC: jax.Array,
    o_THC: jax.Array,
    lse2_HT: jax.Array,
    do_THC: jax.Array,
    first_T: jax.Array,
    end_T: jax.Array,
    *,
    config: AttentionConfig | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v, the same bits in every run: sums have a fixed order and there are no atomics.

    Args:
        o_THC: from `attention_forward`, with lse2_HT.
        do_THC: gradient of o; finite, like all inputs.
        first_T, end_T: from `document_rows`.
    Raises:
        NotImplementedError: see `why_not`.
    """
    _refuse(q_THC, k_TKC)
    static = {"scale": q_THC.shape[-1] ** -0.5, "config": config or AttentionConfig()}
    delta_HT = (o_THC.astype(jnp.float32) * do_THC.astype(jnp.float32)).sum(-1).T
    grad_q = dq(q_THC, k_TKC, v_TKC, do_THC, lse2_HT, delta_HT, first_T, **static)
    grad_k, grad_v = dkv(q_THC, k_TKC, v_TKC, do_THC, lse2_HT, delta_HT, end_T, **static)
    return grad_q, grad_k, grad_v


def why_not(q_THC: jax.Array, k_TKC: jax.Array) -> str:
    """Why the kernels cannot serve these arrays, whatever the device; empty if they can."""
    T, H, C = q_THC.shape
    if q_THC.dtype not in _DTYPES:
        return f"wants bfloat16 or float16, not {q_THC.dtype}"
    if C not in _WIDTHS:
        return f"wants a head width of {' or '.join(map(str, _WIDTHS))}, not {C}"
    if T % ROWS:
        return f"wants a multiple of {ROWS} rows, not {T}"
    if H % k_TKC.shape[1]:
        return f"wants a multiple of the {k_TKC.shape[1]} key heads as query heads, not {H}"
    return ""


def _refuse(q_THC: jax.Array, k_TKC: jax.Array) -> None:
    if reason := why_not(q_THC, k_TKC):
        raise NotImplementedError(f"packed attention for Hopper {reason}")
