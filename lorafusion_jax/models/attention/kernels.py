"""Packed causal attention by our own kernels. Dims: `T` packed tokens, `H` heads, `K` key heads, `C` width."""

from __future__ import annotations

import jax

from lorafusion_jax.models.attention.checkpoint_names import checkpointed
from lorafusion_jax.models.attention.rule import ScoreRule
from lorafusion_jax.models.segments import Segments
from pallas_kernels.attention import Saved, attention_backward, attention_forward, document_rows
from pallas_kernels.attention.triton.api import triton_attention_backward, triton_attention_forward


def hopper_forward(q_THC: jax.Array, k_TKC: jax.Array, v_TKC: jax.Array, segments: Segments, rule: ScoreRule):
    """Returns softmax(scale · q kᵀ) v over the earlier rows of the same segment as [T, H·C], and the residuals.

    The result is also a residual. It has the shape that the caller uses, so that only one copy is saved.
    """
    first_T, end_T = document_rows(segments.ids, segments.offsets, segments.lengths, rule.window)
    o_THC, saved = attention_forward(q_THC, k_TKC, v_TKC, first_T, end_T, scale=rule.scale)
    saved = checkpointed(saved._replace(o_THC=o_THC.reshape(len(o_THC), -1)))
    return saved.o_THC, saved


def hopper_backward(saved: Saved, do_THC: jax.Array, rule: ScoreRule):
    """Gradients of q, k and v."""
    return attention_backward(saved._replace(o_THC=saved.o_THC.reshape(do_THC.shape)), do_THC, scale=rule.scale)


def triton_forward(q_THC: jax.Array, k_TKC: jax.Array, v_TKC: jax.Array, segments: Segments, rule: ScoreRule):
    """The same on any GPU, where inputs are finite; scores may be capped."""
    first_T, end_T = document_rows(segments.ids, segments.offsets, segments.lengths, rule.window)
    _, saved = triton_attention_forward(q_THC, k_TKC, v_TKC, first_T, end_T, scale=rule.scale, soft_cap=rule.soft_cap)
    saved = checkpointed(saved)
    return saved.o_THC, saved


def triton_backward(saved: Saved, do_THC: jax.Array, rule: ScoreRule):
    """Gradients of q, k and v."""
    return triton_attention_backward(saved, do_THC, scale=rule.scale, soft_cap=rule.soft_cap)
