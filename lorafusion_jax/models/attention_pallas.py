"""Packed causal attention by our own Hopper kernels. Dims: `T` packed tokens, `H` heads, `K` key heads, `C` width."""

from __future__ import annotations

import jax

from pallas_kernels.attention import attention_backward, attention_forward, document_rows

from .attention_kept import kept
from .segments import Segments


def pallas_forward(q_THC: jax.Array, k_TKC: jax.Array, v_TKC: jax.Array, segments: Segments):
    """softmax(q kᵀ / √C) v over the earlier rows of the same segment; and what backward needs."""
    first_T, end_T = document_rows(segments.ids, segments.offsets, segments.lengths)
    o, lse2 = attention_forward(q_THC, k_TKC, v_TKC, first_T)
    residuals = kept((q_THC, k_TKC, v_TKC, o, lse2, first_T, end_T))
    return residuals[3], residuals


def pallas_backward(residuals, do_THC: jax.Array):
    """Gradients of q, k and v."""
    q, k, v, o, lse2, first_T, end_T = residuals
    return attention_backward(q, k, v, o, lse2, do_THC, first_T, end_T)
