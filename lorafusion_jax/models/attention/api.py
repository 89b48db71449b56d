"""Packed causal attention with isolated segments.

Dims: `T` packed tokens · `H` heads · `K` key heads, H a multiple · `C` head width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from lorafusion_jax.models.attention.cudnn import cudnn_backward, cudnn_forward, on_hopper
from lorafusion_jax.models.attention.cudnn import unsupported_reason as cudnn_unsupported_reason
from lorafusion_jax.models.attention.rule import ScoreRule, checkpointed
from lorafusion_jax.models.attention.xla import xla_backward, xla_forward
from lorafusion_jax.models.segments import Segments
from pallas_kernels import config_store
from pallas_kernels.attention import (
    Described,
    Saved,
    attention_backward,
    attention_forward,
    document_rows,
    unsupported_reason,
)
from pallas_kernels.attention.triton.api import (
    triton_attention_backward,
    triton_attention_forward,
    triton_unsupported_reason,
)
from pallas_kernels.device import device_kind
from pallas_kernels.policy import AttentionImplementation as AttentionImplementation
from pallas_kernels.policy import attention_call

# Keeps NaN and infinity inside their own segment, for attention kernels that do not.
#
# A kernel multiplies other segments by zero weights, and 0 · NaN = NaN. So bad inputs are set to zero first, and the
# rows that they affect are set to NaN afterwards. This costs extra passes over q, o, dO and dq.

ALL_PAIRS = 256  # rows of which every pair is compared: a cumulative maximum is four kernels of a program, this is one
Forward = Callable[..., tuple[jax.Array, Any]]  # q, k, v, segments, rule -> o [T, H·C], residuals
Backward = Callable[..., tuple[jax.Array, jax.Array, jax.Array]]  # residuals, do [T, H, C], rule -> dq, dk, dv


def isolated(forward: Callable, backward: Backward) -> tuple[Forward, Backward]:
    """Wraps forward and backward so that segments are isolated; forward may also return [T, H, C]."""

    def isolated_forward(q, k, v, segments, rule, **sinks):
        bad_q, bad_kv = checkpointed((_bad_rows(q), _bad_rows(k) | _bad_rows(v)))
        o, residuals = forward(_zero_bad_values(q), _zero_bad_values(k), _zero_bad_values(v), segments, rule, **sinks)
        o = _fill_nan(o, bad_q | _affected_rows(bad_kv, segments.ids))
        return o.reshape(len(o), -1), (residuals, bad_q | bad_kv, segments.ids)

    def isolated_backward(everything, do, rule):
        residuals, bad, ids = everything
        dq, dk, dv = backward(residuals, _zero_bad_values(do), rule)
        # A bad row affects the gradients of its whole segment: later queries, earlier keys, and through them the rest.
        spoiled = _whole_segment(bad | _bad_rows(do), ids)
        return _fill_nan(dq, spoiled), _fill_nan(dk, spoiled), _fill_nan(dv, spoiled)

    return isolated_forward, isolated_backward


def _bad_rows(x_THC: jax.Array) -> jax.Array:
    return ~jnp.isfinite(x_THC).all(axis=(1, 2))


def _zero_bad_values(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))


def _fill_nan(x_THC: jax.Array, bad_T: jax.Array) -> jax.Array:
    return jnp.where(bad_T[:, None, None], jnp.asarray(jnp.nan, x_THC.dtype), x_THC)


def _affected_rows(bad_T: jax.Array, ids_T: jax.Array) -> jax.Array:
    """Rows at or after a bad row of their segment. Ids increase, so the id of the last bad row decides."""
    if len(bad_T) <= ALL_PAIRS:
        rows = jnp.arange(len(bad_T))
        return (bad_T & (ids_T[:, None] == ids_T) & (rows[:, None] >= rows)).any(1)
    return lax.cummax(jnp.where(bad_T, jnp.asarray(ids_T), -1)) == ids_T


def _whole_segment(bad_T: jax.Array, ids_T: jax.Array) -> jax.Array:
    if len(bad_T) <= ALL_PAIRS:
        return (bad_T & (ids_T[:, None] == ids_T)).any(1)
    after = _affected_rows(bad_T, ids_T)
    top = jnp.iinfo(jnp.int32).max
    before = lax.cummin(jnp.where(bad_T, jnp.asarray(ids_T), top), reverse=True) == ids_T
    return after | before


# Packed causal attention by our own kernels. Dims: `T` packed tokens, `H` heads, `K` key heads, `C` width.


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


def attention(
    q: Float[Array, "T H C"],
    k: Float[Array, "T K C"],
    v: Float[Array, "T K C"],
    segments: Segments,
    *,
    implementation: AttentionImplementation | None = None,
    flat: bool = False,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "T H C"] | Float[Array, "T H*C"]:
    """Computes attention to the earlier rows of the same segment; H / K query heads share a key head.

    o[t] = Σ_s softmax_s(cap(scale · q[t]·k[s])) v[s],  t - window < s ≤ t, segment(s) = segment(t)
    cap(z) = soft_cap · tanh(z / soft_cap)

    NaN and infinity stay inside their own segment, in forward and backward.

    The residuals have the checkpoint name "attention" (see `checkpoint_names`).

    Args:
        implementation: "pallas_mosaic_gpu" (Hopper; bfloat16 or float16, head width 64 or 128, a multiple of 128 rows),
            "cudnn" (Hopper or later; bfloat16 or float16), "pallas_triton" (compute capability 8.0 or higher; head
            width 16 to 256, a multiple of 64 rows) or "xla" (every device). None: what measured fastest on this device
            or, if nobody measured it, Hopper's kernels, cuDNN or XLA, in this order.
        scale: None: 1 / √C.
        window: rows that a query sees, itself included (None: all earlier ones of its segment); not by cuDNN.
        soft_cap: bound of the scores (None: none); by "pallas_triton" and "xla".
        sinks: score of nothing of each head, constant: softmax's sum has one more term, e^sink; by "xla".
        flat: returns [T, H·C], the input shape of a projection. Our own kernels then save this array for backward
            instead of a second copy in another shape.
    Raises:
        NotImplementedError: the requested implementation does not support these inputs.

    Example:
        >>> x = jax.numpy.ones((8, 2, 16))
        >>> attention(x, x[:, :1], x[:, :1], Segments.from_lengths([3, 5], 8)).shape
        (8, 2, 16)
    """
    C = q.shape[-1]
    factor = C**-0.5 if scale is None else scale
    rule = ScoreRule(channels=C, scale=factor, window=window, soft_cap=soft_cap, sinks=sinks is not None)
    implementation = implementation or default_implementation(q, k, rule)
    if implementation not in _KERNELS:
        raise ValueError(f"implementation={implementation!r} is not one of {', '.join(map(repr, _KERNELS))}")
    if problem := _rule_problem(implementation, rule):
        raise NotImplementedError(f"implementation={implementation!r} {problem}")
    o_TD = _call_isolated(implementation, rule, q, k, v, segments, sinks)
    return o_TD if flat else o_TD.reshape(q.shape)


def default_implementation(q: Described, k: Described, rule: ScoreRule | None = None) -> AttentionImplementation:
    """Returns the fastest implementation for this device, dtype and shape.

    A table of this device's own measurements decides first. Otherwise the choice rests on an H200's, in
    benchmarks/results/attention_h200_2026-11-21/.
    """
    (T, H, C), K = q.shape, k.shape[1]
    fastest = config_store.fastest(
        device_kind(), attention_call(rows=T, heads=H, key_heads=K, width=C, dtype=str(q.dtype))
    )
    if fastest in get_args(AttentionImplementation):
        name = cast(AttentionImplementation, fastest)
        if support_problem(name, q, k, rule) is None:
            return name
    return default_by_rule(q, k, rule)


def default_by_rule(q: Described, k: Described, rule: ScoreRule | None = None) -> AttentionImplementation:
    """The default where no table of this device holds the call."""
    if support_problem("pallas_mosaic_gpu", q, k, rule) is None:
        return "pallas_mosaic_gpu"
    if support_problem("cudnn", q, k, rule) is None:
        return "cudnn"
    # Triton's kernels lose to cuDNN; where it has no such scores, they skip blocks as XLA's form does, in one pass.
    special = rule is not None and not rule.is_plain and on_hopper(or_later=True)
    return "pallas_triton" if special and support_problem("pallas_triton", q, k, rule) is None else "xla"


def support_problem(
    name: AttentionImplementation, q: Described, k: Described, rule: ScoreRule | None = None
) -> str | None:
    """Why an implementation cannot serve these inputs on this device; None if it can."""
    if rule is not None and (problem := _rule_problem(name, rule)):
        return problem
    if name == "pallas_mosaic_gpu":
        return unsupported_reason(q, k) if on_hopper() else "needs a Hopper GPU"
    if name == "cudnn":
        return cudnn_unsupported_reason(q) if on_hopper(or_later=True) else "needs a Hopper GPU or a later one"
    return triton_unsupported_reason(q, k) if name == "pallas_triton" else None


def _rule_problem(name: AttentionImplementation, rule: ScoreRule) -> str | None:
    """Why an implementation cannot compute these scores on any device; None if it can."""
    if rule.soft_cap is not None and name in ("pallas_mosaic_gpu", "cudnn"):
        return "has no soft cap of scores"
    if rule.sinks and name != "xla":
        return "has no sinks"
    if rule.window is not None and name == "cudnn":
        return "has no windows for packed samples"
    return None


# forward: (q, k, v, segments, rule) -> o [T, H·C], residuals; backward: (residuals, do [T, H, C], rule) -> dq, dk, dv.
_KERNELS: dict[str, tuple[Forward, Backward]] = {
    "xla": isolated(xla_forward, xla_backward),
    "cudnn": isolated(cudnn_forward, cudnn_backward),
    "pallas_triton": isolated(triton_forward, triton_backward),
    "pallas_mosaic_gpu": (hopper_forward, hopper_backward),
}


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _call_isolated(implementation, rule, q, k, v, segments, sinks):
    return _isolated_fwd(implementation, rule, q, k, v, segments, sinks)[0]


def _isolated_fwd(implementation, rule, q, k, v, segments, sinks):
    options = {} if sinks is None else {"sinks": sinks}
    return _KERNELS[implementation][0](q, k, v, segments, rule, **options)


def _isolated_bwd(implementation, rule, residuals, do_TD):
    do_THC = do_TD.reshape(len(do_TD), -1, rule.channels)
    return *_KERNELS[implementation][1](residuals, do_THC, rule), None, None


_call_isolated.defvjp(_isolated_fwd, _isolated_bwd)
