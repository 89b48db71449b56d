"""Packed causal attention with isolated segments.

Dims: `T` packed tokens · `H` heads · `K` key heads, H a multiple · `C` head width.
"""

from __future__ import annotations

from functools import partial
from typing import cast, get_args

import jax
from jaxtyping import Array, Float

from lorafusion_jax.models.attention.cudnn import cudnn_backward, cudnn_forward, on_hopper
from lorafusion_jax.models.attention.cudnn import unsupported_reason as cudnn_unsupported_reason
from lorafusion_jax.models.attention.kernels import hopper_backward, hopper_forward, triton_backward, triton_forward
from lorafusion_jax.models.attention.nan_isolation import Backward, Forward, isolated
from lorafusion_jax.models.attention.rule import ScoreRule
from lorafusion_jax.models.attention.xla import xla_backward, xla_forward
from lorafusion_jax.models.segments import Segments
from pallas_kernels import config_store
from pallas_kernels.attention import Described, unsupported_reason
from pallas_kernels.attention.triton.api import triton_unsupported_reason
from pallas_kernels.device import device_kind
from pallas_kernels.policy import AttentionImplementation as AttentionImplementation
from pallas_kernels.policy import attention_call


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
    measured = config_store.fastest(
        device_kind(), attention_call(rows=T, heads=H, key_heads=K, width=C, dtype=str(q.dtype))
    )
    if measured in get_args(AttentionImplementation):
        name = cast(AttentionImplementation, measured)
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
