"""Packed causal attention by our own Hopper kernels. Dims: `T` packed tokens, `H` heads, `K` key heads, `C` width."""

from __future__ import annotations

import jax

from pallas_kernels.attention import Saved, attention_backward, attention_forward, document_rows

from .attention_kept import kept
from .segments import Segments


def pallas_forward(q_THC: jax.Array, k_TKC: jax.Array, v_TKC: jax.Array, segments: Segments):
    """softmax(q kᵀ / √C) v over the earlier rows of the same segment; and what backward needs."""
    first_T, end_T = document_rows(segments.ids, segments.offsets, segments.lengths)
    _, saved = attention_forward(q_THC, k_TKC, v_TKC, first_T, end_T)
    saved = kept(saved)
    return saved.o_THC, saved


def pallas_backward(saved: Saved, do_THC: jax.Array):
    """Gradients of q, k and v."""
    return attention_backward(saved, do_THC)
