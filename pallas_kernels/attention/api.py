"""Packed causal attention as two pure functions on arrays, forward and backward.

Isolated: a NaN or infinity reaches rows of its own document and no others, at almost no cost. Weights of other
documents' rows are exact zeros, chosen by `select`. What a zero does not stop, 0 · NaN in a product that sums over
rows, is stopped by cleaning the operand that the sum runs over: keys and values beforehand (they are few), queries and
dO in the kernel, and only if some row's softmax or delta says that there is something to clean.

T packed rows · H query heads · K key heads, H a multiple · C head width
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.device import num_sms

from .blocks import key_blocks, query_blocks
from .common import TILE, AttentionConfig, Units
from .dkv import KEYS, dkv
from .dq import dq
from .forward import forward

_DTYPES = (jnp.bfloat16, jnp.float16)
_WIDTHS = (64, 128)


class Saved(NamedTuple):
    """What backward needs: q as given, keys and values cleaned, o, base-2 logarithms of sums, the documents' rows."""

    q_THC: jax.Array
    k_TKC: jax.Array
    v_TKC: jax.Array
    o_THC: jax.Array
    lse2_HT: jax.Array
    first_T: jax.Array
    end_T: jax.Array


def attention_forward(
    q_THC: jax.Array,
    k_TKC: jax.Array,
    v_TKC: jax.Array,
    first_T: jax.Array,
    end_T: jax.Array,
    *,
    config: AttentionConfig | None = None,
) -> tuple[jax.Array, Saved]:
    """o[t] = Σ_s softmax_s(q[t]·k[s] / √C) v[s] over first[t] ≤ s ≤ t, and what backward needs.

    Args:
        first_T, end_T: int32, first row and end of each row's document, see `document_rows`.
    Raises:
        NotImplementedError: these shapes or this dtype are not served, see `why_not`.
    """
    if reason := why_not(q_THC, k_TKC):
        raise NotImplementedError(f"packed attention for Hopper {reason}")
    bad_TK1 = ~(jnp.isfinite(k_TKC) & jnp.isfinite(v_TKC)).all(-1, keepdims=True)
    k, v = (jnp.where(bad_TK1, jnp.zeros((), x.dtype), x) for x in (k_TKC, v_TKC))
    marked = jnp.where(bad_TK1, jnp.asarray(jnp.nan, k.dtype), k)
    o, lse2 = forward(q_THC, marked, v, first_T, _queries(first_T, q_THC, k), **_static(q_THC, config))
    return o, Saved(q_THC, k, v, o, lse2, first_T, end_T)


def attention_backward(
    saved: Saved, do_THC: jax.Array, *, config: AttentionConfig | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v, the same bits in every run: sums have a fixed order and there are no atomics.

    Args:
        saved: from `attention_forward`.
        do_THC: gradient of o.
    """
    q, k, v, o, lse2, first_T, end_T = saved
    static = _static(q, config)
    grad_q, delta_HT = dq(q, k, v, o, do_THC, lse2, first_T, _queries(first_T, q, k), **static)
    finite_HT = jnp.isfinite(lse2) & jnp.isfinite(delta_HT)
    dirty = jnp.any(~finite_HT).astype(jnp.int32)[None]
    lse2 = jnp.where(finite_HT, lse2, jnp.nan)
    grad_k, grad_v = dkv(q, k, v, do_THC, lse2, delta_HT, end_T, key_blocks(end_T, KEYS, TILE), dirty, **static)
    return grad_q, grad_k, grad_v


def why_not(q_THC: jax.Array, k_TKC: jax.Array) -> str:
    """Why the kernels cannot serve these arrays, whatever the device; empty if they can."""
    T, H, C = q_THC.shape
    if q_THC.dtype not in _DTYPES:
        return f"wants bfloat16 or float16, not {q_THC.dtype}"
    if C not in _WIDTHS:
        return f"wants a head width of {' or '.join(map(str, _WIDTHS))}, not {C}"
    if T % KEYS:
        return f"wants a multiple of {KEYS} rows, not {T}"
    if H % k_TKC.shape[1]:
        return f"wants a multiple of the {k_TKC.shape[1]} key heads as query heads, not {H}"
    return ""


def _queries(first_T: jax.Array, q_THC: jax.Array, k_TKC: jax.Array) -> jax.Array:
    return query_blocks(first_T, Units(group=q_THC.shape[1] // k_TKC.shape[1]).queries, TILE)


def _static(q_THC: jax.Array, config: AttentionConfig | None) -> dict:
    return {"scale": q_THC.shape[-1] ** -0.5, "sms": num_sms(), "config": config or AttentionConfig()}
